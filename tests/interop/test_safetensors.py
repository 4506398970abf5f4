"""Safetensors files that cannot be trusted: every problem is a typed error that names the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from jaxpar.errors import CheckpointError, DamagedError
from jaxpar.interop.safetensors import (
    _MAX_INDEX,
    StoredTensor,
    create_files,
    lay_out,
    read_bytes,
    read_header,
    read_tensors,
    runs,
)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", (2, 2), (8, 16)), "a": entry()}
    found = read_header(write(tmp_path / "one", header, bytes(16)))
    start = 8 + len(json.dumps(header))
    assert found["a"] == StoredTensor(tmp_path / "one", "a", "F32", (2,), start)
    assert found["b"].start == start + 8 and found["b"].size == 8


END = 16 + len(json.dumps({"a": entry()}))
"""The size of a file with this header."""
DAMAGED: dict[str, tuple[Any, bytes, int | None, str]] = {
    "empty file": (b"", b"", None, "JSONDecodeError"),
    "truncated": ({"a": entry()}, bytes(4), None, f"has {END - 4}"),
    "longer": ({"a": entry()}, bytes(9), None, f"has {END + 1}"),
    "huge header": ({}, b"", 2**63, "got 9223372036854775808"),
    "header beyond the end": ({}, b"", 3, "got 3"),
    "no JSON": (b"\xff\xfe", b"", None, "UnicodeDecodeError"),
    "deep JSON": (b"[" * 100_000, b"", None, "RecursionError"),
    "a list": ([], b"", None, "got list"),
    "a name twice": (b'{"a": 1, "a": 1}', b"", None, "repeats a key"),
    "no entry": ({"a": 1}, b"", None, "data_offsets, got 1"),
    "wrong dtype": ({"a": entry("F99")}, bytes(8), None, "dtype"),
    "negative size": (
        {"a": entry(shape=[-2])},
        bytes(8),
        None,
        "got [-2]",
    ),
    "boolean size": ({"a": entry(shape=[True])}, bytes(8), None, "[True]"),
    "many dims": ({"a": entry(shape=[1] * 9)}, bytes(8), None, "[1, 1"),
    "huge shape": ({"a": entry(shape=[2**62, 2**62])}, bytes(8), None, "the 85,07"),
    "backwards": ({"a": entry(offsets=(8, 0))}, bytes(8), None, "got [8, 0]"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, bytes(8), None, "two positions"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None, "tensor 'b' overlaps"),
    "hole": ({"a": entry(offsets=(4, 12))}, bytes(12), None, "4 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_an_error(damage: str, tmp_path: Path) -> None:
    header, data, length, name = DAMAGED[damage]
    with raises(DamagedError, str(tmp_path / "one"), name) as error:
        read_header(write(tmp_path / "one", header, data, length))
    assert len(*error.value.args) < 1000


def test_a_file_without_a_length_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc")
    with raises(DamagedError, "0 bytes", "/one"):
        read_header(tmp_path / "one")


# A busy machine generates slowly, which is no failure.


@examples(50)
@given(st.binary(max_size=60), st.integers(0, 80))
def test_no_bytes_raise_another_error(tmp_path_factory: pytest.TempPathFactory, text: bytes, length: int) -> None:
    file = write(tmp_path_factory.getbasetemp() / "random", text, b"", length)
    try:
        read_header(file)
    except DamagedError:
        pass


def sharded(folder: Path, weight_map: Any) -> Path:
    write(folder / "x.safetensors", {"a": entry()}, bytes(8))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "name"),
    [
        ({"a": "../x.safetensors"}, "../x.safetensors"),
        ({"a": "/etc/x.safetensors"}, "'a'"),
        ({"a": "..\\x.safetensors"}, "'a'"),
        ({"a": "x.safetensors\0"}, "'a'"),
        ({"a": "x.bin"}, "x.bin"),
        ({"a": 3}, "got 3"),
        ({"a": "y.safetensors"}, "y.safetensors"),
        ({"b": "x.safetensors"}, "'b'"),
        ([], "weight_map must"),
    ],
)
def test_a_wrong_index_is_an_error(weight_map: Any, name: str, tmp_path: Path) -> None:
    with raises(DamagedError, name):
        read_tensors(sharded(tmp_path, weight_map))


def test_an_index_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    with file.open("wb") as opened:
        opened.truncate(_MAX_INDEX + 1)
    with raises(DamagedError, "model.safetensors.index.json", "bytes"):
        read_tensors(tmp_path)


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "one", {"a": entry()}, bytes(8))
    tensor = read_header(file)["a"]
    with file.open("r+b") as opened:
        opened.truncate(tensor.start + 5)
        with raises(DamagedError, "tensor 'a'"):
            read_bytes(opened.fileno(), tensor, 2, memoryview(bytearray(6)))


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "y.safetensors", {"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))
    with raises(DamagedError, "'a'", "files"):
        read_tensors(sharded(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}))


def test_pickle_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with raises(CheckpointError, "pickle files"):
        read_tensors(tmp_path)
    with raises(CheckpointError, "model.safetensors", "/none"):
        read_tensors(tmp_path / "none")


def test_written_files_are_read(tmp_path: Path) -> None:
    shapes = {"a": ("F32", (3,)), "b": ("BF16", (2, 5)), "c": ("F16", ())}
    stored = lay_out(tmp_path, shapes, file_bytes=24)
    create_files(stored.values())
    assert read_tensors(tmp_path) == stored
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@examples(50)
@given(
    st.lists(st.integers(1, 4), max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.tuples(
                *(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda b: b[0] < b[1]) for n in shape)
            ),
        )
    )
)
def test_runs_are_the_positions_of_a_box(case: tuple[tuple[int, ...], Any]) -> None:
    shape, box = case
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    inside = numbers[tuple(slice(*b) for b in box)].reshape(-1)
    found = [at for start, length in runs(shape, box) for at in range(start, start + length)]
    assert found == inside.tolist()
