"""Indexed token files: a text that was tokenized once, memory-mapped, with a checksum and the tokenizer's hash.

A file is a header of 16 KiB (:data:`MAGIC`, then a JSON object, padded with spaces, and the SHA-256 of these bytes as
64 hexadecimal digits), the ids of the training part, those of the held-out part, zeros up to a multiple of 8 bytes, and
for each part the offset of every document and of its end, as int64. All numbers are little-endian. The header of
version 1 has spaces instead of its hash, and each part then ends with an ``eos``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from jaxpar.data.tokenizer import Tokenizer
from jaxpar.errors import DataError
from jaxpar.utils.checks import INT32, is_count, shown
from jaxpar.utils.durable import open_input, open_regular, sync_folder

MAGIC, VERSION, HEADER_BYTES = b"JPTOKENS", 2, 16384
_DIGEST_BYTES = 64
_BEGIN = b'{"version": '
"""What follows the magic number, so that a file is also known if a bit of that is wrong."""
DTYPES = ("uint8", "uint16", "int32")
_CHUNK = 1 << 24
_OFFSET = np.dtype("<i8")
_MOST = 1 << 48
_BUFFER = 1 << 20


@dataclass(frozen=True)
class PartSize:
    """Number of tokens and documents of the training part, or of the held-out part."""

    tokens: int
    documents: int


@dataclass(frozen=True)
class TokenHeader:
    """The header of a token file.

    Attributes:
      name: of the text.
      unit: what its documents are: ``files``, ``rows`` or ``parts``.
      vocab: number of ids; each id in the file is below it.
      eos: the id that ends each document, except the last one of a part.
      tokenizer, digest: name and hash of the tokenizer.
      dtype: of the ids.
      train, heldout: sizes of the two parts.
      checksum: SHA-256 of everything after the header.
      bad: the rows that were left out, in words.
    """

    name: str
    unit: str
    vocab: int
    eos: int
    tokenizer: str
    digest: str
    dtype: str
    train: PartSize
    heldout: PartSize
    checksum: str
    bad: str = ""

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return _layout(self)[-1]


class TokenFile:
    """A token file, opened for reading; nothing is read until it is used.

    Attributes:
      path: of the file.
      header: its header.
      train, heldout: memory-mapped ids [n].
      train_starts, heldout_starts: memory-mapped offset of each document, and the end of the last, [documents + 1].

    Raises:
      DataError: the file is not a token file, is truncated, or its header contradicts itself.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.header = read_header(self.path)
        size = self.path.stat().st_size
        if size != self.header.bytes:
            raise DataError(
                f"token file {self.path} must have {self.header.bytes:,} bytes, got {size:,}. Remedy: copy it again, "
                "or write it again with: jaxpar tokenize."
            )
        ids, (_, heldout, *offsets, _) = np.dtype(self.header.dtype).newbyteorder("<"), _layout(self.header)
        parts = (self.header.train, self.header.heldout)
        self.train = self._map(ids, HEADER_BYTES, parts[0].tokens)
        self.heldout = self._map(ids, heldout, parts[1].tokens)
        self.train_starts = self._map(_OFFSET, offsets[0], parts[0].documents + 1)
        self.heldout_starts = self._map(_OFFSET, offsets[1], parts[1].documents + 1)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise a DataError unless the file was written with this tokenizer."""
        header = self.header
        if tokenizer.digest != header.digest:
            raise DataError(
                f"token file {self.path} was written with the tokenizer {header.tokenizer} ({header.digest}), but this "
                f"run reads it with {tokenizer.name} ({tokenizer.digest}). Remedy: that tokenizer, or jaxpar tokenize "
                "with this one."
            )

    def verify(self) -> None:
        """Read the file completely.

        Raises:
          DataError: its bytes do not have the checksum of the header.
        """
        with self.path.open("rb") as f:
            f.seek(HEADER_BYTES)
            found = f"sha256:{hashlib.file_digest(f, 'sha256').hexdigest()}"
        if found != self.header.checksum:
            raise DataError(
                f"token file {self.path} is damaged: its checksum is {found}, but its header says "
                f"{self.header.checksum}. Remedy: copy it again, or write it again with: jaxpar tokenize."
            )

    def _map(self, dtype: np.dtype[Any], start: int, count: int) -> np.ndarray:
        return np.memmap(self.path, dtype, "r", start, (count,))


def is_token_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a token file does."""
    try:
        with open_input(path) as f:
            begin = f.read(len(MAGIC) + len(_BEGIN))
            return begin.startswith(MAGIC) or begin.endswith(_BEGIN)
    except OSError:
        return False


def read_header(path: Path) -> TokenHeader:
    """Returns the header of a token file.

    Raises:
      DataError: the file cannot be read or has no such header.
    """
    try:
        with open_input(path) as f:
            raw = f.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"token file {path} cannot be read: {error.strerror}. Remedy: check the path.") from error
    if not (raw.startswith(MAGIC) or raw[len(MAGIC) :].startswith(_BEGIN)) or len(raw) < HEADER_BYTES:
        raise DataError(f"{path} is not a token file. Remedy: write one with: jaxpar tokenize SOURCE OUT.")
    text, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if digest.strip() and digest != _digest_of(text):
        raise DataError(
            f"token file {path} is damaged: its header does not have the checksum at its end. Remedy: copy it again, "
            "or write it again with: jaxpar tokenize."
        )
    try:
        table = json.loads(text[len(MAGIC) :])
        version, expected = table.pop("version"), VERSION if digest.strip() else 1
        train, heldout = (PartSize(**table.pop(name)) for name in ("train", "heldout"))
        header = TokenHeader(**table, train=train, heldout=heldout)
        problem = f"its version is {shown(version)}, not {expected}" if version != expected else _problem(header)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise DataError(f"token file {path}: its header is not valid: {problem}. Remedy: jaxpar tokenize again.")
    return header


def _digest_of(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _problem(header: TokenHeader) -> str:
    """Why a header cannot be, or an empty text."""
    for name, value in asdict(header).items():
        if name in ("train", "heldout"):
            for count, number in value.items():
                if not is_count(number, 1) or number > _MOST:
                    return f"{name}.{count} must be an integer from 1, got {shown(number)}"
        elif name in ("vocab", "eos"):
            if not is_count(value, 0) or value > INT32:
                return f"{name} must be an integer from 0, got {shown(value)}"
        elif not isinstance(value, str):
            return f"{name} must be a text, got {shown(value)}"
    if header.dtype not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got {shown(header.dtype)}"
    return "" if header.eos < header.vocab else f"eos must be below vocab={header.vocab}, got {header.eos}"


def _layout(header: TokenHeader) -> tuple[int, int, int, int, int]:
    """Where the ids of both parts begin, the offsets of both parts, and the end of the file."""
    itemsize = np.dtype(header.dtype).itemsize
    heldout = HEADER_BYTES + header.train.tokens * itemsize
    end = heldout + header.heldout.tokens * itemsize
    first = -(-end // 8) * 8
    second = first + 8 * (header.train.documents + 1)
    return HEADER_BYTES, heldout, first, second, second + 8 * (header.heldout.documents + 1)


class TokenFileWriter:
    """Writes a token file document by document; it appears under its name when it is complete.

    Used as a context: an error inside it, or a kill, leaves no file under that name.

    Args:
      path: of the file, which must not exist.
      dtype: of the ids.

    Raises:
      DataError: the file exists, another process writes it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: np.dtype[Any]):
        self.path = Path(path)
        self._dtype = dtype.newbyteorder("<")
        self._lengths = {False: array("q"), True: array("q")}
        self._last = {False: b"", True: b""}  # the eos of each part's last document, which only the next one needs
        self._new = self.path.with_name(f"{self.path.name}.new")
        self._heldout_file = self.path.with_name(f"{self.path.name}.heldout")

    def __enter__(self) -> Self:
        if self.path.exists():
            raise DataError(f"{self.path} exists. Remedy: delete it, or write another file.")
        with self._writing():
            self._train = self._opened(self._new)
            self._heldout = self._opened(self._heldout_file)
            self._train.write(b"\0" * HEADER_BYTES)
        self._digest = hashlib.sha256()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file, path in ((self._heldout, self._heldout_file), (self._train, self._new)):
            with suppress(OSError):  # a full disk: nothing of the file is kept
                # The name goes before the lock, so that another process never finds a file that is about to go.
                path.unlink(missing_ok=True)
                file.close()

    def add(self, ids: np.ndarray, *, heldout: bool) -> None:
        """Write the ids [n] of a document, its ``eos`` included.

        Raises:
          DataError: the file cannot be written.
        """
        data = self._last[heldout] + ids.astype(self._dtype, copy=False).tobytes()
        data, self._last[heldout] = data[: -self._dtype.itemsize], data[-self._dtype.itemsize :]
        with self._writing():
            self._heldout.write(data) if heldout else self._write(data)
        self._lengths[heldout].append(len(ids))

    def documents(self, *, heldout: bool) -> int:
        """Returns the number of documents of a part that were added."""
        return len(self._lengths[heldout])

    def finish(self, header: Callable[[PartSize, PartSize, str], TokenHeader]) -> TokenFile:
        """Complete the file, sync it to disk and give it its name.

        Args:
          header: makes the header of the sizes of both parts and the checksum.

        Raises:
          DataError: the file cannot be written.
        """
        for lengths in self._lengths.values():
            lengths[-1] -= 1  # without the eos, as `load_text` returns a part
        sizes = [PartSize(sum(lengths), len(lengths)) for lengths in self._lengths.values()]
        if not all(size.tokens for size in sizes):
            raise DataError(f"{self.path}: a part has no tokens: its documents are empty. Remedy: more text.")
        with self._writing():
            self._heldout.seek(0)
            while data := self._heldout.read(_CHUNK):
                self._write(data)
            starts = [np.cumsum([0, *lengths], dtype=_OFFSET).tobytes() for lengths in self._lengths.values()]
            for data in (b"\0" * (-self._train.tell() % 8), *starts):
                self._write(data)
            made = header(sizes[0], sizes[1], f"sha256:{self._digest.hexdigest()}")
            text = json.dumps({"version": VERSION, **asdict(made)}).encode()
            padded = (MAGIC + text).ljust(HEADER_BYTES - _DIGEST_BYTES)
            if len(padded) > HEADER_BYTES - _DIGEST_BYTES:
                raise ValueError(f"the header has {len(text)} bytes")
            self._train.seek(0)
            self._train.write(padded + _digest_of(padded))
            self._train.flush()
            os.fsync(self._train.fileno())
            os.replace(self._new, self.path)
            sync_folder(self.path.parent)
        return TokenFile(self.path)

    def _write(self, data: bytes) -> None:
        """Write bytes that the checksum is of."""
        self._train.write(data)
        self._digest.update(data)

    def _opened(self, path: Path) -> IO[bytes]:
        """An empty file that this process has locked; it may be left by a kill."""
        file = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise DataError(f"{self.path} is written by another process. Remedy: wait, or another file.") from None
        os.ftruncate(file, 0)
        return open(file, "w+b", buffering=_BUFFER)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let an error of the disk name the file, and a remedy."""
        try:
            yield
        except OSError as error:
            remedy = "free space on the disk" if error.errno == errno.ENOSPC else "a file in a writable folder"
            raise DataError(f"{self.path} cannot be written: {error.strerror}. Remedy: {remedy}.") from error
