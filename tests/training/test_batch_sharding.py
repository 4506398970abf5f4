"""Tests how a step shards the rows of a batch of NumPy arrays, and that it refuses rows that do not divide."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from covers import covering
from error_texts import raises
from jax.sharding import AxisType, PartitionSpec

import jaxpar as jp
from jaxpar.errors import LayoutError

RULES = jp.Rules(batch="data", embed=None, mlp=None)


def make_model(key: jax.Array) -> dict[str, Any]:
    return {"w": jp.tag(jax.random.normal(key, (64, 32)), "embed", "mlp")}


def loss(params: Any, batch: Any) -> Any:  # It has no sharding hint.
    return ((batch["x"] @ params["w"]) ** 2).mean()


@pytest.mark.parametrize("train", [True, False])
def test_rows_that_were_not_put_are_computed_once(train: bool) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES)
    state = jp.init(layout, make_model, optax.sgd(0.1))
    step = jp.train_step(layout, loss, donate=False) if train else jp.eval_step(layout, loss)
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    flops, losses = [], []
    for batch in (x, jp.shard_array(layout, x, "batch", None)):
        program = step.lower(state, {"x": batch}).compile()
        flops.append(jp.audit(program).matmul_flops)
        found = program(state, {"x": batch})
        losses.append(float((found[1] if train else found)["loss"]))
    assert flops[0] == flops[1] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


REMEDY = (
    "so every device would compute all rows. Remedy: pad the rows to a multiple and mask the padding out of the loss, "
    "drop the remainder, or let every device compute all of them: indivisible={'batch': 'replicate'} (YAML: "
    "indivisible: {batch: replicate}). An array that all rows share has a first dim of 1."
)


def run_of(train: bool, batch: Any, rules: jp.Rules = RULES, loss: Any = loss, **sizes: Any) -> Any:
    """Compiles and runs one call on ``batch``; returns the program and the loss."""
    layout = jp.Layout(jp.MeshSpec(**(sizes or {"data": 8})).build(), rules)
    state = jp.init(layout, make_model, optax.sgd(0.1))
    step = jp.train_step(layout, loss, donate=False) if train else jp.eval_step(layout, loss)
    program = step.lower(state, batch).compile()
    found = program(state, batch)
    return program, float((found[1] if train else found)["loss"])


def rows_of(rows: int, columns: int = 64) -> Any:
    return np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("rows", "sizes", "rule"),
    [
        (62, {"data": 8}, "data"),
        (1, {"data": 8}, "data"),
        (12, {"data": 4, "model": 2}, ("data", "model")),
        (6, {"data": 4, "model": 2}, "data"),
    ],
)
def test_rows_that_the_axes_do_not_divide_are_an_error(train: bool, rows: int, sizes: Any, rule: Any) -> None:
    rule if isinstance(rule, str) else f"({', '.join(rule)})"
    with raises(LayoutError, "batch/x", "every"):
        run_of(train, {"x": rows_of(rows)}, RULES.replace(batch=rule), **sizes)


def test_arrays_are_grouped_by_why_their_rows_do_not_divide() -> None:
    batch = {
        "x": rows_of(62),
        "y": np.ones(62),
        "table": np.ones((10, 3)),
        "fits": np.ones(64),
        "scalar": np.float32(1),
    }
    with pytest.raises(LayoutError) as error:
        run_of(True, batch)
    no_multiple = "which is not a multiple of data=8 (rule batch = data)"
    assert error.value.problems == (
        f"batch/table [10, 3]: the dim 'batch' has size 10, {no_multiple}, {REMEDY}",
        f"batch/x [62, 64], batch/y [62]: the dim 'batch' has size 62, {no_multiple}, {REMEDY}",
    )


def test_a_keyed_loss_names_the_same_arrays() -> None:
    staged = jp.pipeline.PipelineLoss(
        layers="blocks",
        embed=lambda model, batch: batch["x"],
        layer=lambda block, x, side, keys: x @ block["w"],
        head=lambda model, x, batch: x.mean(),
        keys=True,
    )
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES.replace(layers=None))
    make = lambda key: {"blocks": {"w": jp.tag(jax.random.normal(key, (2, 4, 4)), "layers", "embed", "embed")}}
    state = jp.abstract_state(layout, make, optax.sgd(0.1))
    with pytest.raises(LayoutError, match=r"^batch/x \[6, 4\]: "):
        jp.train_step(layout, staged).lower(state, {"x": rows_of(6, 4)})
    # A shared array and a scalar come first in the tree, but the number of keys is the number of rows.
    shared = {"a": np.float32(1), "b": np.ones((1, 4), np.float32), "x": rows_of(8, 4)}
    jp.train_step(layout, staged).lower(state, shared)


@pytest.mark.parametrize("train", [True, False])
def test_each_device_computes_its_share(train: bool) -> None:
    """With 64 rows on data = 8, a device computes an eighth of the FLOPs; with 62 replicated rows, all of them."""
    flops = {}
    for rows, rules in ((64, RULES), (62, RULES.replace(indivisible={"batch": "replicate"}))):
        flops[rows] = jp.audit(run_of(train, {"x": rows_of(rows)}, rules)[0]).matmul_flops
    products = 2 if train else 1  # the forward pass, and the gradient of the weight
    assert flops == {64: products * 2 * 64 // 8 * 64 * 32, 62: products * 2 * 62 * 64 * 32}


@pytest.mark.parametrize(
    ("train", "rule"), covering([True, False], ["data", jp.first_of("data", None)], keep=2), ids=str
)
def test_rows_are_replicated_where_the_rules_say_so(train: bool, rule: Any) -> None:
    options = {"indivisible": {"batch": "replicate"}} if rule == "data" else {}
    rules = RULES.replace(batch=rule, **options)
    batch = {"x": rows_of(62)}
    program, got = run_of(train, batch, rules)
    layout = jp.Layout(jp.MeshSpec(data=8).build(), rules)
    with layout:
        want = float(loss(jp.init(layout, make_model, optax.sgd(0.1)).params, batch))
    assert got == pytest.approx(want, rel=1e-5)
    assert jp.audit(program).matmul_flops == (2 if train else 1) * 2 * 62 * 64 * 32
    tagged = {"x": jp.tag(jax.ShapeDtypeStruct((62, 64), np.float32), "batch", None)}
    row = jp.explain(layout, make_model, optax.sgd(0.1), batch=tagged, loss_fn=loss)["batch/x"]
    assert row.replicated
    said = "indivisible allows replication" if rule == "data" else "the rule says None"
    assert row.why[0].endswith(f"the dim 'batch' has size 62, which is not a multiple of data=8; {said}")


@pytest.mark.parametrize("train", [True, False])
def test_scalars_and_arrays_that_all_rows_share_are_replicated(train: bool) -> None:
    batch = {"x": rows_of(64), "positions": np.arange(64, dtype=np.float32)[None], "scale": np.float32(2)}

    def scaled(params: Any, batch: Any) -> Any:
        return ((batch["scale"] * (batch["x"] + batch["positions"]) @ params["w"]) ** 2).mean()

    program, got = run_of(train, batch, loss=scaled)
    assert jp.audit(program).matmul_flops == (2 if train else 1) * 2 * 64 // 8 * 64 * 32
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES)
    with layout:
        assert got == pytest.approx(float(scaled(jp.init(layout, make_model, optax.sgd(0.1)).params, batch)), rel=1e-5)


@pytest.mark.parametrize("rows", [62, 64])
def test_on_explicit_axes_an_array_keeps_its_own_sharding(rows: int) -> None:
    mesh = jp.MeshSpec(data=8).build(axis_type=AxisType.Explicit)
    layout = jp.Layout(mesh, RULES, explicit=True)
    state = jp.init(layout, make_model, optax.sgd(0.1))
    shardings = []

    def seen(params: Any, batch: Any) -> Any:
        shardings.append(jax.typeof(batch["x"]).sharding.spec)
        return loss(params, batch)

    for batch in [rows_of(rows)] + ([jp.shard_array(layout, rows_of(rows), "batch", None)] if rows == 64 else []):
        jp.eval_step(layout, seen).lower(state, {"x": batch})
    assert shardings == [PartitionSpec(None, None), PartitionSpec("data", None)][: len(shardings)]


@pytest.mark.parametrize(
    "options",
    [{"grad_reduction": "per_step"}, {"grad_reduction": "per_step", "grad_accum_steps": 2}],
    ids=["at once", "in two"],
)
def test_rows_that_cannot_be_cut_are_named_together(options: Any) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), RULES)
    state = jp.abstract_state(layout, make_model, optax.sgd(0.1))
    with raises(LayoutError, "batch/x", "[30]"):
        jp.train_step(layout, loss, **options).lower(state, {"x": rows_of(62), "y": np.ones(30), "z": np.ones(64)})
