"""What became of every key of an imported configuration: translated, ignored with the reason, or refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import shown

type KeyStatus = Literal["translated", "ignored", "refused"]

_WIDEST = 40
"""Characters of a value in the table."""


@dataclass(frozen=True)
class KeyRow:
    """One key of the imported configuration.

    Attributes:
      key: its path, such as ``parallel_config.data_parallel``.
      value: its value in the file; ``None`` also for a default of the other system.
      status: ``translated`` keys are in our configuration. ``ignored`` keys do not change what a run computes, or do
        not apply here. ``refused`` keys have no counterpart.
      target: the keys of our configuration that it became, such as ``mesh.data``; empty unless translated.
      note: the reason, or how the translation differs.
    """

    key: str
    value: Any
    status: KeyStatus
    target: str = ""
    note: str = ""


@dataclass(frozen=True)
class ImportReport:
    """The rows of an import, in the order of the file.

    >>> row = KeyRow("parallel_config.data_parallel", 2, "translated", "mesh.data")
    >>> print(ImportReport("run.yaml", [row]).to_text())
    key                            value  status      becomes
    parallel_config.data_parallel  2      translated  mesh.data
    run.yaml: 1 translated, 0 ignored, 0 refused
    """

    source: str
    rows: list[KeyRow] = field(default_factory=list)

    def count(self, status: KeyStatus) -> int:
        """Returns the number of rows with a status."""
        return sum(row.status == status for row in self.rows)

    def headline(self) -> str:
        """Returns the number of keys of each status."""
        statuses: tuple[KeyStatus, ...] = ("translated", "ignored", "refused")
        return f"{self.source}: {', '.join(f'{self.count(status)} {status}' for status in statuses)}"

    def table(self) -> list[tuple[str, str, str, str]]:
        """Returns the cells of the table: key, value, status, and what it becomes or why not."""
        becomes = lambda row: "; ".join(filter(None, (row.target, row.note)))
        return [(row.key, _short(row.value), row.status, becomes(row)) for row in self.rows]

    def to_text(self) -> str:
        """Returns the table and the headline as text."""
        cells = [("key", "value", "status", "becomes"), *self.table()]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        lines = ["  ".join((*(row[i].ljust(widths[i]) for i in range(3)), row[3])).rstrip() for row in cells]
        return "\n".join((*lines, self.headline()))

    def to_json(self) -> str:
        """Returns the rows as a JSON object with the keys ``source`` and ``rows``."""
        return json.dumps({"source": self.source, "rows": [asdict(row) for row in self.rows]}, indent=2, default=str)

    def check(self) -> None:
        """Checks that no key is refused.

        Raises:
          ConfigError: lists the refused keys with their reasons.
        """
        refused = [row for row in self.rows if row.status == "refused"]
        if refused:
            lines = [f"{self.source}: {len(refused)} key{'s' if len(refused) > 1 else ''} cannot be translated:"]
            for row in refused:
                lines.append(f"- {row.key}{'' if row.value is None else f': {_short(row.value)}'}: {row.note}")
            lines.append("Remedy: change or remove them, or import without them: --ignore KEY.")
            raise ConfigError("\n".join(lines))


@dataclass(frozen=True)
class ImportedRun:
    """An imported configuration.

    Attributes:
      config: a run of jaxpar as plain data, as its YAML file has it.
      report: what became of every key.
      devices: the number of devices that the configuration is for.
    """

    config: dict[str, Any]
    report: ImportReport
    devices: int


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else shown(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
