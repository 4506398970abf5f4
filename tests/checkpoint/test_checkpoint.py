"""Checkpoints restore bit for bit onto any layout, and name every difference to the state that is restored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.sharding import PartitionSpec
from one_step import drawn
from placed_arrays import TX, like, mesh, numbers, put, same

import jaxpar as jp
from jaxpar.checkpoint.manifest import read
from jaxpar.checkpoint.verify import check, problems_of
from jaxpar.errors import CheckpointError, DamagedError


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


def test_a_checkpoint_is_of_its_step_wherever_a_step_is_given(saved: Path) -> None:
    assert check(saved, 1).step == 1 and problems_of(saved, step=1) == []
    text = f"{saved}/manifest.json is of step 1, but its folder is that of step 2: "
    assert [problem.startswith(text) for problem in problems_of(saved, step=2)] == [True]
    for read_it in (lambda: check(saved, 2), lambda: jp.restore(saved, {}, step=2)):
        with raises(DamagedError, "step 1", "step 2"):
            read_it()


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
        with pytest.raises(ValueError, match=r"jax\.Array"):
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
    with raises(CheckpointError, "params/block/w"):
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
    fresh = drawn(jp.abstract_state(mlp.one_device, mlp.make, TX), seed=9)
    found = jp.restore(saved, fresh, only=["params"])
    assert same(found.params, state.params) and same(found.opt_state, fresh.opt_state) and same(found.step, fresh.step)
    assert same(jp.restore(saved, {"params": state.params}, only=["params"])["params"], state.params)
    wanted = {"net": {"mid": {"up": state.params["block"]["up"]}}}
    table = {"params/block": "net/mid", "params/block/down": "net/out"}
    assert same(
        jp.restore(saved, wanted, only=["net/mid/up"], rename=table),
        {"net": {"mid": {"up": state.params["block"]["up"]}}},
    )
    with raises(CheckpointError, "params/blok"):
        jp.restore(saved, wanted, rename={"params/blok": "x"})
    with raises(CheckpointError, "parms"):
        jp.restore(saved, state, only=["parms"])
    with pytest.raises(CheckpointError, match=r"would become 'params/square'"):
        jp.restore(saved, state, rename={"params/temperature": "params/square"})
    abstract = jp.abstract_state(mlp.layout(), mlp.make, TX)
    with raises(CheckpointError, "key", "only="):
        jp.restore(saved, replace(abstract, step=state.step, opt_state=state.opt_state), only=["params"])


def test_a_checkpoint_of_another_model_lists_every_difference(saved: Path, mlp: Any, tmp_path: Path) -> None:
    def other(key: jax.Array) -> dict[str, Any]:
        made = mlp.make(key)
        made["block"]["extra"] = jp.tag(jnp.ones(3), None)
        made["square"] = jp.tag(jnp.ones((8, 16)), "embed", "mlp")
        del made["temperature"]
        return made

    with raises(CheckpointError, "params/block/extra", "params/temperature"):
        jp.restore(saved, jp.abstract_state(mlp.layout(), other, optax.sgd(1e-2)), only=["params"])
    with raises(CheckpointError, "manifest.json"):
        jp.restore(tmp_path, {"x": jnp.ones(1)})
    with raises(CheckpointError, "step", "sharding"):
        jp.restore(saved, jp.abstract_state(jp.Layout(jp.MeshSpec(data=8).abstract(), mlp.rules), mlp.make, TX))


def test_what_cannot_be_saved_is_named(tmp_path: Path, mlp: Any) -> None:
    one = jnp.ones(2)
    for value, text in (
        ({"a": {"b": 3}}, "a/b"),
        ({"a": {"b": one}, "a/b": one}, "'a/b'"),
        ({"a": jax.ShapeDtypeStruct((2,), "float32")}, "the state"),
    ):
        with raises(CheckpointError, text):
            jp.save(tmp_path / "x", value)
    with raises(CheckpointError, "metadata", "range"):
        jp.save(tmp_path / "x", {"a": one}, metadata={"loss": float("nan")})
    disk = jp.init(mlp.one_device, mlp.make, jp.offload.to_disk(TX, path=tmp_path / "d", min_bytes=0))
    with raises(CheckpointError, "disk=step"):
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
