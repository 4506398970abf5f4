"""Documents of text: each file of a folder, each row of its data files, or one of the two texts that have a name."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from jaxpar.data.bad_rows import BadRow, BadRows
from jaxpar.data.rows import DataRow, jsonl_rows
from jaxpar.data.synthetic import synthetic_documents
from jaxpar.data.tables import table_rows
from jaxpar.errors import DataError, did_you_mean, listing

PATTERNS: dict[str, tuple[str, ...]] = {
    "text": ("*.txt", "*.md", "*.rst", "*.py"),
    "jsonl": ("*.jsonl", "*.ndjson", "*.jsonl.gz"),
    "parquet": ("*.parquet",),
    "arrow": ("*.arrow", "*.feather"),
}
"""Names of the files of each format."""
NAMED_SOURCES = ("stdlib", "synthetic")

# Third-party packages live below the stdlib folder but differ from machine to machine. Caches are not text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class Document(NamedTuple):
    """A document.

    Attributes:
      key: what identifies it within its source: the file's relative path, and for a row ``:`` and its number.
      content: its bytes.
      place: its file, and the number of its row, for errors.
    """

    key: str
    content: bytes
    place: str = ""


@dataclass(frozen=True)
class ReadOptions:
    """How the files of a source are read.

    Attributes:
      format: ``text``: each file is a document; ``jsonl``: each line is a JSON object with a text; ``parquet``,
        ``arrow``: each row has a column with a text; ``auto``: as the names of the files say. In a folder, files of
        rows go before plain text beside them, such as a README.
      text_field: the field of a row that holds its text.
      bad_rows: ``error``, or ``skip``, which counts and reports rows without text.
      patterns: shell patterns of the file names to read from a folder; by default those of the format.
    """

    format: Literal["auto", "text", "jsonl", "parquet", "arrow"] = "auto"
    text_field: str = "text"
    bad_rows: Literal["error", "skip"] = "error"
    patterns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DocumentFiles:
    """The files of a source, and their documents; :func:`find_documents` makes it.

    Attributes:
      name: of the source.
      format: of the files.
      files: relative path and path of each, sorted.
      options: how they are read.
      seed: of the synthetic text.
    """

    name: str
    format: str
    files: tuple[tuple[str, Path], ...]
    options: ReadOptions
    seed: int = 0

    @cached_property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(path.stat().st_size for _, path in self.files)

    @property
    def unit(self) -> str:
        """What a document is: a file, a row, or a part of the only file."""
        return "rows" if self.format != "text" else "parts" if len(self.files) == 1 else "files"

    def read(self, bad: BadRows, progress: Callable[[int], object] | None = None) -> Iterator[Document]:
        """Yields the documents that are not empty, in the same order in every call.

        Args:
          bad: counts the rows without text, or raises an error.
          progress: called with the number of bytes of the files that are read.

        Raises:
          DataError: a row has no text and ``bad`` says that this is an error, or a file is damaged.
          OSError: a file cannot be read.
        """
        if not self.files:
            yield from (Document(*found) for found in synthetic_documents(self.seed))
            return
        before = 0
        for relative, path in self.files:
            size = path.stat().st_size
            for row in self._rows(path):
                key, place = relative, str(path)
                if self.format != "text":
                    key, place = f"{relative}:{row.number}", f"{path} row {row.number}"
                if isinstance(row.content, BadRow):
                    bad.add(place, row.content)
                elif row.content:
                    yield Document(key, row.content, place)
                if progress is not None:
                    progress(before + row.position)
            before += size

    def _rows(self, path: Path) -> Iterator[DataRow]:
        if self.format == "text":
            content = path.read_bytes()
            return iter((DataRow(1, content, len(content)),))
        if self.format == "jsonl":
            return jsonl_rows(path, self.options.text_field)
        return table_rows(path, self.format, self.options.text_field)


def find_documents(source: str | os.PathLike[str], options: ReadOptions, seed: int = 0) -> DocumentFiles:
    """Returns the files of a source: ``stdlib``, ``synthetic``, a folder or a file.

    Raises:
      DataError: the source is unknown, no file matches, files of several formats do, or an option has no effect on it.
      OSError: a folder cannot be read.
    """
    files = _documents(source, options, seed)
    where = f"text source {os.fspath(source)!r}"
    if options.text_field != ReadOptions.text_field and files.format == "text":
        raise DataError(
            f"{where}: text_field {options.text_field!r} has no effect, because the files are plain text, without "
            "fields. Remedy: leave text_field out, or format: jsonl."
        )
    if options.patterns is not None and (source in NAMED_SOURCES or Path(source).expanduser().is_file()):
        raise DataError(f"{where}: patterns have no effect, because it is no folder. Remedy: leave patterns out.")
    if options.format not in ("auto", "text") and source in NAMED_SOURCES:
        raise DataError(f"{where}: format {options.format!r} has no effect on it. Remedy: leave format out.")
    return files


def _documents(source: str | os.PathLike[str], options: ReadOptions, seed: int) -> DocumentFiles:
    if source == "synthetic":
        return DocumentFiles("synthetic", "text", (), options, seed)
    if source == "stdlib":
        folder = Path(sysconfig.get_path("stdlib"))
        return DocumentFiles("stdlib", "text", _found(folder, ("*.py",)), options)
    path = _existing(os.fspath(source))
    if path.is_file():
        kind = options.format if options.format != "auto" else _format_of(path.name)
        return DocumentFiles(path.name, kind, ((path.name, path),), options)
    kind = options.format if options.format != "auto" else _format_in(path, options)
    return DocumentFiles(path.resolve().name, kind, _found(path, options.patterns or PATTERNS[kind]), options)


def _format_of(name: str) -> str:
    kinds = (kind for kind, patterns in PATTERNS.items() if any(fnmatchcase(name, p) for p in patterns))
    return next(kinds, "text")


def _format_in(folder: Path, options: ReadOptions) -> str:
    """The format of a folder's files of rows, if it has any, else ``text``."""
    patterns = sum(PATTERNS.values(), ()) if options.patterns is None else options.patterns
    names = {path.name for _, path in _matching(folder, patterns)}
    kinds = sorted({_format_of(name) for name in names} - {"text"})
    if len(kinds) > 1:
        raise DataError(
            f"text source {str(folder)!r} has files of the formats {listing(kinds)}. Remedy: format: {kinds[0]}, or a "
            "folder for each."
        )
    return kinds[0] if kinds else "text"


def _existing(source: str) -> Path:
    """Returns the path ``source``, or raises a DataError that tells a mistyped name from a wrong path."""
    path = Path(source).expanduser()
    if source and (os.path.isdir(path) or os.path.isfile(path)):  # of a name that is too long, Path would raise
        return path
    if path.name == source or not source:
        raise DataError(
            f"unknown text source {source!r}: neither a folder or file here nor one of {listing(NAMED_SOURCES)}."
            f"{did_you_mean(source, NAMED_SOURCES)} Remedy: use one of these names, or the path of a folder or file."
        )
    raise DataError(f"text source {source!r}: there is no such folder or file. Remedy: check the path.")


def _found(folder: Path, patterns: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Returns every non-empty file below ``folder`` whose name matches, sorted by relative POSIX path."""
    paths = sorted(_matching(folder, patterns), key=lambda found: found[0])
    files = tuple((relative, path) for relative, path in paths if path.stat().st_size)
    if not files:
        found = "every matching file is empty" if paths else "no file matches"
        raise DataError(
            f"text source {str(folder)!r}: {found} (patterns: {listing(patterns)}; subfolders were searched, hidden "
            "ones were not). Remedy: patterns that match your files."
        )
    return files


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield ``(relative POSIX path, path)`` of each file below ``folder`` whose name matches a pattern, unsorted."""
    # By default os.walk skips folders that it cannot list, and a text without a subfolder would look complete.
    for parent, folders, names in os.walk(folder, onerror=_reraise):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and any(fnmatchcase(name, p) for p in patterns) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _reraise(error: OSError) -> None:
    raise error
