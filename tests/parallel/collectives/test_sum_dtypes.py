"""The dtypes in which the compiler sums gradients over devices and gathers weights."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.analysis.compare import gradient_gaps
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import ConfigError
from jaxpar.models.embedding import lookup
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import linear_cross_entropy, next_token_loss
from jaxpar.parallel.collectives.gather_reduce import precision_scope

RULES = jp.Rules(batch="data", seq=None, residual_seq=None, embed=None, heads=None, vocab=None)
ZEROS = {stage: jp.Zero(stage, min_bytes=0) for stage in (0, 2, 3)}
NAMES = ("embed", "heads")


def make(key: jax.Array) -> dict[str, Any]:
    one, left, right, table = (jax.random.normal(k, (24, 24)) / 5 for k in jax.random.split(key, 4))
    weights = {name: jp.tag(w, *NAMES) for name, w in {"one": one, "left": left, "right": right, "head": one}.items()}
    return {**weights, "table": jp.tag(table, "vocab", "embed")}


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    """The loss of a table's rows, one weight, two weights in one product, and a head."""
    dtype = model["one"].dtype
    x = lookup(model["table"], tokens, dtype)
    (x,) = jp.sharded_dot(x, (model["one"], NAMES))
    left, right = jp.sharded_dot(x, (model["left"], NAMES), (model["right"], NAMES))
    return linear_cross_entropy(left * jnp.tanh(right), jp.gather_weight(model["head"], *NAMES), tokens)


def half(model: Any, tokens: jax.Array) -> jax.Array:
    """The same loss in 16 bits."""
    return loss(jax.tree.map(lambda w: w.astype(jnp.bfloat16), model), tokens)


def traced(zero: jp.Zero, precision: Any, loss: Any = loss) -> str:
    """The jaxpr of a step for TPUs. Each device has more tokens than words, so the table is not exchanged for rows."""
    layout = jp.Layout(jp.MeshSpec(data=8).on("v5e:2x4"), zero.rules(RULES))
    state = jp.abstract_state(layout, make, optax.sgd(0.1))
    step = jp.train_step(layout, loss, precision=precision, **zero.step)
    return str(step.trace(state, jax.ShapeDtypeStruct((64, 4), "int32")).jaxpr)


def made(text: str) -> list[str]:
    """The dtypes in which weight gradients are computed: products over all rows, and sums of rows."""
    products = re.findall(r"(\w+)\[24(?:,\d+)?,(?:24|48)\] = dot_general\[", text)
    return products + re.findall(r"(\w+)\[24,24\] = scatter-add\[", text)


@pytest.mark.parametrize("stage", few(reversed(ZEROS), 1))
def test_gradients_computed_in_bf16_are_summed_in_fp32(stage: int) -> None:
    """Gradients are rounded behind a barrier, so the arrays that are resharded and cross the mesh are fp32."""
    assert made(traced(ZEROS[stage], "bf16")) == ["f32"] * 4
    assert set(made(traced(ZEROS[stage], {"compute": "bf16", "reduce": "bf16"}))) == {"bf16"}


def test_the_models_own_dtypes_are_nobody_elses_matter() -> None:
    assert set(made(traced(ZEROS[3], None))) == set(made(traced(ZEROS[3], "fp32"))) == {"f32"}
    wide = jp.Precision(reduce="float32")
    assert (wide.summing("float32"), jp.Precision().summing("float32")) == (None, None)
    assert (wide.summing("bfloat16"), wide.gathering("bfloat16")) == (jnp.float32, None)
    assert jp.Precision(reduce="bfloat16").summing("bfloat16") is None


@pytest.mark.parametrize("stage", few(ZEROS, 1))
def test_a_model_in_bf16_by_its_own_word_alone_is_summed_in_fp32(stage: int) -> None:
    assert made(traced(ZEROS[stage], None, half)) == ["f32"] * 4
    assert set(made(traced(ZEROS[stage], {"reduce": "bf16"}, half))) == {"bf16"}


def test_sums_cannot_be_asked_narrower_than_the_model_computes() -> None:
    with raises(ConfigError, "precision: reduce", "model (float32)"):
        traced(ZEROS[3], {"reduce": "bf16"})


def of_its_own(model: Any, x: jax.Array) -> jax.Array:
    """A loss that multiplies one weight by hand in 16 bits and one in 32, and passes one to ``sharded_dot``."""
    half = jnp.bfloat16
    x = jnp.sin(x.astype(half) @ jp.hint(model["one"].astype(half), *NAMES))
    (x,) = jp.sharded_dot(x, (model["left"], NAMES), dtype=half)
    return jnp.mean((x.astype(jnp.float32) @ model["right"]) * jnp.sum(model["head"]) * jnp.sum(model["table"]))


def noted(zero: jp.Zero, **step: Any) -> tuple[str, ...]:
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), zero.rules(RULES))
    batch = jp.tag(jax.ShapeDtypeStruct((64, 24), "float32"), "batch", "embed")
    return jp.explain(layout, make, optax.sgd(0.1), batch=batch, loss_fn=of_its_own, step=zero.step | step).notes


def test_explain_names_what_is_summed_in_16_bits_all_the_same() -> None:
    said = (
        "16-bit sums: the gradients of one parameter (2.25 KiB) are summed over devices in the 16-bit compute "
        "dtype: params/one. Remedy: use jp.sharded_dot(x, (w, dims)) instead of x @ w, or ZeRO stage 1 (parallel: "
        "{optimizer: {stage: 1}}), which sums all gradients in fp32."
    )
    for stage in (0, 2, 3):
        assert noted(ZEROS[stage]) == (said,)
    assert noted(ZEROS[3], grad_accum_steps=4) == (said,)
    assert noted(jp.Zero(1, min_bytes=0)) == noted(ZEROS[3], precision={"compute": "bf16", "reduce": "bf16"}) == ()


def test_a_narrower_dtype_to_gather_in_is_that_of_the_gather_alone() -> None:
    text = traced(ZEROS[3], {"gather": "bf16"})
    whole = r"(\w+)\[24(?:,\d+)?,(?:24|48)\] = sharding_constraint\[[^]]*?spec=P\(None, None(?:, None)?\)"
    assert re.findall(whole, text, re.DOTALL).count("bf16") >= 3
    assert set(made(text)) == {"f32"}


def gradients(precision: Any, devices: int, zero: jp.Zero) -> Any:
    layout = jp.Layout(jp.MeshSpec(data=-1).build(jax.devices()[:devices]), zero.rules(RULES))
    state = jp.init(layout, make, optax.sgd(0.1))
    step = jp.train_step(layout, loss, precision=precision, return_grads=True, **zero.step)
    tokens = np.random.default_rng(0).integers(0, 24, (64, 4)).astype(np.int32)
    return jax.device_get(step(state, tokens)[1]["grads"])


@pytest.mark.slow
def test_what_is_summed_wide_or_gathered_narrow_is_right() -> None:
    want = gradients(None, 1, ZEROS[0])
    for precision in ("bf16", {"gather": "bf16"}):
        # Compare norms: unlike the largest entry, the rounding of one number to 16 bits hardly changes them.
        pairs = zip(*map(jax.tree.leaves, (gradients(precision, 8, ZEROS[3]), want)), strict=True)
        assert 1e-5 < max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs) < 2e-2
    assert max(gradient_gaps(want, gradients({"reduce": "fp32"}, 8, ZEROS[2])).values()) < 1e-5


@pytest.mark.parametrize(("stage", "named"), few([(3, True), (1, False)], 1, names=2))
def test_explain_names_what_int8_is_not_for(stage: int, named: bool) -> None:
    """Embedding and head are listed, in the stages in which the compiler gathers and reduces."""
    config = preset("tiny", layers=1, dtype="bfloat16")
    tokens = jp.tag(jax.ShapeDtypeStruct((32, 128), "int32"), "batch", "seq")
    given = {"batch": {"tokens": tokens, "targets": tokens}, "loss_fn": next_token_loss}
    size = 2 * 4 * config.vocab * config.embed
    zero = jp.Zero(stage)
    rules = zero.rules(jp.Layout.from_yaml("configs/layouts/dp.yaml", devices=8).rules)
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), rules)
    step = zero.step | {"precision": {"gather": "int8", "reduce": "int8"}}
    notes = jp.explain(layout, make_llama(config), optax.sgd(0.1), **given, step=step).notes
    said = (
        f"not in int8: 2 parameters ({show_bytes(size)}) and their reduced gradients are sent in the compute "
        "dtype, because they do not go through jp.sharded_dot: params/embedding, params/head. Remedy: use "
        f"ZeRO stage 1 (parallel: {{optimizer: {{stage: 1}}}}), which sends all tensors in int8."
    )
    assert ([note for note in notes if "int8" in note] == [said]) is named, notes
    assert named or not any("int8" in note for note in notes)


TABLES: dict[str, tuple[jp.MeshSpec, dict[str, Any]]] = {
    "gathered by hand": (jp.MeshSpec(replica=2, data=4), {"params": {"embed": "data"}}),
    "by a pipeline's columns": (jp.MeshSpec(pipeline=2, data=4), {"params": {"vocab": ("pipeline", "data")}}),
}


@pytest.mark.parametrize("case", TABLES)
def test_rows_of_a_table_are_summed_wide_whichever_way_they_come(case: str) -> None:
    spec, split = TABLES[case]
    rules = jp.Rules(**{**RULES.to_dict(), "batch": ("replica", "data"), **split})
    table = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 16, (64, 4)).astype(np.int32)

    def grad(table: Any) -> Any:
        rows = lambda table: jnp.sum(jnp.sin(lookup(table, ids, jnp.bfloat16, by_hand=True).astype(jnp.float32)))
        return jax.grad(rows)(table)

    with jp.Layout(spec.build(), rules), precision_scope(jp.Precision.of("bf16")):
        text = str(jax.make_jaxpr(grad)(table))
        found = jax.device_get(jax.jit(grad)(table))
    sums = re.findall(r"(\w+)\[[\d,]+\]\S* = (?:reduce_scatter|psum\w*)\[", text)
    assert sums and set(sums) == {"f32"}
    assert set(re.findall(r"(\w+)\[[\d,]+\]\S* = all_gather\[", text)) == {"bf16"}
    want = np.zeros_like(table)
    np.add.at(want, ids.ravel(), np.cos(table[ids.ravel()]))
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.slow
def test_copies_of_layers_scatter_wide_too(layout_of: Any) -> None:
    layout = layout_of("fsdp_tp_sp", 8)
    model = preset("tiny", layers=1, dtype="bfloat16", copies=2)
    state = jp.abstract_state(layout, make_llama(model), optax.sgd(0.1))
    tokens = jax.ShapeDtypeStruct((32, 64), "int32")
    for precision, dtype in (("bf16", "f32"), ({"compute": "bf16", "reduce": "bf16"}, "bf16")):
        step = jp.train_step(layout, next_token_loss, precision=precision)
        text = str(step.trace(state, {"tokens": tokens, "targets": tokens}).jaxpr)
        assert set(re.findall(r"(\w+)\[[\d,]+\]\S* = reduce_scatter\[", text)) == {dtype}
