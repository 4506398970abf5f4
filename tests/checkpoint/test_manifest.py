"""The limits of a manifest: a reader names the value that exceeds one, and a save that would exceed one is an error."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.checkpoint import manifest
from jaxpar.checkpoint.manifest import NAME, REMEDY, Manifest, TensorRecord, read
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
        ("files", "a/w/0", [8], "a/w/0 must have two integers, its bytes and its CRC-32, got [8]"),
        ("files", "a/w/0", [8, 1 << 32], "a/w/0 must have two integers, its bytes and its CRC-32, got [8, 4294967296]"),
        ("files", "a/w/0", [True, 1], "a/w/0 must have two integers, its bytes and its CRC-32, got [True, 1]"),
        ("files", "a/w/0", {"a": 1, "b": 2}, "a/w/0 must have two integers, its bytes and its CRC-32, got {'a': 1, "),
        ("files", "a/./0", [8, 1], "the file 'a/./0' is outside the checkpoint's folder"),
        ("tensors", "a\nb", {}, r"tensor 'a\nb': its path must be printable"),
        ("tensors", "a/" * 64, {}, "tensor 'a/a/a/"),
        ("tensors", "a" * 1001, {}, f"tensor '{'a' * 200}': its path must have at most 1,000 characters and 64 parts"),
        ("versions", "jax", "\x1b", r"versions must be a printable string, got '\x1b'"),
        ("versions", "\x1b", "1", r"versions must be a printable string, got '\x1b'"),
        ("layout", "a", deep(63), "layout is nested more than 64 levels deep"),
        ("metadata", "a", deep(63), "metadata is nested more than 64 levels deep"),
        ("metadata", "\ud800", 1, r"metadata has a text that is not Unicode: '\ud800'"),
    ],
)
def test_a_value_out_of_bounds_is_named(part: str, key: str, value: Any, text: str) -> None:
    assert Manifest.from_data(WHOLE, "m").bytes == 16
    with pytest.raises(DamagedError, match=rf"^m: {re.escape(text)}.*\. {re.escape(REMEDY)}$"):
        Manifest.from_data({**WHOLE, part: {**WHOLE[part], key: value}}, "m")


@pytest.mark.parametrize(
    ("state", "metadata", "text"),
    [
        ({"a\tb": jnp.ones(1)}, {}, r"'a\tb': its path must be printable. Remedy: rename it."),
        ({"a": {"b/" * 63: jnp.ones(1)}}, {}, f"'a/{'b/' * 63}': its path must have at most 1,000 characters and 64 "),
        ({"w": jnp.ones(1)}, {"a": deep(63)}, "metadata: metadata is nested more than 64 levels deep. A manifest "),
        ({"w": jnp.ones(1)}, {"a": "\udfff"}, r"metadata: metadata has a text that is not Unicode: '\udfff'. A manif"),
    ],
)
def test_a_save_that_no_restore_would_accept_is_an_error(tmp_path: Path, state: Any, metadata: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}"):
        jp.save(tmp_path / "1", state, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_of_too_many_pieces_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    values = sum(map((tmp_path / "1" / NAME).read_text().count, ",[{"))
    text = f"1.unfinished/{NAME} has {values} values, more than the limit of 20: it describes 1 pieces of 1 tensors. "
    monkeypatch.setattr(manifest, "_MOST_VALUES", 20)
    with pytest.raises(CheckpointError, match=rf"{re.escape(text)}Remedy: shard small tensors over fewer devices, or "):
        jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    with pytest.raises(DamagedError, match=rf"^{tmp_path}/1/{NAME} has {values} values, more than the limit of 20\. "):
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
    text = f"{tmp_path}/1/{NAME}: tensor w: a value of float32 has 4 bytes, got 2. {REMEDY}"
    with pytest.raises(DamagedError, match=f"^{re.escape(text)}$"):
        jp.restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((2, 4), "float32")})


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('"step":null', '"step":1e999', "was changed after it was written: its own checksum does not match"),
        ('"step":null', '"step":NaN', "is not JSON: NaN is not a JSON number"),
        ('"step":null', '"step":' + "9" * 5000, "is not JSON: Exceeds the limit"),
    ],
)
def test_numbers_that_json_does_not_have_are_damage(before: str, after: str, text: str, tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {"w": jnp.ones(4)})
    file = tmp_path / "1" / NAME
    content = file.read_text()
    assert content.count(before) == 1
    file.write_text(content.replace(before, after))
    with pytest.raises(DamagedError) as error:
        read(tmp_path / "1")
    assert str(error.value).startswith(f"{file} {text}") and str(error.value).endswith(REMEDY)


def test_a_manifest_without_a_part_or_with_another_kind_is_damage() -> None:
    for changed, text in (
        ({key: value for key, value in WHOLE.items() if key != "step"}, "step is missing"),
        ({**WHOLE, "files": []}, "files must be a JSON object, got list"),
        (
            {**WHOLE, "tensors": {"w": {**WHOLE["tensors"]["w"], "sums": 3}}},
            "tensor w: sums must be a list of integers",
        ),
    ):
        with pytest.raises(DamagedError, match=rf"^m: {re.escape(text)}.*\. {re.escape(REMEDY)}$"):
            Manifest.from_data(changed, "m")


def test_a_manifest_that_is_too_large_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MOST_BYTES", 10)
    with pytest.raises(DamagedError) as error:
        Manifest.from_json("{" + " " * 10, "m")
    assert str(error.value) == f"m has more than 10 bytes, the limit for a manifest. {REMEDY}"


def test_files_outside_of_a_checkpoint_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is outside the checkpoint's folder"):
        opened(tmp_path, "../other")


def test_a_folder_without_checkpoints_has_no_health(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        list(health(tmp_path / "none"))
    assert str(error.value) == (
        f"{tmp_path / 'none'} is not a folder, so it holds no checkpoint. Remedy: the folder of a run's checkpoints, "
        "or of one of them."
    )
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
    with pytest.raises(CheckpointError) as error:
        read(tmp_path / "1")
    before = tmp_path / "1.replaced"
    assert str(error.value).endswith(
        f"Remedy: use {before}, the previous checkpoint; the save that was replacing it was killed."
    )


def test_values_of_a_piece_beyond_its_tensor_are_compared_without_what_is_beyond(tmp_path: Path) -> None:
    """The last of pieces of 2 × 2 of a tensor [3, 3] has one value, and padding."""
    tensor = TensorRecord("float32", 4, (3, 3), (2, 2), "arrays/w", (0,) * 4)
    piece = np.array([[7.0, -1.0], [-1.0, -1.0]], np.float32)
    right = zlib.crc32(piece[:1, :1].tobytes())
    bounds, data = ((2, 3), (2, 3)), piece.reshape(-1).view(np.uint8)
    check_values(tmp_path, "w", data, tensor, bounds, right, zlib.crc32(piece.tobytes()))
    with pytest.raises(DamagedError) as error:
        check_values(tmp_path, "w", data, tensor, bounds, 5, zlib.crc32(piece.tobytes()))
    assert str(error.value) == (
        f"{tmp_path} holds values of w that differ from those in memory: their checksum is {right:08x}, expected "
        "00000005."
    )


def test_a_file_of_more_bytes_than_expected_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert crc_of(tmp_path, "a", 4) == (5, -1)
    assert crc_of(tmp_path, "a", 5) == crc_of(tmp_path, "a") == (5, zlib.crc32(b"12345"))


def test_a_state_of_empty_arrays_is_saved_and_restored(tmp_path: Path) -> None:
    jp.save(tmp_path / "1", {"w": jnp.zeros((0, 3))})
    assert jp.restore(tmp_path / "1", {"w": jax.ShapeDtypeStruct((0, 3), "float32")})["w"].shape == (0, 3)
