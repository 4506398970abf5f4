"""``Store``: rows of bytes in files, in two generations, so that a kill at any moment leaves one that is complete.

A step reads one generation and writes the other. The new one becomes current when a small record that names it is
replaced atomically. Files are read and written rather than memory-mapped: a full or broken disk is then an error
instead of a signal, and the bytes in memory can be counted. This module does not import jax.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import DiskError
from jaxpar.utils.durable import PRIVATE, Lock, open_regular, sync_folder, write_atomically

RECORD, VERSION = "record.json", 1
NAMES = ("a", "b")


@dataclass(frozen=True)
class Entry:
    """A tensor in the store.

    Attributes:
      name: its name in errors and file names.
      rows: the number of rows.
      row_bytes: bytes per row.
      about: JSON data; a store whose data differ is not opened.
    """

    name: str
    rows: int
    row_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Generation:
    """The metadata of one complete copy of the state.

    Attributes:
      first, last: the steps after which the state was this one; a skipped step does not change it.
      sums: a checksum (CRC-32) of each row of each tensor.
    """

    first: int
    last: int
    sums: tuple[tuple[int, ...], ...]


class Store:
    """A folder (mode 0700) of one process, locked until :meth:`close`.

    Args:
      path: the folder; it is created if it is missing.
      entries: the tensors.
      about: JSON data about the run; a store that another run wrote is not opened.

    Raises:
      DiskError: another run has locked the folder, or it cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], entries: Sequence[Entry], about: Mapping[str, Any]):
        self.path, self.entries = Path(path), tuple(entries)
        self._about: dict[str, Any] = json.loads(json.dumps(about))
        self._files: dict[tuple[str, int], int] = {}
        self._generations: dict[str, Generation] = {}
        self._current, self._sums = "", [[0] * entry.rows for entry in self.entries]
        self.bytes_read = self.bytes_written = 0
        with self._wrap_os_errors("creating the folder"):
            for folder in (*reversed([p for p in self.path.parents if not p.exists()]), self.path):
                folder.mkdir(mode=0o700, exist_ok=True)
            self.path.chmod(0o700)
            self._lock = Lock(self.path, DiskError, DiskError)

    @property
    def bytes(self) -> int:
        """The size of one generation."""
        return sum(entry.bytes for entry in self.entries)

    def exists(self) -> bool:
        """Returns whether there is a record, and so a complete generation."""
        return (self.path / RECORD).exists()

    def create(self) -> None:
        """Creates the files of both generations, filled with zeros and with their disk space reserved.

        Afterwards the caller writes rows with :meth:`write` and then calls :meth:`commit`.

        Raises:
          DiskError: the disk has too little room.
        """
        for name in NAMES:
            for number in range(len(self.entries)):
                self._make(name, number)
        zeros = [zlib.crc32(bytes(entry.row_bytes)) for entry in self.entries]
        self._sums = [[zero] * entry.rows for zero, entry in zip(zeros, self.entries, strict=True)]
        # The second generation counts as the current one, so that the first is written.
        self._generations, self._current = {}, NAMES[1]

    def open(self, step: int) -> None:
        """Makes the generation that was the state after ``step`` the current one.

        Raises:
          DiskError: the record is missing, cannot be read, or is of another step, run or shape; or a file is missing or
            truncated.
        """
        record = self._read_record(self.path / RECORD)
        self._compare(record)
        self._generations = _generations(record)
        if not (fitting := [name for name, g in self._generations.items() if g.first <= step <= g.last]):
            steps = sorted((g.last for g in self._generations.values()), reverse=True)
            steps_text = " and ".join(f"step {n}" for n in steps)
            raise DiskError(
                f"{self.path} holds the optimizer state of {steps_text}, but the training state is at step {step}. "
                f"Remedy: use a training state of {steps_text.replace(' and ', ' or ')}, restore a snapshot of step "
                f"{step} (restore=), or use another path."
            )
        self._current = fitting[0]
        here = self._generations[self._current]
        self._generations[self._current] = Generation(here.first, step, here.sums)  # discards later steps
        for number, entry in enumerate(self.entries):
            file = self._file(self._current, number)
            if not file.exists():
                raise DiskError(f"{file}, which stores {entry.name}, is missing. {_SNAPSHOT}")
            if (size := file.stat().st_size) != entry.bytes:
                raise DiskError(
                    f"{file}, which stores {entry.name}, must have {entry.bytes:,} bytes, but has {size:,}. {_SNAPSHOT}"
                )

    def read(self, number: int, row: int) -> np.ndarray:
        """Returns a row of the current generation, uint8 ``[row_bytes]``.

        Raises:
          DiskError: the disk failed, or the checksum of the row is wrong.
        """
        entry, file = self.entries[number], self._file(self._current, number)
        buffer = np.empty(entry.row_bytes, np.uint8)
        with self._wrap_os_errors(f"reading {entry.name}"):
            view, at, f = memoryview(buffer), row * entry.row_bytes, self._descriptor(self._current, number)
            while len(view):
                if not (got := os.preadv(f, [view], at)):
                    raise DiskError(f"{file}, which stores {entry.name}, ends within row {row}. {_SNAPSHOT}")
                view, at = view[got:], at + got
        expected = self._generations[self._current].sums[number][row]
        if (found := zlib.crc32(buffer)) != expected:
            raise DiskError(
                f"{file}: row {row} of {entry.name} is corrupt: its checksum is {found:08x}, expected {expected:08x}. "
                f"{_SNAPSHOT}"
            )
        self.bytes_read += entry.row_bytes
        return buffer

    def begin(self) -> None:
        """Discards the generation before the current one, so that its files can be written.

        Raises:
          DiskError: the disk has too little room for a second generation.
        """
        other = self._other
        if self._generations.pop(other, None) is not None:
            self._write_record()  # first, or a kill would leave a record that names incomplete files
        self._sums = [[-1] * entry.rows for entry in self.entries]
        for number, entry in enumerate(self.entries):
            file = self._file(other, number)
            # A snapshot may share the file by a hard link. It keeps that file, and the store creates a new one.
            if not file.exists() or file.stat().st_nlink > 1 or file.stat().st_size != entry.bytes:
                self._make(other, number)

    def write(self, number: int, row: int, buffer: np.ndarray) -> None:
        """Writes a row of the next generation.

        Args:
          number: the index of the tensor in ``entries``.
          row: the row.
          buffer: contiguous bytes, uint8 ``[row_bytes]``.

        Raises:
          DiskError: the disk is full or failed; the current generation is not changed.
        """
        entry = self.entries[number]
        with self._wrap_os_errors(f"writing {entry.name}"):
            view, at, f = memoryview(buffer), row * entry.row_bytes, self._descriptor(self._other, number)
            while len(view):
                done = os.pwrite(f, view, at)
                view, at = view[done:], at + done
        self._sums[number][row] = zlib.crc32(buffer)
        self.bytes_written += entry.row_bytes

    def commit(self, step: int) -> None:
        """Waits until all rows have reached the disk, and makes them the current generation, that of ``step``.

        Raises:
          DiskError: a row was not written, or the disk failed; the current generation is not changed.
        """
        other = self._other
        for number, entry in enumerate(self.entries):
            if -1 in self._sums[number]:
                raise DiskError(f"row {self._sums[number].index(-1)} of {entry.name} was not written in step {step}.")
            with self._wrap_os_errors(f"writing {entry.name}"):
                os.fsync(self._descriptor(other, number))
        made = Generation(step, step, tuple(map(tuple, self._sums)))
        self._write_record({**self._generations, other: made})
        self._generations[other], self._current = made, other

    def skip(self, step: int) -> None:
        """Records that ``step`` did not change the state, so the current generation is its state too."""
        here = self._generations[self._current]
        made = {name: g for name, g in self._generations.items() if g.last < step}  # discards later steps
        made[self._current] = Generation(here.first, step, here.sums)
        self._write_record(made)
        self._generations = made

    def snapshot(self, folder: str | os.PathLike[str]) -> None:
        """Writes the current generation to another folder, by hard links or, where these are not possible, by copies.

        Raises:
          DiskError: the folder has a snapshot already, or the disk has too little room.
        """
        target = Path(folder)
        with self._wrap_os_errors(f"writing a snapshot to {target}"):
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (target / RECORD).exists():
                raise DiskError(f"{target} already contains a snapshot. Remedy: use another folder.")
            for number in range(len(self.entries)):
                source = self._file(self._current, number)
                (target / source.name).unlink(missing_ok=True)  # left by a snapshot that was interrupted
                _link(source, target / source.name)
            sync_folder(target)
            self._write_record({self._current: self._generations[self._current]}, target)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replaces the state by a snapshot; the caller then calls :meth:`open`.

        Raises:
          DiskError: there is no snapshot, it is of another run, or one of its files is missing.
        """
        source = Path(folder)
        record = self._read_record(source / RECORD)
        self._compare(record)
        with self._wrap_os_errors(f"restoring the snapshot in {source}"):
            # Until the new record is written, a kill leaves a store without a state rather than a mixture.
            (self.path / RECORD).unlink(missing_ok=True)
            sync_folder(self.path)
            self._close_files()
            generations = _generations(record)
            for name in generations:
                for number, entry in enumerate(self.entries):
                    file = self._file(name, number)
                    if not (source / file.name).exists():
                        raise DiskError(f"{source / file.name}, which stores {entry.name}, is missing.")
                    file.unlink(missing_ok=True)
                    _link(source / file.name, file)
            self._write_record(generations)

    def close(self) -> None:
        """Closes all files and unlocks the folder."""
        self._close_files()
        self._lock.release()

    @property
    def _other(self) -> str:
        return NAMES[self._current == NAMES[0]]

    def _file(self, generation: str, number: int) -> Path:
        safe = re.sub(r"[^\w.-]+", ".", self.entries[number].name)[-80:]
        return self.path / f"{number:04}.{safe}.{generation}"

    def _descriptor(self, generation: str, number: int) -> int:
        if (generation, number) not in self._files:
            self._files[generation, number] = open_regular(self._file(generation, number), os.O_RDWR)
        return self._files[generation, number]

    def _make(self, generation: str, number: int) -> None:
        """Creates a file of zeros with its space reserved, so that later writes cannot find the disk full."""
        file, entry = self._file(generation, number), self.entries[number]
        if (old := self._files.pop((generation, number), None)) is not None:
            os.close(old)
        with self._wrap_os_errors(f"allocating {entry.bytes:,} bytes for {entry.name}"):
            file.unlink(missing_ok=True)
            f = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
            self._files[generation, number] = f
            if entry.bytes:
                os.posix_fallocate(f, 0, entry.bytes)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _record(self, generations: Mapping[str, Generation]) -> dict[str, Any]:
        entries = [{"name": e.name, "rows": e.rows, "row_bytes": e.row_bytes, **e.about} for e in self.entries]
        made = {name: {"first": g.first, "last": g.last, "sums": g.sums} for name, g in sorted(generations.items())}
        found = {"version": VERSION, "about": self._about, "entries": entries, "generations": made}
        return dict(json.loads(json.dumps(found)))

    def _write_record(self, generations: Mapping[str, Generation] | None = None, folder: Path | None = None) -> None:
        folder = folder or self.path
        record = self._record(self._generations if generations is None else generations)
        text = json.dumps({"checksum": _checksum(record), "record": record})
        with self._wrap_os_errors("writing the record"):
            write_atomically(folder / RECORD, text, mode=PRIVATE)

    def _read_record(self, file: Path) -> dict[str, Any]:
        if not file.exists():
            raise DiskError(f"{file.parent} holds no optimizer state: {file.name} is missing. {_SNAPSHOT}")
        try:
            found = json.loads(file.read_text())
            record, checksum = dict(found["record"]), found["checksum"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DiskError(f"{file} cannot be read. {_SNAPSHOT}") from None
        if checksum != _checksum(record):
            raise DiskError(f"{file} is corrupt: its checksum is wrong. {_SNAPSHOT}")
        if record["version"] != VERSION:
            raise DiskError(f"{file} has version {record['version']}, but this jaxpar reads version {VERSION}.")
        return record

    def _compare(self, record: Mapping[str, Any]) -> None:
        """Raises a DiskError unless the record is one of this run; only its generations may differ."""
        mine, theirs = self._record({}), record
        for key, value in self._about.items():
            if theirs["about"].get(key) != value:
                raise DiskError(
                    f"{self.path} was written by a run with {key} {_describe(theirs['about'].get(key))}, but this run "
                    f"has {_describe(value)}. Remedy: use that {key}, or another path."
                )
        here, there = ({e["name"]: e for e in r["entries"]} for r in (mine, theirs))
        for name in [*here, *(there.keys() - here.keys())]:
            if here.get(name) != there.get(name):
                was, now = (_describe_entry(entries.get(name)) for entries in (there, here))
                raise DiskError(
                    f"{self.path} holds {name} as {was}, but this run has it as {now}. Remedy: use the model, "
                    f"optimizer and rules that it was written with, or another path."
                )

    @contextmanager
    def _wrap_os_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except DiskError:
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise DiskError(f"{self.path}: {what}: {reason}.") from error
            free = shutil.disk_usage(self.path).free
            now = self._generations.get(self._current)
            intact = "" if now is None else f" The state of step {now.last} remains intact."
            raise DiskError(
                f"{self.path}: {what}: {reason}; {free:,} bytes are free, and two generations require "
                f"{2 * self.bytes:,}.{intact} Remedy: free some space, or use a path on a larger disk."
            ) from error


_SNAPSHOT = "Remedy: restore a snapshot (restore=), or start with another path."


def _generations(record: Mapping[str, Any]) -> dict[str, Generation]:
    return {
        name: Generation(g["first"], g["last"], tuple(map(tuple, g["sums"])))
        for name, g in record["generations"].items()
    }


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _describe(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _describe_entry(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "nothing"
    shape = entry.get("shape", [entry["rows"], entry["row_bytes"]])
    return f"{entry.get('dtype', 'bytes')}{shape} {entry.get('spec', '')}".strip()


def _link(source: Path, target: Path) -> None:
    """Links ``target`` to ``source``, or copies it where the file system has no hard links or is another one."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        created = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with (
            open(open_regular(source, os.O_RDONLY), "rb") as a,
            open(open_regular(target, created, mode=PRIVATE), "wb") as b,
        ):
            shutil.copyfileobj(a, b, 1 << 20)
            b.flush()
            os.fsync(b.fileno())
