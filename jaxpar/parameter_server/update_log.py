"""``UpdateLog``: records on disk that survive a kill. A record is durable when :meth:`UpdateLog.append` returns.

A log is a file ``log-000007`` of records; its first ones are a snapshot, the others the updates since. A new snapshot
is a new file. A record is a magic word, lengths, a CRC-32 and its bytes: a header in JSON and the arrays. What a kill
leaves of the last record is cut off when the log is opened again; no push of it was acknowledged.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.errors import DamagedError
from jaxpar.utils.durable import SHARED, open_regular, sync_folder

_HEAD = struct.Struct("<4sIQII")  # magic word, size of the header, size of the body, checksums of body and sizes
_MAGIC = b"jpPS"


@dataclass(frozen=True)
class LogRecord:
    """What happened (``kind``), with its numbers and arrays."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(record: LogRecord) -> bytes:
    """Returns the bytes of a record."""
    arrays = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in record.arrays.items()}
    table = [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]
    header = json.dumps({"kind": record.kind, "fields": dict(record.fields), "arrays": table}).encode()
    body = b"".join([header, *(x.tobytes() for x in arrays.values())])
    check = zlib.crc32(body)
    return _HEAD.pack(_MAGIC, len(header), len(body), check, _check_sizes(len(header), len(body))) + body


def _check_sizes(*sizes: int) -> int:
    return zlib.crc32(repr(sizes).encode())


def _decode(header_size: int, body: bytes) -> LogRecord:
    header = json.loads(body[:header_size])
    arrays, at = {}, header_size
    for name, dtype, shape in header["arrays"]:
        kind = jnp.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += count * kind.itemsize
    return LogRecord(header["kind"], header["fields"], arrays)


class UpdateLog:
    """The newest log of a folder, open for reading once and then for appending.

    Args:
      folder: holds the logs; it is made if it does not exist.

    Raises:
      DamagedError: a record that was once whole is not any more.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(file for file in folder.glob("log-*") if file.suffix != ".new")
        self._number = int(found[-1].name.removeprefix("log-")) if found else 0
        self._file = -1
        for old in found[:-1]:
            old.unlink()

    @property
    def path(self) -> Path:
        return self._folder / f"log-{self._number:06d}"

    def records(self) -> Iterator[LogRecord]:
        """Yields all records; then the log can be appended to."""
        self._file = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        end = os.fstat(self._file).st_size
        with open(os.dup(self._file), "rb") as file:
            at = 0
            while at < end:
                record = self._read(file, at)
                if record is None:
                    break
                yield record
                at = file.tell()
        os.ftruncate(self._file, at)
        os.lseek(self._file, at, os.SEEK_SET)
        os.fsync(self._file)
        sync_folder(self._folder)

    def _read(self, file: Any, at: int) -> LogRecord | None:
        """The record at an offset, or ``None`` if a kill cut it off."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        magic, header_size, size, check, check_sizes = _HEAD.unpack(head)
        if magic != _MAGIC or check_sizes != _check_sizes(header_size, size):
            if any(file.read()):
                raise self._damaged(at)
            return None  # the file had grown, but the data was not yet written
        body = file.read(size)
        if len(body) < size:
            return None
        if zlib.crc32(body) != check:
            if any(file.read()):
                raise self._damaged(at)
            return None
        return _decode(header_size, body)

    def _damaged(self, at: int) -> DamagedError:
        return DamagedError(
            f"{self.path}: the record at byte {at:,} does not match its checksum, so the updates from there on are "
            "lost. Remedy: start from an older copy of the folder, or anew without it."
        )

    def append(self, record: LogRecord) -> None:
        """Write a record; it is on disk when this returns."""
        data = memoryview(encode(record))
        while data:
            data = data[os.write(self._file, data) :]
        os.fsync(self._file)

    def replace(self, records: Iterable[LogRecord]) -> None:
        """Start a new log with these records, a snapshot, and delete the old one."""
        old, self._number = self.path, self._number + 1
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, SHARED)
        for record in records:
            data = memoryview(encode(record))
            while data:
                data = data[os.write(file, data) :]
        os.fsync(file)
        os.replace(new, self.path)
        sync_folder(self._folder)
        os.close(self._file)
        self._file = file
        old.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
