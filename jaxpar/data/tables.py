"""The rows of parquet and Arrow files, read by pyarrow."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpar.data.bad_rows import BadRow
from jaxpar.data.rows import DataRow, checked_text
from jaxpar.errors import DataError, did_you_mean, listing
from jaxpar.utils.extras import import_extra

_ROWS = 1024


def table_rows(file: Path, kind: str, text_field: str) -> Iterator[DataRow]:
    """Yields the rows of a parquet file, or of an Arrow file or stream, reading the column of the text only.

    Args:
      file: its path.
      kind: ``parquet`` or ``arrow``.
      text_field: the column of the text.

    Raises:
      DataError: the file is not of this format, is damaged, or has no such column.
      MissingExtraError: pyarrow is not installed.
      OSError: the file cannot be read.
    """
    pyarrow = import_extra("pyarrow", "text", f"the {kind} file {file.name}")
    size, number = file.stat().st_size, 0
    batches = _parquet(file, text_field) if kind == "parquet" else _arrow(pyarrow, file, text_field)
    try:
        for column, read in batches:
            for content in _texts(pyarrow, column, text_field):
                number += 1
                yield DataRow(number, content, min(size, int(read * size)))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{file}: it cannot be read as {kind} after row {number}: {error}. Remedy: copy or write it again."
        ) from error


def _parquet(file: Path, text_field: str) -> Iterator[tuple[Any, float]]:
    """The column in pieces, and the fraction of the file that is read."""
    with importlib.import_module("pyarrow.parquet").ParquetFile(file) as table:
        _check_column(file, text_field, table.schema_arrow.names)
        rows, read = table.metadata.num_rows, 0
        for batch in table.iter_batches(_ROWS, columns=[text_field]):
            read += batch.num_rows
            yield batch.column(0), read / rows


def _arrow(pyarrow: Any, file: Path, text_field: str) -> Iterator[tuple[Any, float]]:
    with pyarrow.memory_map(str(file)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
        except pyarrow.ArrowInvalid:  # the format of a stream, such as the library datasets writes
            source.seek(0)
            reader = pyarrow.ipc.open_stream(source)
            _check_column(file, text_field, reader.schema.names)
            for batch in reader:
                yield batch.column(text_field), source.tell() / source.size()
            return
        _check_column(file, text_field, reader.schema.names)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index).column(text_field), (index + 1) / reader.num_record_batches


def _check_column(file: Path, text_field: str, names: list[str]) -> None:
    if names.count(text_field) != 1:
        raise DataError(
            f"{file}: it has no column {text_field!r}, but {listing(names)}.{did_you_mean(text_field, names)} Remedy: "
            "text_field: the name of the column that holds the text."
        )


def _texts(pyarrow: Any, column: Any, text_field: str) -> Iterator[bytes | BadRow]:
    for value in column:
        try:
            text = value.as_py()
        except (UnicodeDecodeError, pyarrow.ArrowException) as error:
            yield BadRow(f"its field {text_field!r} cannot be decoded: {error}")
        else:
            yield checked_text(text, text_field)
