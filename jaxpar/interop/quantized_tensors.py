"""Tensors of a checkpoint that are stored as integers or fp8 with scales, and read as floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.checkpoint.manifest import Bounds
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.interop.fields import CONFIG
from jaxpar.interop.safetensors import STORED_DTYPES, StoredTensor, read_bytes

FIELD = "quantization_config"
COMPRESSED, PACKED, INTEGERS = "compressed-tensors", "pack-quantized", "int-quantized"
_FP8 = "fp8"
_PACKED, _SCALE, _SHAPE, _SCALE_INV = ".weight_packed", ".weight_scale", ".weight_shape", ".weight_scale_inv"

type ReadBox = Callable[[StoredTensor, tuple[int, ...], Bounds], np.ndarray]


@dataclass(frozen=True)
class ScaledTensor:
    """A matrix ``[out, in]`` that is stored as small numbers and scales, each for a block of the matrix.

    Attributes:
      values: the numbers: ``[out, in]``, or integers packed in int32 along the inputs.
      scales: ``[out / block[0], in / block[1]]``, rounded up.
      shape: of the matrix.
      block: how many outputs and inputs share a scale.
      bits: of packed integers; 0 if each number is stored by itself.
    """

    values: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    block: tuple[int, int]
    bits: int = 0
    dtype: str = "F32"

    @property
    def name(self) -> str:
        """The name of the stored numbers."""
        return self.values.name

    @property
    def file(self) -> Path:
        """The file of the stored numbers."""
        return self.values.file

    def read(self, read_box: ReadBox, shape: tuple[int, ...], box: Bounds) -> np.ndarray:
        """Returns a box of the matrix in fp32; only its own bytes and scales are read.

        Args:
          read_box: reads a box of a tensor.
          shape: of the matrix, with joined dims apart.
          box: in these dims.

        Raises:
          CheckpointError: numbers of a packed int32 lie in several rows of the parameter.
        """
        split = next((k for k in range(len(shape)) if math.prod(shape[:k]) == self.shape[0]), 0)
        values = self._packed(read_box, shape, box) if self.bits else read_box(self.values, shape, box)
        rows, columns = _places(shape[:split], box[:split]), _places(shape[split:], box[split:])
        scales = self._scales(read_box, rows // self.block[0], columns // self.block[1])
        return values.astype(np.float32) * scales.reshape(values.shape)

    def _packed(self, read_box: ReadBox, shape: tuple[int, ...], box: Bounds) -> np.ndarray:
        per = 32 // self.bits
        if shape[-1] % per:
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r:.200}: {per} numbers are packed in an int32, but the parameter has "
                f"rows of {shape[-1]}. Remedy: unpack the tensor first."
            )
        start, stop = box[-1]
        words = read_box(
            self.values, (*shape[:-1], shape[-1] // per), (*box[:-1], (start // per, -(-stop // per)))
        ).view(np.uint32)
        numbers = words[..., None] >> (np.arange(per, dtype=np.uint32) * self.bits) & (2**self.bits - 1)
        signed = numbers.reshape(*words.shape[:-1], -1).astype(np.int16) - 2 ** (self.bits - 1)
        first = start // per * per
        return signed[..., start - first : stop - first]

    def _scales(self, read_box: ReadBox, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        box = tuple((int(at.min()), int(at.max()) + 1) for at in (rows, columns))
        found = read_box(self.scales, self._scale_shape, box).astype(np.float32)
        return found[np.ix_(rows - box[0][0], columns - box[1][0])]

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        return tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))


def _places(shape: tuple[int, ...], box: Bounds) -> np.ndarray:
    """Returns the row-major positions of a box's numbers."""
    place = np.zeros((1,), np.int64)
    for size, (start, stop) in zip(shape, box, strict=True):
        place = (place[:, None] * size + np.arange(start, stop)).reshape(-1)
    return place


def scaled_tensors(
    tensors: Mapping[str, StoredTensor], fields: Mapping[str, Any]
) -> dict[str, StoredTensor | ScaledTensor]:
    """Returns a checkpoint's tensors with each quantized weight under the name that it has without quantization.

    Args:
      tensors: of the checkpoint.
      fields: of ``config.json``, whose ``quantization_config`` says how weights are stored.

    Raises:
      ConfigError: the method is not supported.
      DamagedError: a weight's tensors do not fit each other.
    """
    found = fields.get(FIELD)
    if found is None:
        return dict(tensors)
    kind = found.get("quant_method") if isinstance(found, dict) else None
    if kind == _FP8:
        return _fp8(tensors, found)
    if kind == COMPRESSED and found.get("format") in (PACKED, INTEGERS):
        return _compressed(tensors, _bits(found))
    what = f"quant_method {kind!r}" + (f" in the format {found.get('format')!r}" if kind == COMPRESSED else "")
    raise ConfigError(
        f"{CONFIG}: {FIELD}: {what} is not supported; supported are {COMPRESSED} ({PACKED} and {INTEGERS}, symmetric "
        f"integers) and {_FP8} in blocks. Remedy: dequantize the weights first."
    )


def _bits(found: Mapping[str, Any]) -> int:
    """Returns the number of bits of all groups of ``compressed-tensors``."""
    groups = found.get("config_groups")
    given = groups.values() if isinstance(groups, dict) else ()
    weights: list[Any] = [group.get("weights") if isinstance(group, dict) else group for group in given]
    for way in weights:
        symmetric = isinstance(way, dict) and way.get("symmetric") and way.get("type") == "int"
        if not symmetric or way.get("num_bits") not in (4, 8) or way.get("num_bits") != weights[0].get("num_bits"):
            raise ConfigError(
                f"{CONFIG}: {FIELD}: weights must be symmetric integers of 4 or of 8 bits, the same in all groups, got "
                f"{way!r:.200}. Remedy: dequantize the weights first."
            )
    if not weights:
        raise ConfigError(f"{CONFIG}: {FIELD}: config_groups must hold a group with weights, got {groups!r:.200}.")
    return int(weights[0]["num_bits"])


def _compressed(tensors: Mapping[str, StoredTensor], bits: int) -> dict[str, StoredTensor | ScaledTensor]:
    found: dict[str, StoredTensor | ScaledTensor] = dict(tensors)
    for name, values in tensors.items():
        base = name.removesuffix(_PACKED).removesuffix(".weight")
        packed = name.endswith(_PACKED)
        if not packed and not (name.endswith(".weight") and values.dtype == "I8"):
            continue
        scales = _companion(tensors, values, base + _SCALE)
        shape = _shape_of(_companion(tensors, values, base + _SHAPE), values, 32 // bits) if packed else values.shape
        fits = len(shape) == len(scales.shape) == 2 and scales.shape[0] == shape[0] and scales.shape[1] > 0
        if not fits or shape[1] % scales.shape[1]:
            raise _unfit(values, scales, shape)
        for used in (name, base + _SCALE, base + _SHAPE):
            found.pop(used, None)
        block = (1, shape[1] // scales.shape[1])
        found[base + ".weight"] = ScaledTensor(values, scales, shape, block, bits if packed else 0)
    return found


def _fp8(tensors: Mapping[str, StoredTensor], fields: Mapping[str, Any]) -> dict[str, StoredTensor | ScaledTensor]:
    size = fields.get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ConfigError(f"{CONFIG}: {FIELD}: weight_block_size must be two sizes, got {size!r:.100}.")
    block, found = (size[0], size[1]), dict[str, StoredTensor | ScaledTensor](tensors)
    for name, values in tensors.items():
        if values.dtype != "F8_E4M3":
            continue
        scales = _companion(tensors, values, name.removesuffix(".weight") + _SCALE_INV)
        fits = len(values.shape) == 2 and scales.shape == tuple(
            -(-n // step) for n, step in zip(values.shape, block, strict=True)
        )
        if not fits:
            raise _unfit(values, scales, values.shape)
        found[name] = ScaledTensor(values, scales, values.shape, block)
        del found[scales.name]
    return found


def _companion(tensors: Mapping[str, StoredTensor], values: StoredTensor, name: str) -> StoredTensor:
    if name not in tensors:
        raise DamagedError(f"{values.file}: tensor {values.name!r:.200} is quantized, but {name!r:.200} is missing.")
    return tensors[name]


def _unfit(values: StoredTensor, scales: StoredTensor, shape: tuple[int, ...]) -> DamagedError:
    return DamagedError(
        f"{values.file}: tensor {values.name!r:.200} {list(values.shape)} of a matrix {list(shape)}: the scales "
        f"{scales.name!r:.200} {list(scales.shape)} do not fit it. Remedy: copy all files of the checkpoint again."
    )


def _shape_of(stored: StoredTensor, values: StoredTensor, per: int) -> tuple[int, ...]:
    """Returns the shape of a packed matrix, which a tensor of two numbers holds."""
    numbers = np.zeros(2, STORED_DTYPES.get(stored.dtype, np.dtype(np.int64)))
    if stored.dtype in ("I32", "I64") and stored.shape == (2,):
        with stored.file.open("rb") as file:
            read_bytes(file.fileno(), stored, 0, memoryview(numbers.view(np.uint8)))
    shape = tuple(int(n) for n in numbers)
    if len(values.shape) != 2 or shape[0] != values.shape[0] or -(-shape[1] // per) != values.shape[1]:
        raise DamagedError(
            f"{values.file}: tensor {values.name!r:.200} {list(values.shape)}: {stored.name!r:.200} says that the "
            f"matrix is {list(shape)}, of which {per} numbers are packed in an int32."
        )
    return shape
