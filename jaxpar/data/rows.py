"""The rows of data files: the text of each row of a jsonl file, or why it has none."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from jaxpar.data.bad_rows import BadRow
from jaxpar.errors import DataError
from jaxpar.utils.checks import shown

MOST_BYTES = 1 << 28
"""A longer line of a jsonl file is a bad row: it would be read into memory."""


class DataRow(NamedTuple):
    """A row of a file.

    Attributes:
      number: from 1; in a jsonl file that of its line.
      content: its text as UTF-8, or why it has none.
      position: bytes of the file that are read.
    """

    number: int
    content: bytes | BadRow
    position: int


def jsonl_rows(file: Path, text_field: str) -> Iterator[DataRow]:
    """Yields the rows of a jsonl file; empty lines are skipped.

    Args:
      file: its path; a name that ends in ``.gz`` is decompressed.
      text_field: the key of the text in each line's object.

    Raises:
      DataError: the compressed data is damaged.
      OSError: the file cannot be read.
    """
    for number, row, position in jsonl_objects(file):
        yield DataRow(number, row if isinstance(row, BadRow) else _text_of(row, text_field), position)


def jsonl_objects(file: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow, int]]:
    """Yields number, object and position of each line of a jsonl file; arguments and errors as :func:`jsonl_rows`."""
    number = 0
    with file.open("rb") as raw:
        lines: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if file.suffix == ".gz" else raw
        try:
            while line := lines.readline(MOST_BYTES + 1):
                number += 1
                if len(line) > MOST_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(MOST_BYTES)
                    yield number, BadRow(f"the line is longer than {MOST_BYTES:,} bytes"), raw.tell()
                elif line.strip():
                    yield number, _parsed(line, first=number == 1), raw.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{file}: the compressed data is damaged after line {number}: {error}. Remedy: copy the file again."
            ) from error


def _parsed(line: bytes, *, first: bool) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line.rstrip().decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"byte {error.start} of the line is not valid UTF-8")
    except RecursionError:
        return BadRow("it is nested too deeply")
    except json.JSONDecodeError as error:
        return BadRow(f"it is not JSON: {error.msg}, at character {error.pos + 1}")
    except ValueError as error:  # a number of too many digits
        return BadRow(f"it cannot be read: {error}")
    return row if isinstance(row, dict) else BadRow(f"it is not an object, but {shown(row)}")


def _text_of(row: dict[str, Any], text_field: str) -> bytes | BadRow:
    if text_field not in row:
        remedy = f"text_field: {shown(next(iter(row)))[1:-1]}" if row else ""
        return BadRow(f"it has no field {text_field!r}, but {shown(list(row))[1:-1] or 'none'}", remedy)
    return checked_text(row[text_field], text_field)


def checked_text(value: Any, text_field: str) -> bytes | BadRow:
    """Returns the value of a text field as UTF-8, or why it is no text.

    >>> checked_text("abc", "text")
    b'abc'
    >>> checked_text("", "text").reason
    "its field 'text' is empty"
    """
    if not isinstance(value, str):
        return BadRow(f"its field {text_field!r} is not text, but {shown(value)}")
    if not value:
        return BadRow(f"its field {text_field!r} is empty")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        return BadRow(f"its field {text_field!r} has half a character at position {error.start}")
