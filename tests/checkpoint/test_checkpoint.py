"""Checkpoints restore bit for bit onto any layout, detect all damage, and a run's folder survives disk failures."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from profiles import examples

import jaxpar as jp
from jaxpar.checkpoint import manager as manager_module
from jaxpar.checkpoint import save as writing
from jaxpar.checkpoint.manifest import Manifest, TensorRecord, read
from jaxpar.checkpoint.manifest import write as write_manifest
from jaxpar.checkpoint.verify import check, health, problems_of, steps_in
from jaxpar.errors import CheckpointError, ConfigError, DamagedError

TX = optax.adam(1e-2)


def mesh(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(
        np.array(jax.devices()[:count]).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def put(x: Any, where: Mesh, *spec: Any, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(where, PartitionSpec(*spec), memory_kind=kind))


def like(x: Any, where: Mesh, *spec: Any, kind: str = "device") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(where, PartitionSpec(*spec), memory_kind=kind))


def numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal bit for bit, dtypes included."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and numbers(x).tobytes() == numbers(y).tobytes() for x, y in pairs)


@pytest.fixture(scope="module")
def state(mlp: Any) -> jp.TrainState:
    """A training state after one step, fully sharded over eight devices."""
    step = jp.train_step(mlp.layout(), mlp.loss)
    return step(jp.init(mlp.layout(), mlp.make, TX), mlp.batch())[0]


@pytest.fixture(scope="module")
def saved(state: jp.TrainState, mlp: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which that state is saved."""
    folder = tmp_path_factory.mktemp("saved") / "one"
    jp.save(folder, state, layout=mlp.layout(), metadata={"config": {"seed": 3}, "position": {"step": 1}})
    return folder


def test_a_manifest_says_what_a_checkpoint_holds_and_vouches_for_it(saved: Path, state: jp.TrainState) -> None:
    found = check(saved)
    assert found.step == 1 and found.metadata["config"] == {"seed": 3} and found.metadata["position"] == {"step": 1}
    assert found.layout["mesh"]["data"] == 8 and found.layout["processes"] == 1 and len(found.layout["rules"]) == 32
    assert set(found.versions) == {"jaxpar", "jax", "orbax-checkpoint", "numpy"}
    assert found.metadata["rng"]["key"] == {"impl": "threefry2x32", "data": numbers(state.key).tolist()}
    up = found.tensors["params/block/up"]
    assert (up.dtype, up.shape, up.dims, up.spec) == ("float32", (16, 24), ("embed", "mlp"), "P('data',)")
    assert up.chunk == (2, 24) and len(up.sums) == 8
    assert found.bytes == sum(numbers(x).nbytes for x in jax.tree.leaves(state))
    assert [p.name for p in saved.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("count", [8, 4, 2, 1])
def test_a_state_is_restored_bit_for_bit_on_any_number_of_devices(
    saved: Path, state: jp.TrainState, mlp: Any, count: int
) -> None:
    layout = mlp.layout(mesh=jp.MeshSpec(data=-1).build(jax.devices()[:count]))
    wanted = jp.abstract_state(layout, mlp.make, TX)
    with layout:
        found = jp.restore(saved, wanted)
    assert same(found, state) and found.metadata == wanted.metadata
    assert found.params["block"]["up"].sharding == wanted.params["block"]["up"].sharding


def test_counts_that_do_not_divide_each_other_and_pieces_that_straddle(tmp_path: Path) -> None:
    x = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
    jp.save(tmp_path / "a", {"x": put(x, mesh(data=8), "data")})
    sixth = jp.restore(tmp_path / "a", {"x": like(x, mesh(data=6), "data")})
    jp.save(tmp_path / "b", sixth)
    for spec in (("data", None), (None, "model"), (("model", "data"), None), (None, None)):
        found = jp.restore(tmp_path / "b", {"x": like(x, mesh(data=3, model=2), *spec)})["x"]
        assert np.array_equal(found, x) and found.sharding.spec == PartitionSpec(*spec)
    assert np.array_equal(jp.restore(tmp_path / "b", {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})["x"], x)


def test_every_kind_of_leaf_comes_back(tmp_path: Path) -> None:
    eight, pair = mesh(data=8), mesh(data=2)
    odd = {
        "bfloat16": put(jnp.arange(16, dtype=jnp.bfloat16), eight, "data"),
        "bool": jnp.arange(5) % 2 == 0,
        "int8 a.b/c~%": put(jnp.arange(-4, 4, dtype=jnp.int8), eight),
        "scalar": jnp.float32(-0.0),
        "nan": jnp.array([np.nan, np.inf, -0.0], jnp.float16),
        "empty": jnp.zeros((0, 4)),
        "host": put(np.arange(16.0, dtype=np.float32), eight, "data", kind="pinned_host"),
        "keys": put(jax.random.split(jax.random.key(1), 8), eight, "data"),
        "rbg": jax.random.key(7, impl="rbg"),
        "": jnp.ones(2),
    }
    jp.save(tmp_path / "odd", odd)
    assert problems_of(tmp_path / "odd") == []
    there = {name: () if x.ndim != 1 or x.size % 2 else ("data",) for name, x in odd.items()}
    wanted = {n: like(x, pair, *there[n], kind="pinned_host" if n == "host" else "device") for n, x in odd.items()}
    found = jp.restore(tmp_path / "odd", wanted)
    assert same(found, odd) and found["rbg"].dtype == odd["rbg"].dtype
    assert found["host"].sharding.memory_kind == "pinned_host" and found["keys"].sharding.spec == PartitionSpec("data")


def test_plain_orbax_reads_what_jaxpar_wrote(saved: Path, state: jp.TrainState) -> None:
    """Each call of docs/reference/checkpoints.md, the two that cannot work among them."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental import v1

    folder, up = saved / "arrays", state.params["block"]["up"]
    tree = ocp.PyTreeCheckpointer().metadata(folder).item_metadata.tree
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), tree)
    for found in (
        ocp.StandardCheckpointer().restore(folder),
        ocp.StandardCheckpointer().restore(folder, target),
        ocp.PyTreeCheckpointer().restore(folder, restore_args=arguments),
        v1.load(folder, target),
    ):
        assert np.array_equal(found["params"]["block"]["up"], up)
    for load in (ocp.PyTreeCheckpointer().restore, v1.load):
        with pytest.raises(ValueError, match=r"Sharding of jax\.Array cannot be None"):
            load(folder)


def test_layers_of_a_pipeline_of_none_stacked_and_single(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    pipe = mesh(pipeline=4, model=2)
    jp.save(tmp_path / "pipe", {"params": {"blocks": {"w": put(stack, pipe, "pipeline", None, "model")}}})
    alone = mesh(data=1)
    whole = jp.restore(tmp_path / "pipe", {"params": {"blocks": {"w": like(stack, alone)}}})
    assert np.array_equal(whole["params"]["blocks"]["w"], stack)
    single = {"params": {"blocks": {str(i): {"w": like(stack[i], mesh(data=3), "data")} for i in range(4)}}}
    found = jp.restore(tmp_path / "pipe", single)
    assert all(np.array_equal(found["params"]["blocks"][str(i)]["w"], stack[i]) for i in range(4))
    jp.save(tmp_path / "single", {"params": {f"block_{i}": found["params"]["blocks"][str(i)] for i in range(4)}})
    again = jp.restore(tmp_path / "single", {"params": {"block": {"w": like(stack, pipe, "pipeline", "model")}}})
    assert np.array_equal(again["params"]["block"]["w"], stack)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: params/block/w float32\[5, 6, 8\]"):
        jp.restore(tmp_path / "single", {"params": {"block": {"w": like(np.zeros((5, 6, 8), np.float32), alone)}}})


def test_a_scalar_of_each_layer_is_stacked_and_taken_from_a_stack(tmp_path: Path) -> None:
    scales, two = np.float32([3.5, -1.25, 0.75, 2.0]), mesh(pipeline=2)
    jp.save(tmp_path / "single", {"params": {f"layer_{i}": {"scale": jnp.asarray(x)} for i, x in enumerate(scales)}})
    for target in (like(scales, two, "pipeline"), like(scales, two)):
        stacked = jp.restore(tmp_path / "single", {"params": {"layer": {"scale": target}}})
        assert np.array_equal(stacked["params"]["layer"]["scale"], scales)
    jp.save(tmp_path / "stack", stacked)
    single = {"params": {f"layer_{i}": {"scale": like(scales[i], two)} for i in range(4)}}
    found = jp.restore(tmp_path / "stack", single)["params"]
    assert [float(found[f"layer_{i}"]["scale"]) for i in range(4)] == scales.tolist()


def test_parts_and_other_names(saved: Path, state: jp.TrainState, mlp: Any) -> None:
    fresh = jp.init(mlp.one_device, mlp.make, TX, seed=9)
    found = jp.restore(saved, fresh, only=["params"])
    assert same(found.params, state.params) and same(found.opt_state, fresh.opt_state) and int(found.step) == 0
    assert same(jp.restore(saved, {"params": state.params}, only=["params"])["params"], state.params)
    wanted = {"net": {"mid": {"up": state.params["block"]["up"]}}}
    table = {"params/block": "net/mid", "params/block/down": "net/out"}
    assert same(
        jp.restore(saved, wanted, only=["net/mid/up"], rename=table),
        {"net": {"mid": {"up": state.params["block"]["up"]}}},
    )
    with pytest.raises(
        CheckpointError, match=r"rename: .* has no tensor 'params/blok'. Did you mean 'params/block/up'\?"
    ):
        jp.restore(saved, wanted, rename={"params/blok": "x"})
    with pytest.raises(CheckpointError, match=r"only: no path of `like` begins with 'parms'. Did you mean 'params'\?"):
        jp.restore(saved, state, only=["parms"])
    with pytest.raises(CheckpointError, match=r"would become 'params/square'"):
        jp.restore(saved, state, rename={"params/temperature": "params/square"})
    abstract = jp.abstract_state(mlp.layout(), mlp.make, TX)
    with pytest.raises(
        CheckpointError, match=r"^key is not restored, because only= excludes it, but `like` has no value"
    ):
        jp.restore(saved, replace(abstract, step=state.step, opt_state=state.opt_state), only=["params"])


def test_a_checkpoint_of_another_model_lists_every_difference(saved: Path, mlp: Any, tmp_path: Path) -> None:
    def other(key: jax.Array) -> dict[str, Any]:
        made = mlp.make(key)
        made["block"]["extra"] = jp.tag(jnp.ones(3), None)
        made["square"] = jp.tag(jnp.ones((8, 16)), "embed", "mlp")
        del made["temperature"]
        return made

    with pytest.raises(CheckpointError) as error:
        jp.restore(saved, jp.abstract_state(mlp.layout(), other, optax.sgd(1e-2)), only=["params"])
    assert str(error.value) == (
        f"{saved} does not match the state to restore:\n"
        "- missing in the checkpoint: params/block/extra float32[3]\n"
        "- only in the checkpoint: params/temperature float32[]\n"
        "- of another shape or dtype: params/square is float32[16, 16] in the checkpoint, but float32[8, 16] in the "
        "state\n"
        "Remedy: use the model and optimizer of the checkpoint, rename= for other names, or only= for a part, such as "
        "only=['params']."
    )
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint: manifest.json is missing.$"):
        jp.restore(tmp_path, {"x": jnp.ones(1)})
    with pytest.raises(CheckpointError, match=r"`like` has a sharding without devices"):
        jp.restore(saved, jp.abstract_state(jp.Layout(jp.MeshSpec(data=8).abstract(), mlp.rules), mlp.make, TX))


def test_what_cannot_be_saved_is_named(tmp_path: Path, mlp: Any) -> None:
    one = jnp.ones(2)
    for value, text in (
        ({"a": {"b": 3}}, "a/b must be a jax array, got int. Remedy: jnp.asarray(...)."),
        ({"a": {"b": one}, "a/b": one}, "two tensors have the path 'a/b'. Remedy: use keys without a slash."),
        ({"a": jax.ShapeDtypeStruct((2,), "float32")}, "the state must hold arrays, got shapes."),
    ):
        with pytest.raises(CheckpointError, match=re.escape(text)):
            jp.save(tmp_path / "x", value)
    with pytest.raises(CheckpointError, match=r"^metadata: Out of range float values are not JSON compliant"):
        jp.save(tmp_path / "x", {"a": one}, metadata={"loss": float("nan")})
    disk = jp.init(mlp.one_device, mlp.make, jp.offload.to_disk(TX, path=tmp_path / "d", min_bytes=0))
    with pytest.raises(CheckpointError, match=r"^the optimizer state is on disk, .* Remedy: pass disk=step"):
        jp.save(tmp_path / "x", disk)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_state_on_disk_is_saved_with_its_files(tmp_path: Path, mlp: Any) -> None:
    layout, batch = mlp.one_device, mlp.batch()
    first = jp.init(layout, mlp.make, jp.offload.to_disk(TX, path=tmp_path / "d", min_bytes=0))
    with jp.offload.disk_offloaded_train_step(layout, mlp.loss, first, donate=False) as step:
        one, _ = step(first, batch)
        jp.save(tmp_path / "one", one, disk=step)
        two, _ = step(one, batch)
    assert problems_of(tmp_path / "one") == [] and any(n.startswith("disk/") for n in read(tmp_path / "one").files)
    tx = jp.offload.to_disk(TX, path=tmp_path / "e", min_bytes=0)
    again = jp.restore(tmp_path / "one", jp.abstract_state(layout, mlp.make, tx))
    with jp.offload.disk_offloaded_train_step(layout, mlp.loss, again, restore=tmp_path / "one" / "disk") as step:
        assert same(step(again, batch)[0].params, two.params)


# Damaged checkpoints.


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

    def damaged(do: Callable[[Path], Any]) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(saved, copy)
        do(copy / piece)
        with pytest.raises(DamagedError) as error:
            jp.restore(copy, state)
        assert problems_of(copy) == [str(error.value)]
        return str(error.value).replace(str(copy / piece), "FILE")

    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[7] ^= 16
        file.write_bytes(data)

    assert re.fullmatch(
        (
            r"FILE, which holds params/block/up, was changed after it was written: its checksum is [0-9a-f]{8}, "
            r"expected [0-9a-f]{8}\."
        ),
        damaged(flip),
    )
    cut = "FILE, which holds params/block/up, has 100 bytes, expected 192."
    assert damaged(lambda file: os.truncate(file, 100)) == cut
    assert damaged(Path.unlink) == "FILE, which holds params/block/up, is missing."
    outside = tmp_path / "outside"
    shutil.copyfile(saved / piece, outside)
    link = f"FILE, which holds params/block/up, cannot be read: it is a symbolic link to '{outside}'."
    assert damaged(lambda f: (f.unlink(), f.symlink_to(outside))) == link


def test_a_manifest_of_another_state_or_one_made_up_is_refused(
    saved: Path, state: jp.TrainState, tmp_path: Path
) -> None:
    other, copy = tmp_path / "other", tmp_path / "copy"
    jp.save(other, replace(state, params=jax.tree.map(lambda x: x * 2, state.params)))
    shutil.copytree(saved, copy)
    for name in ("manifest.json", "arrays/_CHECKPOINT_METADATA", "arrays/commit_success.txt"):
        shutil.copyfile(other / name, copy / name)  # the last two have the time and the folder of the save
    with pytest.raises(DamagedError, match=r"which holds params/block/bias, was changed after it was written"):
        jp.restore(copy, state)
    true = read(saved)
    name, tensor = "params/block/up", true.tensors["params/block/up"]
    for entry, files, text in (
        (replace(tensor, folder="../up"), {}, "the folder '../up' is outside the checkpoint's folder"),
        (tensor, {"/etc/passwd": (1, 1)}, "the file '/etc/passwd' is outside the checkpoint's folder"),
        (replace(tensor, sums=tensor.sums[1:]), {}, f"tensor {name} has 8 pieces but 7 checksums"),
        (replace(tensor, chunk=(0, 24)), {}, "its pieces are empty"),
        (replace(tensor, chunk=(2, 12), sums=tensor.sums * 2), {}, "has 192 bytes, expected 96"),
        (replace(tensor, folder="arrays/gone"), {}, "its file arrays/gone/0.0 is not listed"),
    ):
        made = replace(true, tensors={**true.tensors, name: entry}, files={**true.files, **files})
        with pytest.raises(DamagedError, match=re.escape(text)):
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


# A run's folder.


def three(folder: Path, **options: Any) -> tuple[list[str], jp.CheckpointManager]:
    """Save steps 10, 20 and 30 of a tiny state; returns the list that collects messages, and the manager."""
    told: list[str] = []
    manager = jp.CheckpointManager(folder, tell=told.append, **options)
    for step in (10, 20, 30):
        assert manager.save(step, {"w": jnp.ones(4) * step}, metric=float(abs(step - 15)))
    manager.wait()
    return told, manager


LIKE = {"w": jax.ShapeDtypeStruct((4,), "float32")}


def test_a_damaged_newest_step_falls_back_and_says_so(tmp_path: Path) -> None:
    told, manager = three(tmp_path)
    with manager:
        (tmp_path / "30/arrays/w/0").write_bytes(b"x" * 16)
        for stray in ("40", "notes", "50.unfinished", "007"):
            (tmp_path / stray).mkdir()
        (tmp_path / "60").write_text("no folder")
        assert manager.latest() == 30 and manager.steps() == [10, 20, 30]
        found = manager.restore_latest(LIKE)
        assert found is not None and found.step == 20 and found.state["w"].tolist() == [20.0] * 4
        assert len(told) == 1 and told[0].startswith("checkpoint: falling back to step 20, the newest intact step: ")
        assert (
            f"{tmp_path}/40 is incomplete: manifest.json is missing." in told[0]
            and f"{tmp_path}/50.unfinished is incomplete: its save was killed or has not ended." in told[0]
            and f"{tmp_path}/60 is a file, not a folder." in told[0]
            and "30/arrays/w/0, which holds w, was changed after it was written" in told[0]
        )
        report = {h.step: h.good for h in health(tmp_path)}
        assert report == {10: True, 20: True, 30: False}
        assert manager.save(30, {"w": jnp.zeros(4)}) and manager.wait()
        assert manager.restore_latest(LIKE).state["w"].tolist() == [0.0] * 4  # type: ignore[union-attr]
        shutil.rmtree(tmp_path / "20")
        shutil.copytree(tmp_path / "10", tmp_path / "20")
        with pytest.raises(DamagedError, match=r"20/manifest.json is of step 10, but its folder is that of step 20"):
            manager.restore(20, LIKE)
        with pytest.raises(CheckpointError, match=r"does not match the state to restore"):
            manager.restore_latest({"v": LIKE["w"]})
        for step in (10, 30):
            os.truncate(tmp_path / str(step) / "manifest.json", 40)
        with pytest.raises(CheckpointError, match=r"all steps \[10, 20, 30, 40, 60\] are damaged"):
            manager.restore_latest(LIKE)


def test_retention_the_best_steps_and_what_killed_saves_left(tmp_path: Path) -> None:
    (tmp_path / "5.unfinished").mkdir()
    _, manager = three(tmp_path, keep=1, best="min")
    with manager:
        assert manager.steps() == [10, 30] and manager.best() == 10 and manager.saved == 30
        assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "30", "lock"]
        assert (tmp_path / "30").stat().st_mode & 0o77 == 0
    with jp.CheckpointManager(tmp_path, keep=1, best="min", keep_best=2) as again:  # the metrics are 5 and 15
        for step, metric in ((40, 7.0), (50, None), (60, 5.0)):
            assert again.save(step, {"w": jnp.ones(4)}, metric=metric) and again.wait()
        assert again.steps() == [10, 60] and again.best() == 10
        assert again.save(70, {"w": jnp.ones(4)}, metric=9.0) and again.wait() and again.steps() == [10, 60, 70]


def test_when_a_save_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: clock[0])
    with jp.CheckpointManager(tmp_path, save_interval_steps=3) as manager:
        assert [step for step in range(1, 8) if manager.due(step)] == [3, 6] and manager.restore_latest(LIKE) is None
    with jp.CheckpointManager(tmp_path, save_interval_minutes=2) as manager:
        clock[0] = 119.0
        assert not manager.due(1)
        clock[0] = 120.0
        assert manager.due(1)
    for options, text in (
        ({"keep": 0}, "keep must be a number above 0, got 0"),
        ({"save_interval_steps": 1, "save_interval_minutes": 1}, "are mutually exclusive"),
        ({"keep_best": 0}, "keep_best must be a number above 0, got 0"),
        ({"best": "loss"}, "best must be 'min' or 'max', got 'loss'"),
    ):
        with pytest.raises(ConfigError, match=text):
            jp.CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]


def test_two_runs_cannot_write_one_folder(tmp_path: Path) -> None:
    with (
        jp.CheckpointManager(tmp_path),
        pytest.raises(CheckpointError, match=rf"^{tmp_path} is in use by another run \(process {os.getpid()} on "),
    ):
        jp.CheckpointManager(tmp_path)
    jp.CheckpointManager(tmp_path).close()


def test_a_full_disk_or_a_folder_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told, full = [0.0], list[str](), [False]
    monkeypatch.setattr(manager_module.time, "monotonic", lambda: clock[0])
    write = writing.write_arrays

    def failing(*args: Any) -> Any:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(writing, "write_arrays", failing)
    (tmp_path / "file").write_text("")
    with jp.CheckpointManager(tmp_path / "file" / "run", save_interval_steps=10, tell=told.append) as manager:
        assert told[0].startswith(f"checkpoint: {tmp_path}/file/run cannot be written: Not a directory.")
        assert not manager.save(1, {"w": jnp.ones(4)}) and len(told) == 2
        (tmp_path / "file").unlink()
        assert not manager.due(2)
        clock[0] = 31.0
        assert manager.due(2) and manager.save(2, {"w": jnp.ones(4)}) and manager.wait() and manager.steps() == [2]
        full[0] = True
        assert manager.save(3, {"w": jnp.zeros(4)}) and not manager.wait()
        assert re.fullmatch(
            rf"checkpoint of step 3 not saved: {tmp_path}/file/run/3: cannot write: No space left on device\. [\d,]+ "
            r"bytes are free\. Remedy: free some space\. Step 2 is kept; the next attempt is in 30 s\.",
            told[2],
        )
        assert manager.steps() == steps_in(tmp_path / "file" / "run") == [2] and not manager.due(4)
        assert manager.restore_latest(LIKE).step == 2  # type: ignore[union-attr]
