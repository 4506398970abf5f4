"""Any damage to a checkpoint's files or manifest is detected, and names the file and the tensor."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from placed_arrays import mesh, put
from profiles import examples

import jaxpar as jp
from jaxpar.checkpoint.manifest import Manifest, TensorRecord, read
from jaxpar.checkpoint.manifest import write as write_manifest
from jaxpar.checkpoint.verify import problems_of
from jaxpar.errors import CheckpointError, DamagedError


def corrupt(folder: Path, files: list[Path], dice: random.Random) -> list[Path]:
    """Damage one or two files in a way that the dice choose, and return those files; each differs from its original."""
    file, other = dice.sample(files, 2)
    data = file.read_bytes()
    turned = data[len(data) // 2 :] + data[: len(data) // 2]
    spoilt = bytearray(data)
    spoilt[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    ways = [
        bytes(spoilt),
        bytes(spoilt),
        data[: dice.randrange(len(data))],
        data + b"\0",
        bytes(len(data)),
        turned,
        None,
    ]
    made = dice.choice(["swap", *(way for way in ways if way != data)])
    if made == "swap":
        if other.read_bytes() == data:
            other.unlink()
            return [other]
        shutil.copyfile(other, file)
        other.write_bytes(data)
        return [file, other]
    if made is None:
        file.unlink()
    else:
        assert isinstance(made, bytes)
        file.write_bytes(made)
    return [file]


@pytest.mark.slow
def test_random_corruptions_are_all_detected_and_named(tmp_path: Path) -> None:
    one, copy, dice = tmp_path / "one", tmp_path / "copy", random.Random(0)
    jp.save(
        one,
        {"w": put(np.arange(32.0, dtype=np.float32), mesh(data=2), "data"), "b": jnp.zeros(3)},
        metadata={"seed": 1},
    )
    shutil.copytree(one, copy)
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    for _ in range(400):
        touched = corrupt(copy, files, dice)
        found = " ".join(problems_of(copy))
        assert all(str(file) in found or "manifest.json" in str(touched) for file in touched) and found, touched
        for file in touched:
            shutil.copyfile(one / file.relative_to(copy), file)
    assert problems_of(copy) == []


def test_damage_names_tensor_and_file_in_words(saved: Path, state: jp.TrainState, tmp_path: Path) -> None:
    piece = "arrays/params.block.up/3.0"

    def damaged(do: Callable[[Path], Any], name: str) -> None:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        do(copy / piece)
        with raises(DamagedError, str(copy / piece), "params/block/up", name) as error:
            jp.restore(copy, state)
        assert problems_of(copy) == [*error.value.args]

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[7] ^= 16
        file.write_bytes(data)

    damaged(flip, "checksum")
    damaged(lambda file: os.truncate(file, 100), "100 bytes")
    damaged(Path.unlink, "missing")
    outside = tmp_path / "outside"
    shutil.copyfile(saved / piece, outside)
    damaged(lambda f: (f.unlink(), f.symlink_to(outside)), str(outside))


def test_a_manifest_of_another_state_or_one_made_up_is_refused(
    saved: Path, state: jp.TrainState, tmp_path: Path
) -> None:
    other, copy = tmp_path / "other", tmp_path / "copy"
    jp.save(other, replace(state, params=jax.tree.map(lambda x: x * 2, state.params)))
    shutil.copytree(saved, copy)
    for name in ("manifest.json", "arrays/_CHECKPOINT_METADATA", "arrays/commit_success.txt"):
        shutil.copyfile(other / name, copy / name)  # the last two have the time and the folder of the save
    with raises(DamagedError, "params/block/bias"):
        jp.restore(copy, state)
    true = read(saved)
    name, tensor = "params/block/up", true.tensors["params/block/up"]
    for entry, files, text in (
        (replace(tensor, folder="../up"), {}, "../up"),
        (tensor, {"/etc/passwd": (1, 1)}, "/etc/passwd"),
        (replace(tensor, sums=tensor.sums[1:]), {}, "8"),
        (replace(tensor, chunk=(0, 24)), {}, "tensor params"),
        (replace(tensor, chunk=(2, 12), sums=tensor.sums * 2), {}, "192"),
        (replace(tensor, folder="arrays/gone"), {}, "arrays/gone/0.0"),
    ):
        made = replace(true, tensors={**true.tensors, name: entry}, files={**true.files, **files})
        with raises(DamagedError, text):
            Manifest.from_json(made.to_json(), "m")
    # Its checksums agree with each other and with the files, but not with the values.
    values = replace(true, tensors={**true.tensors, name: replace(tensor, sums=tensor.sums[::-1])})
    shutil.copytree(saved, tmp_path / "again")
    write_manifest(tmp_path / "again", values)
    assert "holds values of params/block/up that differ from those in memory" in problems_of(tmp_path / "again")[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@examples(60)
@given(data=st.data())
def test_malformed_manifests_are_checkpoint_errors(data: st.DataObject) -> None:
    entry = {
        n: getattr(TensorRecord("float32", 4, (4,), (2,), "a/w", (1, 2)), n) for n in TensorRecord.__dataclass_fields__
    }
    whole = json.loads(Manifest({}, {"a/w/0": (8, 1), "a/w/1": (8, 2)}, 3).to_json())
    whole["tensors"] = {"w": json.loads(json.dumps(entry))}
    assert Manifest.from_data(whole, "m").tensors["w"].sums == (1, 2)
    at: Any = data.draw(st.sampled_from([whole, whole["tensors"], whole["tensors"]["w"], whole["files"]]))
    key = data.draw(st.sampled_from([*at, "new"]))
    at[key] = data.draw(JSON)
    try:
        list(Manifest.from_data(whole, "m").tensors.items())
    except CheckpointError as error:
        assert str(error).startswith("m")
    text = data.draw(st.text(max_size=30) | JSON.map(json.dumps))
    with pytest.raises(DamagedError, match=r"^m "):
        Manifest.from_json(text, "m")
