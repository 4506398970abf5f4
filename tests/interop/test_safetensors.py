"""Safetensors files that cannot be trusted: every problem is a typed error that names the file and the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    "empty file": (b"", b"", None, "header must be JSON, got JSONDecodeError"),
    "truncated": ({"a": entry()}, bytes(4), None, f"the tensors must end at byte {END}, but the file has {END - 4}"),
    "longer": ({"a": entry()}, bytes(9), None, f"the tensors must end at byte {END}, but the file has {END + 1}"),
    "huge header": ({}, b"", 2**63, "the header must have at most 2 bytes in a file of 10, got 9223372036854775808"),
    "header beyond the end": ({}, b"", 3, "the header must have at most 2 bytes in a file of 10, got 3"),
    "no JSON": (b"\xff\xfe", b"", None, "header must be JSON, got UnicodeDecodeError"),
    "deep JSON": (b"[" * 100_000, b"", None, "header must be JSON, got RecursionError"),
    "a list": ([], b"", None, "header must be a JSON object, got list"),
    "a name twice": (b'{"a": 1, "a": 1}', b"", None, "an object repeats a key"),
    "no entry": ({"a": 1}, b"", None, "tensor 'a': the entry must have dtype, shape and data_offsets, got 1"),
    "wrong dtype": ({"a": entry("F99")}, bytes(8), None, "tensor 'a': dtype must be one of BOOL, U8,"),
    "negative size": (
        {"a": entry(shape=[-2])},
        bytes(8),
        None,
        "shape must be at most 8 integers, 0 or more, got [-2]",
    ),
    "boolean size": ({"a": entry(shape=[True])}, bytes(8), None, "shape must be at most 8 integers"),
    "many dims": ({"a": entry(shape=[1] * 9)}, bytes(8), None, "shape must be at most 8 integers"),
    "huge shape": ({"a": entry(shape=[2**62, 2**62])}, bytes(8), None, "data_offsets must span the 85,07"),
    "backwards": ({"a": entry(offsets=(8, 0))}, bytes(8), None, "must span the 8 bytes of F32 [2], got [8, 0]"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, bytes(8), None, "data_offsets must be two positions"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None, "tensor 'b' overlaps another"),
    "hole": ({"a": entry(offsets=(4, 12))}, bytes(12), None, "tensor 'a' leaves 4 bytes before it unused"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_error(name: str, tmp_path: Path) -> None:
    header, data, length, text = DAMAGED[name]
    with pytest.raises(DamagedError) as error:
        read_header(write(tmp_path / "one", header, data, length))
    assert text in str(error.value) and str(tmp_path / "one") in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_file_without_a_length_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc")
    with pytest.raises(DamagedError, match="at most 0 bytes in a file of 3, got no length"):
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
    ("weight_map", "text"),
    [
        ({"a": "../x.safetensors"}, "must be in a .safetensors file of the same folder, got '../x.safetensors'"),
        ({"a": "/etc/x.safetensors"}, "must be in a .safetensors file of the same folder"),
        ({"a": "..\\x.safetensors"}, "must be in a .safetensors file of the same folder"),
        ({"a": "x.safetensors\0"}, "must be in a .safetensors file of the same folder"),
        ({"a": "x.bin"}, "must be in a .safetensors file of the same folder, got 'x.bin'"),
        ({"a": 3}, "must be in a .safetensors file of the same folder, got 3"),
        ({"a": "y.safetensors"}, "y.safetensors is missing"),
        ({"b": "x.safetensors"}, "'b' must be in x.safetensors, but it is not"),
        ([], "weight_map must map names of tensors to files"),
    ],
)
def test_a_wrong_index_is_an_error(weight_map: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedError) as error:
        read_tensors(sharded(tmp_path, weight_map))
    assert text in str(error.value)


def test_an_index_that_is_too_large_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    with file.open("wb") as opened:
        opened.truncate(_MAX_INDEX + 1)
    with pytest.raises(DamagedError) as error:
        read_tensors(tmp_path)
    assert str(error.value) == f"{file} must have at most {_MAX_INDEX:,} bytes, got {_MAX_INDEX + 1:,}."


def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "one", {"a": entry()}, bytes(8))
    tensor = read_header(file)["a"]
    with file.open("r+b") as opened:
        opened.truncate(tensor.start + 5)
        with pytest.raises(DamagedError) as error:
            read_bytes(opened.fileno(), tensor, 2, memoryview(bytearray(6)))
    assert str(error.value) == f"{file}: tensor 'a' is truncated. Remedy: copy the file again."


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "y.safetensors", {"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16))
    with pytest.raises(DamagedError, match="'a' is in two files"):
        read_tensors(sharded(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}))


def test_pickle_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="only pickle files, which can run code and are not read"):
        read_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="neither model.safetensors nor model.safetensors.index.json"):
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
