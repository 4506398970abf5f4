"""The limits of a manifest: a reader names the value that exceeds one, and a save that would exceed one is an error."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.checkpoint import manifest
from jaxpar.checkpoint.manifest import NAME, Manifest, TensorRecord, read
from jaxpar.checkpoint.manifest import write as write_manifest
from jaxpar.checkpoint.validate import opened
from jaxpar.checkpoint.verify import check_values, crc_of, health, names_in, problems_of
from jaxpar.errors import CheckpointError, DamagedError

TENSOR = {"dtype": "float32", "itemsize": 4, "shape": [4], "chunk": [2], "folder": "a/w", "sums": [1, 2]}
WHOLE: dict[str, Any] = {
    "tensors": {"w": {**TENSOR, "dims": ["embed"], "spec": "P('data')", "key": None}},
    "files": {"a/w/0": [8, 1], "a/w/1": [8, 2]},
    "step": 3,
    "versions": {},
    "layout": {},
    "metadata": {},
}


def deep(depth: int) -> Any:
    return [deep(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("part", "key", "value", "text"),
    [
        ("files", "a/w/0", [8], "[8]"),
        ("files", "a/w/0", [8, 1 << 32], "4294967296]"),
        ("files", "a/w/0", [True, 1], "[True"),
        ("files", "a/w/0", {"a": 1, "b": 2}, "{'a'"),
        ("files", "a/./0", [8, 1], "a/./0"),
        ("tensors", "a\nb", {}, "a\\nb"),
        ("tensors", "a/" * 64, {}, "tensor 'a/a/a/"),
        ("tensors", "a" * 1001, {}, "1,000"),
        ("versions", "jax", "\x1b", "\\x1b"),
        ("versions", "\x1b", "1", "\\x1b"),
        ("layout", "a", deep(63), "m: layout"),
        ("metadata", "a", deep(63), "m: metadata"),
        ("metadata", "\ud800", 1, "\\ud800"),
    ],
)
def test_a_value_out_of_bounds_is_named(part: str, key: str, value: Any, text: str) -> None:
    assert Manifest.from_data(WHOLE, "m").bytes == 16
    with raises(DamagedError, text):
        Manifest.from_data({**WHOLE, part: {**WHOLE[part], key: value}}, "m")


@pytest.mark.parametrize(
    ("state", "metadata", "name"),
    [
        ({"a\tb": jnp.ones(1)}, {}, "a\\tb"),
        ({"a": {"b/" * 63: jnp.ones(1)}}, {}, "a/" + "b/" * 40),
        ({"w": jnp.ones(1)}, {"a": deep(63)}, "than 64"),
        ({"w": jnp.ones(1)}, {"a": "\udfff"}, "\\udfff"),
    ],
)
def test_a_save_that_no_restore_would_accept_is_an_error(tmp_path: Path, state: Any, metadata: Any, name: str) -> None:
    with raises(CheckpointError, name):
        jp.save(tmp_path / "1", state, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_of_too_many_pieces_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    sum(map((tmp_path / "1" / NAME).read_text().count, ",[{"))
    monkeypatch.setattr(manifest, "_MOST_VALUES", 20)
    with raises(CheckpointError, "unfinished/manifest.json"):
        jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    with raises(DamagedError, "manifest.json", "46"):
        read(tmp_path / "1")
    monkeypatch.undo()
    assert jp.restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((4,), "float32")})["w"].tolist() == [1.0] * 4


def test_a_forged_size_of_a_value_is_named(tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {"w": jnp.ones((2, 4))})
    true = read(tmp_path / "1")
    (size, total) = true.files["arrays/w/0.0"]
    forged = replace(true.tensors["w"], itemsize=2)
    files = {**true.files, "arrays/w/0.0": (size // 2, total)}
    write_manifest(tmp_path / "1", replace(true, tensors={"w": forged}, files=files))
    with raises(DamagedError, "manifest.json", "float32"):
        jp.restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((2, 4), "float32")})


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ('"step":null', '"step":1e999', "manifest.json"),
        ('"step":null', '"step":NaN', "NaN"),
        ('"step":null', '"step":' + "9" * 5000, "Exceeds"),
    ],
)
def test_numbers_that_json_does_not_have_are_damage(before: str, after: str, name: str, tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    file = tmp_path / "1" / NAME
    content = file.read_text()
    assert content.count(before) == 1
    file.write_text(content.replace(before, after))
    with raises(DamagedError, name):
        read(tmp_path / "1")


def test_a_manifest_without_a_part_or_with_another_kind_is_damage() -> None:
    for changed, name in (
        ({key: value for key, value in WHOLE.items() if key != "step"}, "m: step"),
        ({**WHOLE, "files": []}, "files"),
        ({**WHOLE, "tensors": {"w": {**WHOLE["tensors"]["w"], "sums": 3}}}, "tensor w"),
    ):
        with raises(DamagedError, name):
            Manifest.from_data(changed, "m")


def test_a_manifest_that_is_too_large_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MOST_BYTES", 10)
    with raises(DamagedError, "10 bytes"):
        Manifest.from_json("{" + " " * 10, "m")


def test_files_outside_of_a_checkpoint_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="outside"):
        opened(tmp_path, "../other")


def test_a_folder_without_checkpoints_has_no_health(tmp_path: Path) -> None:
    with raises(CheckpointError, "/none", "folder"):
        list(health(tmp_path / "none"))
    assert names_in(tmp_path / "none") == [] == names_in(Path(__file__))


def test_the_search_for_problems_stops_at_20(tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {f"w{i}": jnp.ones(1) for i in range(25)})
    for file in (tmp_path / "1" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    found = problems_of(tmp_path / "1")
    assert len(found) == 21 and found[-1] == "and possibly more: the search stopped here."
    assert len(set(found)) == 21 and all(str(tmp_path / "1") in text for text in found[:-1])


def test_a_killed_replacement_names_the_checkpoint_before(tmp_path: Path) -> None:
    jp.save(tmp_path / "1.replaced", {"w": jnp.ones(4)})
    (tmp_path / "1").mkdir()
    with raises(CheckpointError, "1.replaced"):
        read(tmp_path / "1")


def test_values_of_a_piece_beyond_its_tensor_are_compared_without_what_is_beyond(tmp_path: Path) -> None:
    """The last of pieces of 2 × 2 of a tensor [3, 3] has one value, and padding."""
    tensor = TensorRecord("float32", 4, (3, 3), (2, 2), "arrays/w", (0,) * 4)
    piece = np.array([[7.0, -1.0], [-1.0, -1.0]], np.float32)
    right = zlib.crc32(piece[:1, :1].tobytes())
    bounds, data = ((2, 3), (2, 3)), piece.reshape(-1).view(np.uint8)
    check_values(tmp_path, "w", data, tensor, bounds, right, zlib.crc32(piece.tobytes()))
    with raises(DamagedError, "values of w"):
        check_values(tmp_path, "w", data, tensor, bounds, 5, zlib.crc32(piece.tobytes()))


def test_a_file_of_more_bytes_than_expected_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert crc_of(tmp_path, "a", 4) == (5, -1)
    assert crc_of(tmp_path, "a", 5) == crc_of(tmp_path, "a") == (5, zlib.crc32(b"12345"))


def test_a_state_of_empty_arrays_is_saved_and_restored(tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {"w": jnp.zeros((0, 3))})
    assert jp.restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((0, 3), "float32")})["w"].shape == (0, 3)
