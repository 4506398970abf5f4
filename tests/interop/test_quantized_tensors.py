"""Stored integers and fp8 with scales: what they stand for, box by box, and tensors that do not fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from error_texts import raises

from jaxpar.checkpoint.manifest import Bounds
from jaxpar.errors import CheckpointError, ConfigError, DamagedError
from jaxpar.interop.quantized_tensors import FIELD, ScaledTensor, scaled_tensors
from jaxpar.interop.safetensors import STORED_DTYPES, StoredTensor, create_files, lay_out, read_tensors, write_bytes

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
BOXES: tuple[Bounds, ...] = (((0, 6), (0, 40)), ((1, 2), (3, 37)), ((4, 6), (16, 17)), ((5, 6), (39, 40)))
"""Boxes of a matrix [6, 40]: whole, and cut inside of packed words, groups and blocks."""


def stored(folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, StoredTensor]:
    found = lay_out(folder, {name: (NAMES[x.dtype], x.shape) for name, x in arrays.items()}, 10**9)
    create_files(found.values())
    with next(iter(found.values())).file.open("r+b") as file:
        for name, x in arrays.items():
            write_bytes(file.fileno(), found[name], 0, memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))
    return read_tensors(folder)


def read_box(tensor: StoredTensor, shape: tuple[int, ...], box: Bounds) -> np.ndarray:
    data = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.size]
    whole = np.frombuffer(data, STORED_DTYPES[tensor.dtype]).reshape(shape)
    return whole[tuple(slice(*bounds) for bounds in box)]


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers one after the other from the lowest bits of each int32, each with 2**(bits - 1) added."""
    per = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per)), np.uint32)
    for column in range(numbers.shape[1]):
        shifted = (numbers[:, column] + 2 ** (bits - 1)).astype(np.uint32) << np.uint32(bits * (column % per))
        words[:, column // per] |= shifted
    return words.view(np.int32)


def compressed(bits: int = 4, **changes: Any) -> dict[str, Any]:
    """Fields of ``config.json`` with integers of the package ``compressed-tensors``."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True}
    found = {"quant_method": "compressed-tensors", "format": "pack-quantized", **changes}
    return {FIELD: {"config_groups": {"group_0": {"weights": weights}}, **found}}


def integers(bits: int, groups: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a packed matrix [6, 40] ``w``, with a norm beside it; and what the matrix stands for."""
    rng = np.random.default_rng(bits)
    numbers = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 40))
    scales = rng.uniform(0.1, 1.0, (6, groups)).astype(np.float32)
    arrays = {"norm.weight": np.ones(6, np.float32), "w.weight_packed": packed(numbers, bits)}
    arrays |= {"w.weight_scale": scales, "w.weight_shape": np.asarray([6, 40])}
    return arrays, numbers.astype(np.float32) * np.repeat(scales, 40 // groups, 1)


def check(tensor: Any, want: np.ndarray) -> None:
    """Compare boxes of the matrix, and of the same one with its rows as two dims."""
    assert isinstance(tensor, ScaledTensor) and tensor.dtype == "F32" and tensor.shape == want.shape == (6, 40)
    for box in BOXES:
        np.testing.assert_array_equal(tensor.read(read_box, (6, 40), box), want[tuple(slice(*b) for b in box)])
    apart = tensor.read(read_box, (2, 3, 40), ((1, 2), (0, 2), (7, 33)))
    np.testing.assert_array_equal(apart, want.reshape(2, 3, 40)[1:, :2, 7:33])


@pytest.mark.parametrize(("bits", "groups"), [(4, 5), (8, 1)])
def test_packed_integers(tmp_path: Path, bits: int, groups: int) -> None:
    arrays, want = integers(bits, groups)
    found = scaled_tensors(stored(tmp_path, arrays), compressed(bits))
    assert sorted(found) == ["norm.weight", "w.weight"] and isinstance(found["norm.weight"], StoredTensor)
    check(found["w.weight"], want)
    with raises(CheckpointError, "model.safetensors", "w.weight_packed"):
        found["w.weight"].read(read_box, (6, 20, 2), ((0, 6), (0, 20), (0, 2)))  # type: ignore[union-attr]


def test_integers_by_themselves(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    numbers, scales = rng.integers(-128, 128, (6, 40)).astype(np.int8), rng.uniform(0.1, 1.0, (6, 4)).astype(np.float32)
    tensors = stored(tmp_path, {"w.weight": numbers, "w.weight_scale": scales})
    found = scaled_tensors(tensors, compressed(8, format="int-quantized"))
    assert list(found) == ["w.weight"]
    check(found["w.weight"], numbers.astype(np.float32) * np.repeat(scales, 10, 1))


def test_fp8_in_blocks(tmp_path: Path) -> None:
    """Blocks of 4 × 16: neither dim is a multiple of its block."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(6, 40)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 1.0, (2, 3)).astype(np.float32)
    tensors = stored(tmp_path, {"w.weight": values, "w.weight_scale_inv": scales, "b": np.ones(3, np.float32)})
    found = scaled_tensors(tensors, {FIELD: {"quant_method": "fp8", "weight_block_size": [4, 16]}})
    assert sorted(found) == ["b", "w.weight"]
    wide = np.repeat(np.repeat(scales, 4, 0), 16, 1)[:6, :40]
    check(found["w.weight"], values.astype(np.float32) * wide)
    for size in ([4], [4, 0], None):
        with raises(ConfigError, "config.json", "weight_block_size"):
            scaled_tensors(tensors, {FIELD: {"quant_method": "fp8", "weight_block_size": size}})
    with raises(DamagedError, "model.safetensors", "w.weight_scale_inv"):
        scaled_tensors(tensors, {FIELD: {"quant_method": "fp8", "weight_block_size": [4, 8]}})


INT4 = {"weights": {"num_bits": 4, "type": "int", "symmetric": True}}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({FIELD: {"quant_method": "gptq"}}, "'gptq'"),
        ({FIELD: "fp8"}, "quant_method None"),
        (compressed(format="marlin-24"), "marlin-24"),
        (compressed(2), "{'num_bits': 2,"),
        (compressed(config_groups={"a": {"weights": {"num_bits": 4}}}), "{'num_bits': 4}."),
        (compressed(config_groups={"a": {"weights": None}}), "got None"),
        (compressed(config_groups={"a": 3}), "got 3"),
        (
            compressed(config_groups={"a": INT4, "b": {"weights": INT4["weights"] | {"num_bits": 8}}}),
            "{'num_bits': 8,",
        ),
        (compressed(config_groups={}), "config_groups"),
        (compressed(config_groups=[INT4]), "config_groups"),
    ],
)
def test_other_methods_are_errors(fields: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        scaled_tensors({}, fields)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"w.weight_scale": None}, "but 'w.weight_scale'"),
        ({"w.weight_shape": None}, "but 'w.weight_shape'"),
        ({"w.weight_shape": np.asarray([6, 80])}, "80]"),
        ({"w.weight_shape": np.asarray([6.0, 40.0], np.float32)}, "[0"),
        ({"w.weight_scale": np.ones((6, 3), np.float32)}, "3]"),
        ({"w.weight_scale": np.ones((6, 0), np.float32)}, "[6, 0]"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    arrays = {name: x for name, x in (integers(4, 5)[0] | changes).items() if x is not None}
    with raises(DamagedError, text):
        scaled_tensors(stored(tmp_path, arrays), compressed(4))
