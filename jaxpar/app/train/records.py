"""Read the records of an earlier run; whatever is wrong with the file, the run resumes from its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.validate import opened
from jaxpar.utils.checks import is_count

_NUMBERS = ("loss", "heldout_loss", "step_seconds", "data_seconds", "elapsed", "wall_seconds", "began")
"""The entries of a record that a resumed run computes with."""
_TOGETHER = {"elapsed": ("step_seconds",), "spent": ("wall_seconds", "began")}
"""Entries that an entry needs beside it."""
RESERVED = frozenset({"step", "rollback_to", "mfu", "tokens_per_second", "examples_per_second", *_NUMBERS, *_TOGETHER})
"""Entries that the run itself writes; a metric of the loss under such a name would be read as the run's."""


def read_records(file: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``, oldest first; a missing file has none.

    A last line that a kill cut short is dropped. If the file cannot be read, or other lines are damaged, the original
    is kept beside it under another name, and ``tell`` is called with the reason.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "metrics.jsonl"
    ...     _ = file.write_text('{"step": 1, "loss": 2.5}\\n{"step": 2, "lo')
    ...     read_records(file, print)
    [{'step': 1, 'loss': 2.5}]
    """
    try:
        with opened(file.parent, file.name) as f:
            *lines, last = f.readall().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        _set_aside(file, f"it cannot be read: {error.strerror}, so this run starts without earlier metrics", tell)
        return []
    found = [_record(line) for line in lines]
    records = [record for record in found if record is not None]
    if len(records) < len(found):
        text = f"{len(found) - len(records)} of its {len(found)} lines are damaged, and the others are kept"
        _set_aside(file, text, tell)
    # A complete record without a line break is a line that a kill cut short, too.
    return records if (record := _record(last)) is None else [*records, record]


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line, or ``None`` if a resumed run could not compute with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_count(record.get("step"), 0):
        return None
    spent = record.get("spent", {})
    numbers = [record[name] for name in _NUMBERS if name in record]
    good = (
        isinstance(spent, Mapping)
        and all(_number(value) for value in (*numbers, *spent.values()))
        and is_count(record.get("rollback_to", 0), 0)
        and all(name in record for first, names in _TOGETHER.items() if first in record for name in names)
    )
    return record if good else None


def _number(value: Any) -> bool:
    """Whether a value is a number as the writer writes it: the infinities and NaN as strings."""
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _set_aside(file: Path, why: str, tell: Callable[[str], None]) -> None:
    """Rename the file, and say so."""
    number = next(n for n in range(1, 10**6) if not os.path.lexists(f"{file}.damaged{n}"))
    aside = file.with_name(f"{file.name}.damaged{number}")
    try:
        os.rename(file, aside)
        tell(f"metrics: {file}: {why}. The file is now {aside}.")
    except OSError as error:
        tell(f"metrics: {file}: {why}. It cannot be renamed: {error.strerror}.")
