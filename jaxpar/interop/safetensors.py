"""Reads and writes safetensors files. A reader trusts nothing in a file: every problem is a ``DamagedError``.

A file is the header's length (8 bytes, little endian), the header (JSON: name → dtype, shape, data_offsets), and the
bytes of the tensors, row-major, without holes or overlaps. Pickle files are never read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpar.errors import CheckpointError, DamagedError
from jaxpar.utils.durable import write_atomically

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have."""
SPELLED = {dtype.name: spelled for spelled, dtype in DTYPES.items()}
STORED_DTYPES: dict[str, np.dtype[Any]] = {
    **DTYPES,
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The dtypes of the tensors that are read and written, those of quantized weights included."""
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, **{d: t.itemsize for d, t in DTYPES.items()}}
_MAX_HEADER = 100_000_000
_MAX_INDEX = 100_000_000
_MAX_DIMS = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
      file: the file.
      name: the tensor's name.
      dtype: its dtype as the file spells it, such as ``BF16``.
      shape: its shape.
      start: the position of its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name, from ``model.safetensors`` or a sharded checkpoint's index.

    Raises:
      CheckpointError: the folder holds no safetensors files.
      DamagedError: a file is truncated, malformed or missing, or the index does not fit the files.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).is_file():
        found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in found)
        what = "only pickle files, which can run code and are not read" if pickled else f"neither {SINGLE} nor {INDEX}"
        raise CheckpointError(
            f"{directory} has {what}. Remedy: model.save_pretrained(DIR) of transformers, which writes safetensors."
        )
    index = directory / INDEX
    weight_map = _weight_map(index)
    headers = {name: read_header(directory / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise DamagedError(
                f"{index}: {tensor!r:.200} must be in {name}, but it is not. Remedy: copy all files again."
            )
    tensors: dict[str, StoredTensor] = {}
    for name, header in headers.items():
        for tensor, stored in header.items():
            if weight_map.get(tensor, name) != name or tensor in tensors:
                raise DamagedError(f"{index}: {tensor!r:.200} is in two files. Remedy: copy all files again.")
            tensors[tensor] = stored
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Returns the index's map from tensors to file names, all of which are in the index's own folder."""
    found = read_json(index, _MAX_INDEX)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedError(f"{index}: weight_map must map names of tensors to files. Remedy: copy the file again.")
    for tensor, name in weight_map.items():
        plain = isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0:")
        if not plain or name.startswith("."):
            raise DamagedError(
                f"{index}: weight_map: {tensor!r:.200} must be in a .safetensors file of the same folder, got "
                f"{name!r:.200}."
            )
        if not (index.parent / name).is_file():
            raise DamagedError(f"{index}: {name} is missing. Remedy: copy all files of the checkpoint.")
    return weight_map


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
      DamagedError: the header is malformed, or does not describe exactly the file's bytes.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            most = max(0, min(size - 8, _MAX_HEADER))
            raise DamagedError(
                f"{file}: the header must have at most {most:,} bytes in a file of {size:,}, "
                f"got {length if size >= 8 else 'no length'}. The file is truncated, or no safetensors file."
            )
        text = f.read(length)
    header = parse_json(text, f"{file}: header")
    if not isinstance(header, dict):
        raise DamagedError(f"{file}: header must be a JSON object, got {type(header).__name__}.")
    first, tensors = 8 + length, dict[str, StoredTensor]()
    ends: dict[str, int] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name], ends[name] = _tensor(file, name, entry, first)
    at = first
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.size)):
        if tensor.start != at:
            what = "overlaps another" if tensor.start < at else f"leaves {tensor.start - at:,} bytes before it unused"
            raise DamagedError(f"{file}: tensor {tensor.name!r:.200} {what}. Remedy: copy the file again.")
        at = ends[tensor.name]
    if at != size:
        raise DamagedError(
            f"{file}: the tensors must end at byte {at:,}, but the file has {size:,}. Remedy: copy it again."
        )
    return tensors


def _tensor(file: Path, name: str, entry: Any, first: int) -> tuple[StoredTensor, int]:
    """Returns a header's entry, and the position after its last byte."""

    def damaged(what: str, got: Any) -> DamagedError:
        return DamagedError(f"{file}: tensor {name!r:.200}: {what}, got {got!r:.200}.")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged("the entry must have dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise damaged(f"dtype must be one of {', '.join(_ITEM_BYTES)}", dtype)
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise damaged(f"shape must be at most {_MAX_DIMS} integers, 0 or more", shape)
    if not _naturals(offsets) or len(offsets) != 2:
        raise damaged("data_offsets must be two positions", offsets)
    stored = StoredTensor(file, name, dtype, tuple(shape), first + offsets[0])
    if offsets[1] - offsets[0] != stored.size:
        raise damaged(f"data_offsets must span the {stored.size:,} bytes of {dtype} {shape}", offsets)
    return stored, first + offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def read_json(file: Path, most: int) -> Any:
    """Returns the value of a JSON file of at most ``most`` bytes.

    Raises:
      DamagedError: it is larger, or no JSON.
    """
    if file.stat().st_size > most:
        raise DamagedError(f"{file} must have at most {most:,} bytes, got {file.stat().st_size:,}.")
    return parse_json(file.read_bytes(), str(file))


def parse_json(text: bytes, where: str) -> Any:
    """Returns the value of JSON text in which no object repeats a key.

    Raises:
      DamagedError: the text is no such JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object repeats a key")
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} must be JSON, got {type(error).__name__}: {error!s:.200}.") from None


def file_names(count: int) -> list[str]:
    """Returns the names of a checkpoint's files.

    >>> file_names(1), file_names(2)[0]
    (['model.safetensors'], 'model-00001-of-00002.safetensors')
    """
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


type TensorShape = tuple[str, tuple[int, ...]]
"""The dtype and shape of a tensor to write."""


def lay_out(directory: Path, tensors: Mapping[str, TensorShape], file_bytes: int) -> dict[str, StoredTensor]:
    """Returns where each tensor will be stored, in files of at most ``file_bytes`` bytes (or one tensor)."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * _ITEM_BYTES[dtype]
        if groups[-1] and used + size > file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    found: dict[str, StoredTensor] = {}
    for file, group in zip(file_names(len(groups)), groups, strict=True):
        start = len(_header({name: tensors[name] for name in group}))
        for name in group:
            dtype, shape = tensors[name]
            found[name] = StoredTensor(directory / file, name, dtype, shape, start)
            start += found[name].size
    return found


def create_files(stored: Iterable[StoredTensor]) -> None:
    """Writes headers, makes each file as long as its tensors need, and writes the index of several files."""
    files: dict[Path, list[StoredTensor]] = {}
    for tensor in stored:
        files.setdefault(tensor.file, []).append(tensor)
    for file, tensors in files.items():
        with file.open("xb") as f:
            f.write(_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}))
            f.truncate(tensors[-1].start + tensors[-1].size)
    if len(files) > 1:
        every = [tensor for tensors in files.values() for tensor in tensors]
        total = sum(tensor.size for tensor in every)
        weight_map = {tensor.name: tensor.file.name for tensor in sorted(every, key=lambda t: t.name)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(every[0].file.with_name(INDEX), json.dumps(index, indent=2) + "\n")


def _header(tensors: Mapping[str, TensorShape]) -> bytes:
    """Returns the length and the header of a file, padded so that the tensors begin at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires this format
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * _ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_bytes(descriptor: int, stored: StoredTensor, at: int, buffer: memoryview) -> None:
    """Fills ``buffer`` with bytes of a tensor, beginning ``at`` bytes after its first.

    Raises:
      DamagedError: the file ends before; another process has truncated it.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], stored.start + at + done)
        if count == 0:
            raise DamagedError(f"{stored.file}: tensor {stored.name!r:.200} is truncated. Remedy: copy the file again.")
        done += count


def write_bytes(descriptor: int, stored: StoredTensor, at: int, data: memoryview) -> None:
    """Writes bytes of a tensor, beginning ``at`` bytes after its first."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], stored.start + at + done)


def runs(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """Yields the contiguous runs of a box in a row-major array: position and length, in numbers, in order.

    >>> list(runs((2, 3, 4), ((0, 2), (1, 3), (0, 4))))
    [(4, 8), (16, 8)]
    """
    full = len(shape)  # dims from here on are complete, so they and the dim before are contiguous
    while full and box[full - 1] == (0, shape[full - 1]):
        full -= 1
    first = max(full - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = strides[first] * (box[first][1] - box[first][0]) if shape else 1
    base = strides[first] * box[first][0] if shape else 0
    for index in np.ndindex(*(stop - start for start, stop in box[:first])):
        yield base + sum((box[dim][0] + i) * strides[dim] for dim, i in enumerate(index)), inner
