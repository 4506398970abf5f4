"""Moves numbers between safetensors files and sharded arrays: each process reads and writes only its own shards.

A box is a pair (start, stop) for each dim. "Their" dims are those of a tensor in the file, with joined dims apart;
"our" dims are those of a row of the parameter.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpar.checkpoint.manifest import Bounds
from jaxpar.checkpoint.snapshot import bounds, shards
from jaxpar.checkpoint.verify import map_in_order
from jaxpar.interop.quantized_tensors import ScaledTensor
from jaxpar.interop.safetensors import STORED_DTYPES, StoredTensor, read_bytes, runs, write_bytes
from jaxpar.interop.tensor_map import TensorRule

_PIECE_BYTES = 16 * 2**20
"""The most bytes that are read at once, unless a row of a tensor is longer."""
_SHORTEST_RUN = 32
"""Shorter runs of bytes are read with those between them, because each run takes a system call."""


@dataclass
class OpenFiles:
    """Open files, and the number of bytes that were read from them, as a context manager."""

    flags: int = os.O_RDONLY
    bytes_read: int = 0
    _open: dict[Path, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(file, self.flags | os.O_CLOEXEC)
            return self._open[file]

    def count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


type AnyTensor = StoredTensor | ScaledTensor


def read_parameter(
    pool: ThreadPoolExecutor, files: OpenFiles, rule: TensorRule, tensors: Mapping[str, AnyTensor], like: Any
) -> jax.Array:
    """Returns a parameter, sharded as ``like``, with the values of a checkpoint's tensors, cast to ``like.dtype``.

    Args:
      pool: its threads read one tensor each at a time.
      files: the open files.
      rule: how the parameter follows from tensors.
      tensors: the checkpoint's tensors; those of the rule have the right shapes.
      like: a ``ShapeDtypeStruct`` with a sharding over devices.
    """
    sharding, shape = like.sharding, tuple(like.shape)
    places = {d: bounds(i or (), shape) for d, i in sharding.addressable_devices_indices_map(shape).items()}
    blocks = {at: np.empty([stop - start for start, stop in at], like.dtype) for at in places.values()}

    def read(index: tuple[int, ...], name: str) -> None:
        if rows := _rows(rule, index, blocks.items()):
            _read_rows(files, rule, tensors[name], rule.apart(shape), rows)

    for _ in map_in_order(pool, lambda task: read(*task), rule.names(shape)):
        pass
    home = lambda device: SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    parts = [jax.device_put(blocks[at], home(device)) for device, at in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _rows(
    rule: TensorRule, index: tuple[int, ...], blocks: Iterable[tuple[Bounds, np.ndarray]]
) -> dict[Bounds, np.ndarray]:
    """Returns the row at an index along the stacked dims of each shard that has it, keyed by its box in our dims."""
    found: dict[Bounds, np.ndarray] = {}
    for at, block in blocks:
        if all(start <= i < stop for i, (start, stop) in zip(index, at, strict=False)):
            found[at[rule.stacked :]] = block[tuple(i - start for i, (start, _) in zip(index, at, strict=False))]
    return found


def _read_rows(
    files: OpenFiles, rule: TensorRule, stored: AnyTensor, shape: tuple[int, ...], rows: dict[Bounds, np.ndarray]
) -> None:
    """Fills rows of a parameter's shards, keyed by their boxes in our dims, from one tensor of ``shape`` in theirs."""
    order, reordered = rule.order, rule.reordered
    theirs = {tuple(at[dim] for dim in order): row.transpose(order) for at, row in rows.items()}
    if reordered is not None:  # its numbers are scattered over the tensor, so all of them are read
        wanted = {at: at[:reordered] + ((0, shape[reordered]),) + at[reordered + 1 :] for at in theirs}
    else:
        wanted = {at: at for at in theirs}
    for box in _boxes(list(wanted.values())):
        box = _widened(shape, box, STORED_DTYPES[stored.dtype].itemsize)
        for piece, values in _pieces(files, stored, shape, box, reordered):
            if reordered is not None:
                values = np.take(values, rule.their_order(shape[reordered]), axis=reordered)
            for at, row in theirs.items():
                if cut := _meet(at, piece):
                    row[_within(cut, at)] = values[_within(cut, piece)]


def _boxes(boxes: list[Bounds]) -> list[Bounds]:
    """Returns the box around all boxes if it holds nothing else, so that each byte is read once; else each box."""
    around = tuple((min(b[dim][0] for b in boxes), max(b[dim][1] for b in boxes)) for dim in range(len(boxes[0])))
    distinct = list(dict.fromkeys(boxes))
    return [around] if _volume(around) <= sum(map(_volume, distinct)) else distinct


def _volume(box: Bounds) -> int:
    return math.prod(stop - start for start, stop in box)


def _meet(a: Bounds, b: Bounds) -> Bounds | None:
    cut = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return cut if all(start < stop for start, stop in cut) or not a else None


def _within(box: Bounds, outer: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def _pieces(
    files: OpenFiles, stored: AnyTensor, shape: tuple[int, ...], box: Bounds, uncut: int | None
) -> Iterator[tuple[Bounds, np.ndarray]]:
    """Yields parts of a tensor that together hold a box of it, each with its box; no part cuts the dim ``uncut``."""
    dtype = STORED_DTYPES[stored.dtype]
    sizes = [stop - start for start, stop in box]
    if 0 in sizes:
        return
    cut = next((dim for dim, size in enumerate(sizes) if size > 1 and dim != uncut), None)
    step = 1 if cut is None else max(1, _PIECE_BYTES * sizes[cut] // (math.prod(sizes) * dtype.itemsize))
    if cut is None or step >= sizes[cut]:
        yield box, read_box(files, stored, shape, box)
        return
    for start in range(*box[cut], step):
        part = (start, min(start + step, box[cut][1]))
        yield from _pieces(files, stored, shape, (*box[:cut], part, *box[cut + 1 :]), uncut)


def _widened(shape: tuple[int, ...], box: Bounds, itemsize: int) -> Bounds:
    """Returns the box, or a larger one that takes no short runs."""
    while True:
        narrow = [dim for dim, size in enumerate(shape) if box[dim] != (0, size)]
        if not narrow or _volume(box[: narrow[-1]]) <= 1:
            return box
        if next(runs(shape, box))[1] * itemsize >= _SHORTEST_RUN:
            return box
        box = (*box[: narrow[-1]], (0, shape[narrow[-1]]), *box[narrow[-1] + 1 :])


def read_box(files: OpenFiles, stored: AnyTensor, shape: tuple[int, ...], box: Bounds) -> np.ndarray:
    """Returns the numbers of a box of a tensor of ``shape``, in the tensor's dtype; it is read at once."""
    if isinstance(stored, ScaledTensor):
        return stored.read(functools.partial(read_box, files), shape, box)
    dtype = STORED_DTYPES[stored.dtype]
    values = np.empty([stop - start for start, stop in box], dtype)
    buffer, done = memoryview(values.reshape(-1).view(np.uint8)), 0
    descriptor = files.descriptor(stored.file)
    for start, length in runs(shape, box):
        size = length * dtype.itemsize
        read_bytes(descriptor, stored, start * dtype.itemsize, buffer[done : done + size])
        done += size
    files.count(done)
    return values


def write_parameter(files: OpenFiles, rule: TensorRule, tensors: Mapping[str, StoredTensor], value: jax.Array) -> None:
    """Writes this process's shards of a parameter into a checkpoint's tensors, cast to their dtype."""
    shape, held = tuple(value.shape), shards(value)
    for index, name in rule.names(shape):
        if rows := _rows(rule, index, held):
            _write_rows(files, rule, tensors[name], rule.apart(shape), rows)


def _write_rows(
    files: OpenFiles, rule: TensorRule, stored: StoredTensor, shape: tuple[int, ...], rows: dict[Bounds, np.ndarray]
) -> None:
    order, reordered, dtype = rule.order, rule.reordered, STORED_DTYPES[stored.dtype]
    theirs = {tuple(at[dim] for dim in order): row.transpose(order) for at, row in rows.items()}
    descriptor = files.descriptor(stored.file)
    for box in _boxes(list(theirs)):
        values = np.empty([stop - start for start, stop in box], dtype)
        for at, row in theirs.items():
            if cut := _meet(at, box):
                values[_within(cut, box)] = row[_within(cut, at)]
        for part, numbers in _in_their_order(rule, shape, box, values) if reordered is not None else [(box, values)]:
            data, done = memoryview(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)), 0
            for start, length in runs(shape, part):
                size = length * dtype.itemsize
                write_bytes(descriptor, stored, start * dtype.itemsize, data[done : done + size])
                done += size


def _in_their_order(
    rule: TensorRule, shape: tuple[int, ...], box: Bounds, values: np.ndarray
) -> Iterator[tuple[Bounds, np.ndarray]]:
    """Yields the values of a box at the places that the tensor has for them, one number of the dim ``d`` at a time."""
    dim = rule.reordered or 0
    order = rule.their_order(shape[dim])
    if box[dim] == (0, shape[dim]):
        yield box, np.take(values, np.argsort(order), axis=dim)
        return
    for at in range(*box[dim]):
        place = (int(order[at]), int(order[at]) + 1)
        yield (*box[:dim], place, *box[dim + 1 :]), np.take(values, [at - box[dim][0]], axis=dim)
