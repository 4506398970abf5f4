"""The manifest of a checkpoint: a JSON file with a checksum of every piece of every tensor and of every file.

This module uses neither jax nor pickle. The parser treats a manifest as untrusted input: any deviation from the format
raises a ``DamagedError`` that names it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.validate import check_metadata, count, counts, inside, opened, path_problem, table, text
from jaxpar.errors import CheckpointError, DamagedError
from jaxpar.utils.checks import shown
from jaxpar.utils.durable import is_permanent, write_atomically

NAME, SCHEMA = "manifest.json", 1
ARRAYS, DISK = "arrays", "disk"
"""Subfolders of a checkpoint for orbax's arrays and for the files of an optimizer state on disk."""
type Bounds = tuple[tuple[int, int], ...]
type TensorPiece = tuple[str, Bounds, int]
"""A piece of a tensor: its file relative to the checkpoint's folder, its bounds, the checksum of its values."""
_MOST_BYTES, _MOST_VALUES = 1 << 26, 4_000_000
"""Limits of a manifest's text: bytes, and commas and opening brackets. Both allow 750,000 pieces, 12 TB of tensors."""
_MOST_DIMS, _MOST_SIZE, _MOST_PIECE = 32, 1 << 48, 1 << 26
_KEYS = ("checksum", "files", "layout", "metadata", "schema", "step", "tensors", "versions")


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that is stored in pieces.

    Attributes:
      dtype, itemsize: the name as numpy (or ml_dtypes) has it, and bytes per element.
      shape, chunk: of the tensor, and of a piece; on disk the last piece along a dim may extend beyond the tensor.
      folder: its files, relative to the checkpoint's folder.
      sums: CRC-32 of each piece's values (row-major, little-endian), in the order of :meth:`pieces`.
      dims, spec: logical dim names, if it had any, and the mesh axes that it was sharded over; for display only.
      key: the PRNG implementation, if the tensor is the data of PRNG keys.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    folder: str
    sums: tuple[int, ...]
    dims: tuple[str | None, ...] | None = None
    spec: str = ""
    key: str | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece on disk."""
        return math.prod(self.chunk) * self.itemsize

    def names(self) -> Iterator[str]:
        """Each piece's file, relative to the checkpoint's folder."""
        if self.bytes:
            steps = [range(-(-size // step)) for size, step in zip(self.shape, self.chunk, strict=True)]
            for at in itertools.product(*(list(map(str, numbers)) for numbers in steps)):
                yield f"{self.folder}/{'.'.join(at) or '0'}"

    def grid(self) -> Iterator[tuple[str, Bounds]]:
        """Each piece's file, relative to the checkpoint's folder, and its bounds in the tensor."""
        dims = zip(self.shape, self.chunk, strict=True)
        parts = ([(at, min(at + step, size)) for at in range(0, size, step)] for size, step in dims if self.bytes)
        return zip(self.names(), itertools.product(*parts), strict=False)  # without values there is no name

    def pieces(self) -> Iterator[TensorPiece]:
        """Like :meth:`grid`, with each piece's checksum."""
        for (name, bounds), total in zip(self.grid(), self.sums, strict=True):
            yield name, bounds, total


_TENSOR = tuple(sorted(one.name for one in fields(TensorRecord)))


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
      tensors: a record for each tensor, by path.
      files: (bytes, CRC-32) of each file except the manifest, by path relative to the checkpoint's folder.
      step: the training step, if known.
      versions: versions of the packages that wrote the checkpoint.
      layout: mesh sizes, process count and a digest of the rules.
      metadata: the values given to :func:`jaxpar.save`, the time, and the PRNG keys.
    """

    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, tuple[int, int]]
    step: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    def to_json(self) -> str:
        """The canonical JSON text of this manifest, the only one that :meth:`from_json` accepts.

        Raises:
          CheckpointError: ``metadata`` holds a value that JSON cannot represent.
        """
        tensors = {path: vars(tensor) for path, tensor in self.tensors.items()}
        body = {**vars(self), "tensors": tensors, "schema": SCHEMA}
        try:
            body = json.loads(_dump(body))
            check_metadata(body["metadata"], "metadata")
            return _dump({**body, "checksum": _digest(_dump(body))})
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"metadata: {error}. A manifest stores JSON with finite numbers only.") from error

    @classmethod
    def from_json(cls, content: str, where: str) -> Manifest:
        """Parse a manifest from its JSON text.

        Args:
          content: the text.
          where: the file's name, with which errors begin.

        Raises:
          DamagedError: a changed byte, another schema, a file outside of the folder, or sizes that contradict each
            other.
        """
        if problem := _too_large(content):
            raise DamagedError(f"{where} {problem}. {REMEDY}")
        try:
            data = json.loads(content, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{where} is not JSON: {error}. {REMEDY}") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise DamagedError(
                f"{where} has schema {shown(found)}, but this version of jaxpar reads schema {SCHEMA}. {REMEDY}"
            )
        try:
            body = "{" + content[content.index(",") + 1 :]  # of a canonical text, whose first item is the checksum
            intact = tuple(sorted(data)) == _KEYS and _dump(data) == content and data["checksum"] == _digest(body)
        except (ValueError, RecursionError):
            intact = False
        if not intact:
            raise DamagedError(f"{where} was changed after it was written: its own checksum does not match. {REMEDY}")
        return cls.from_data(data, where)

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Manifest:
        """Like :meth:`from_json`, for parsed JSON; does not verify the manifest's own checksum."""
        try:
            files = {name: _file_in(name, pair) for name, pair in table(data, "files").items()}
            tensors = {path: _tensor_in(path, entry, files) for path, entry in table(data, "tensors").items()}
            step = data["step"]
            if step is not None:
                count(step, "step", _MOST_SIZE)
            versions = {text(name, "versions"): text(x, "versions") for name, x in table(data, "versions").items()}
            for key in ("layout", "metadata"):
                check_metadata(table(data, key), key)
            return cls(tensors, files, step, versions, table(data, "layout"), table(data, "metadata"))
        except KeyError as error:
            raise DamagedError(f"{where}: {error.args[0]} is missing. {REMEDY}") from None
        except ValueError as error:
            raise DamagedError(f"{where}: {error}. {REMEDY}") from None


REMEDY = "Remedy: use another step; jaxpar doctor --checkpoint DIR lists the intact ones."


def read(folder: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
      CheckpointError: there is none.
      DamagedError: it cannot be read, or was changed after it was written.
    """
    file = Path(folder) / NAME
    try:
        with opened(Path(folder), NAME) as f:
            if os.fstat(f.fileno()).st_size > _MOST_BYTES:
                raise DamagedError(f"{file} has more than {_MOST_BYTES:,} bytes, the limit for a manifest. {REMEDY}")
            content = f.readall().decode()
    except DamagedError:  # a subclass of OSError
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{file.parent} holds no complete checkpoint: {NAME} is missing."
            f"{_steps(file.parent) or ' Remedy: the folder of a step, such as checkpoints/100.'}"
        ) from None
    except UnicodeDecodeError:
        raise DamagedError(f"{file} was changed after it was written: it is not UTF-8 text. {REMEDY}") from None
    except OSError as error:
        if is_permanent(error) and not os.path.isdir(file.parent):  # a path that names nothing is not damaged
            text = f"{file.parent!s:.200} is no checkpoint: {error.strerror}. Remedy: the folder of a step."
            raise CheckpointError(text) from error
        raise DamagedError(f"{file} cannot be read: {error.strerror}. {REMEDY}") from error
    return Manifest.from_json(content, str(file))


def write(folder: Path, manifest: Manifest) -> None:
    """Write a checkpoint's manifest atomically, and sync it to disk.

    Raises:
      CheckpointError: it is larger than :func:`read` accepts.
    """
    content = manifest.to_json()
    if problem := _too_large(content):
        pieces = sum(len(tensor.sums) for tensor in manifest.tensors.values())
        raise CheckpointError(
            f"{folder / NAME} {problem}: it describes {pieces:,} pieces of {len(manifest.tensors):,} tensors. Remedy: "
            "shard small tensors over fewer devices, or stack layers."
        )
    write_atomically(folder / NAME, content)


def _steps(folder: Path) -> str:
    """A remedy for an error about ``folder``: its newest step, or the checkpoint that a killed save was replacing."""
    try:
        steps = sorted(int(p.name) for p in folder.iterdir() if re.fullmatch(r"[0-9]{1,15}", p.name))
    except OSError:
        steps = []
    before = folder.with_name(f"{folder.name}.replaced") if folder.name else folder / NAME
    if (before / NAME).exists():
        return f" Remedy: use {before}, the previous checkpoint; the save that was replacing it was killed."
    return f" Remedy: use {folder / str(steps[-1])}, the newest step in this folder." if steps else ""


def _dump(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _too_large(content: str) -> str | None:
    """The limit that a text exceeds, if any; it bounds the memory that parsing takes."""
    if len(content) > _MOST_BYTES:
        return f"has more than {_MOST_BYTES:,} bytes, the limit for a manifest"
    values = sum(map(content.count, ",[{"))
    return f"has {values:,} values, more than the limit of {_MOST_VALUES:,}" if values > _MOST_VALUES else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _file_in(name: str, pair: Any) -> tuple[int, int]:
    if not inside(name):
        raise ValueError(f"the file {name!r:.80} is outside the checkpoint's folder")
    size, total = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
    if not (type(size) is type(total) is int and 0 <= size <= _MOST_SIZE and 0 <= total <= 0xFFFFFFFF):
        raise ValueError(f"{name:.80} must have two integers, its bytes and its CRC-32, got {shown(pair)}")
    return size, total


def _tensor_in(path: str, entry: Any, files: Mapping[str, tuple[int, int]]) -> TensorRecord:
    if problem := path_problem(path):
        raise ValueError(f"tensor {path[:200]!r}: {problem}")
    at = f"tensor {path:.200}"
    if not isinstance(entry, dict) or tuple(sorted(entry)) != _TENSOR:
        raise ValueError(f"{at} must be described by exactly {', '.join(_TENSOR)}")
    dims = entry["dims"]
    if dims is not None and not (isinstance(dims, list) and all(d is None or isinstance(d, str) for d in dims)):
        raise ValueError(f"{at}: dims must be a list of names, got {shown(dims)}")
    tensor = TensorRecord(
        text(entry["dtype"], f"{at}: dtype"),
        count(entry["itemsize"], f"{at}: itemsize", 64),
        counts(entry["shape"], lambda: f"{at}: shape", _MOST_SIZE),
        counts(entry["chunk"], lambda: f"{at}: chunk", _MOST_SIZE),
        text(entry["folder"], f"{at}: folder"),
        counts(entry["sums"], lambda: f"{at}: sums", 0xFFFFFFFF),
        None if dims is None else tuple(dims),
        text(entry["spec"], f"{at}: spec"),
        None if entry["key"] is None else text(entry["key"], f"{at}: key"),
    )
    if not inside(tensor.folder):
        raise ValueError(f"{at}: the folder {tensor.folder!r:.80} is outside the checkpoint's folder")
    if len(tensor.shape) != len(tensor.chunk) or len(tensor.shape) > _MOST_DIMS or not tensor.itemsize:
        raise ValueError(f"{at}: shape {list(tensor.shape)} does not match pieces of {list(tensor.chunk)}")
    if tensor.bytes and not 0 < tensor.piece_bytes <= _MOST_PIECE:
        if not tensor.piece_bytes:
            raise ValueError(f"{at}: its pieces are empty")
        size = f"{tensor.piece_bytes:,} bytes, more than the limit of {_MOST_PIECE:,}"
        raise ValueError(f"{at}: a piece has {size}")
    steps = zip(tensor.shape, tensor.chunk, strict=True)
    number = math.prod(-(-size // step) for size, step in steps) if tensor.bytes else 0
    if number != len(tensor.sums):
        raise ValueError(f"{at} has {number} pieces but {len(tensor.sums)} checksums")
    expected = tensor.piece_bytes
    for name in tensor.names():
        if name not in files:
            raise ValueError(f"{at}: its file {name} is not listed")
        if files[name][0] != expected:
            raise ValueError(f"{at}: its file {name} has {files[name][0]} bytes, expected {expected}")
    return tensor
