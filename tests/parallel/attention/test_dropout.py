"""Attention dropout: one key drops the same weights however rows, heads, tokens and layers are split."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covers import covering
from error_texts import raises
from flax import nnx
from jax.sharding import PartitionSpec as P
from one_step import SGD, check_grads, initial, layout_of
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError

ROWS, SEQ, EMBED, HEADS, GROUPS, DIM, LAYERS = 8, 8, 4, 4, 2, 2, 2
QUICK = {"xla_backend_optimization_level": 0}
RULES = jp.Rules(
    batch=("replica", "data"),
    seq=("context", "ulysses"),
    residual_seq=("context", "ulysses", "model"),
    embed=None,
    heads="model",
    kv_heads="model",
    head_dim=None,
    layers="pipeline",
)
KEY = jax.random.key(7)


def make_model(key: jax.Array) -> dict[str, Any]:
    q, kv, out = jax.random.split(key, 3)
    draw = lambda key, *shape: jax.random.normal(key, (LAYERS, *shape)) / 3
    blocks = {
        "q": jp.tag(draw(q, EMBED, HEADS, DIM), "layers", "embed", "heads", "head_dim"),
        "kv": jp.tag(draw(kv, EMBED, GROUPS, 2 * DIM), "layers", "embed", "kv_heads", None),
        "out": jp.tag(draw(out, HEADS, DIM, EMBED), "layers", "heads", "head_dim", "embed"),
    }
    return {"blocks": blocks, "head": jp.tag(jnp.ones(EMBED), "embed")}


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    x, y = np.random.default_rng(seed).normal(size=(2, ROWS, SEQ, EMBED)).astype(np.float32)
    return {"x": x, "y": y}


def projected(block: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, kv = jnp.einsum("bse,ehd->bshd", x, block["q"]), jnp.einsum("bse,ehd->bshd", x, block["kv"])
    return q, *jnp.split(kv, 2, -1)


def back(block: Any, x: jax.Array, o: jax.Array) -> jax.Array:
    return x + jnp.einsum("bshd,hde->bse", o, block["out"])


def layer(block: Any, x: jax.Array, side: Any, *, impl: Any = "auto", key: Any = KEY) -> jax.Array:
    attend = (
        jp.attention
        if impl != "local"
        else functools.partial(jp.context.attention_local, axis="context", order="contiguous")
    )
    options = {} if impl == "local" else {"impl": impl}
    return jp.hint(
        back(block, x, attend(*projected(block, x), dropout=0.4, key=key, **options)), "batch", "seq", "embed"
    )


def carried(block: Any, x: jax.Array, side: Any, carry: Any, chunk: jax.Array) -> Any:
    q, *kv = projected(block, x)
    start = chunk * x.shape[1]
    carry = [jax.lax.dynamic_update_slice_in_dim(all_, own, start, 1) for all_, own in zip(carry, kv, strict=True)]
    o = jp.attention(q, *carry, q_offset=start, dropout=0.4, key=KEY)
    return back(block, x, o), carry


LOSS = jp.pipeline.PipelineLoss(
    "blocks",
    lambda model, batch: batch["x"],
    layer,
    lambda model, x, batch: jnp.mean((x * model["head"] - batch["y"]) ** 2),
    dims=("batch", "seq", "embed"),
    chunked_layer=carried,
    chunk_carry=lambda model, batch: [jax.ShapeDtypeStruct((*batch["x"].shape[:2], GROUPS, DIM), jnp.float32)] * 2,
)


on = functools.partial(layout_of, RULES)


def stepped(layout: jp.Layout, loss: Any = LOSS, tx: Any = None, **options: Any) -> tuple[float, Any]:
    """Loss and gradients of one step."""
    with jax.default_matmul_precision("highest"), layout:
        shapes = jp.abstract_state(layout, make_model, tx or SGD)
        step = jp.train_step(layout, loss, return_grads=True, donate=False, **options)
        compiled = step.lower(shapes, batch_of()).compile(compiler_options=QUICK)
        state = jp.init(layout, make_model, tx) if tx else initial(shapes, make_model, RULES)
        _, metrics = compiled(state, batch_of())
    return float(metrics["loss"]), jax.device_get(metrics["grads"])


@pytest.fixture(scope="module")
def one_device() -> tuple[float, Any]:
    found, (bare, _) = stepped(on({"data": 1})), stepped(on({"data": 1}), using(impl="dense", key=jax.random.key(8)))
    assert abs(found[0] - bare) > 1e-2 * abs(bare)  # another key gives another loss
    return found


def using(**options: Any) -> jp.pipeline.PipelineLoss:
    return dataclasses.replace(LOSS, layer=functools.partial(layer, **options))


def zero(stage: int, sizes: dict[str, int], **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    found = jp.Zero(stage, min_bytes=0)
    return layout_of(found.rules(RULES), sizes), {**found.step, **options}


def piped(name: str, sizes: dict[str, int], microbatches: int = 2, **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    kept = {key: options.pop(key) for key in ("activation_checkpointing", "executor", "embedding") if key in options}
    loss = {"loss": options.pop("loss")} if "loss" in options else {}
    schedule = jp.pipeline.schedule(name, stages=sizes["pipeline"], microbatches=microbatches, **options)
    return on(sizes), {"pipeline": jp.Pipeline(schedule, **kept), **loss}


def plain(sizes: dict[str, int], **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    return on(sizes), options


CASES: dict[str, tuple[jp.Layout, dict[str, Any]]] = {
    "data 4": plain({"data": 4}),
    "replica 2, data 2, flash": plain({"replica": 2, "data": 2}, loss=using(impl="flash")),
    "microbatches 2": plain({"data": 2}, grad_accum_steps=2),
    "microbatches 4, reduced each time": plain({"data": 2}, grad_accum_steps=4, grad_reduction="per_microbatch"),
    "microbatches 4, flash": plain({"data": 2}, grad_accum_steps=4, loss=using(impl="flash")),
    "ZeRO 1": zero(1, {"data": 4}),
    "ZeRO 1, microbatches 2": zero(1, {"replica": 2, "data": 2}, grad_accum_steps=2),
    "ZeRO 2": zero(2, {"data": 4}),
    "ZeRO 3, microbatches 2": zero(3, {"data": 4}, grad_accum_steps=2),
    "model 2": plain({"model": 2, "data": 2}, loss=using(impl="flash")),
    "ZeRO 1, model 2": zero(1, {"data": 2, "model": 2}),
    "ring": plain({"context": 2, "data": 2}, loss=using(impl="ring")),
    "ulysses, microbatches 2": plain({"ulysses": 2, "data": 2}, loss=using(impl="ulysses"), grad_accum_steps=2),
    "ZeRO 1, gather": zero(1, {"context": 2, "data": 2}, loss=using(impl="gather")),
    "1f1b": piped("1f1b", {"pipeline": 2, "data": 2}),
    "1f1b, flash, before each": piped("1f1b", {"pipeline": 2, "data": 2}, embedding="per_microbatch"),
    "gpipe, residuals, model 2": piped("gpipe", {"pipeline": 2, "model": 2}, 4, activation_checkpointing="none"),
    "zb_h1, independent": piped(
        "zb_h1", {"pipeline": 2, "data": 2}, activation_checkpointing="none", executor="independent"
    ),
    "chunks of sequences": piped("seq1f1b", {"pipeline": 2, "data": 2}, sequence_chunks=2),
    "1f1b, ring": piped("1f1b", {"pipeline": 2, "context": 2, "data": 2}, loss=using(impl="local")),
    "two copies": plain(
        {"data": 2, "context": 2},
        loss=dataclasses.replace(LOSS, layer=jp.overlap.interleave_batches(using(impl="local").layer)),
    ),
    "two copies, ZeRO 1": zero(
        1,
        {"data": 2, "context": 2},
        loss=dataclasses.replace(LOSS, layer=jp.overlap.interleave_batches(using(impl="local").layer)),
    ),
}


IMPLIED = ("data 4", "replica 2, data 2, flash", "microbatches 4, flash", "ZeRO 1", "two copies")
"""Cases whose axes and options other cases have too, beside more."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in IMPLIED])
def test_one_key_drops_the_same_weights(name: str, one_device: tuple[float, Any]) -> None:
    layout, options = CASES[name]
    loss, grads = stepped(layout, **options)
    assert loss == pytest.approx(one_device[0], rel=1e-5)
    check_grads(grads, one_device[1], 1e-5)


def of_rows(block: Any, x: jax.Array, side: Any, keys: jax.Array) -> jax.Array:
    return layer(block, x, side, key=keys)


KEYED = dataclasses.replace(LOSS, layer=of_rows, keys=True, chunked_layer=None)
"""Uses a key for each row, step and layer."""


@pytest.fixture(scope="module")
def keyed_on_one_device() -> tuple[float, Any]:
    return stepped(on({"data": 1}), KEYED)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["microbatches 2", "ZeRO 1", "ring", "1f1b", "zb_h1, independent"], 1))
def test_keys_of_rows_drop_the_same_weights(name: str, keyed_on_one_device: tuple[float, Any]) -> None:
    layout, options = CASES[name]
    loss, grads = stepped(layout, **(options | {"loss": KEYED}))
    assert loss == pytest.approx(keyed_on_one_device[0], rel=1e-5)
    check_grads(grads, keyed_on_one_device[1], 1e-5)


def norm_of(grads: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(grads)))


@pytest.mark.parametrize("name", few(["pipedream_2bw", "pipedream"], 0))
def test_an_asynchronous_pipeline_drops_the_same_weights(name: str, one_device: tuple[float, Any]) -> None:
    """At a learning rate of 0, every call has the same loss, whatever the version of the weights."""
    layout = on({"pipeline": 2, "data": 2})
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout, make_model, optax.sgd(0.0))
        step = jp.pipeline.pipedream_train_step(
            layout, LOSS, jp.pipeline.Asynchronous(name, stages=2, microbatches=2), donate=False
        )
        state, _ = step(step.start(state, batch_of()), batch_of())
        _, metrics = step(state, batch_of())
    assert float(metrics["loss"]) == pytest.approx(one_device[0], rel=1e-5)
    if name == "pipedream_2bw":
        assert float(metrics["grad_norm"]) == pytest.approx(norm_of(one_device[1]), rel=1e-5)


@pytest.mark.slow
def test_one_bit_adam_drops_the_same_weights(one_device: tuple[float, Any]) -> None:
    loss, grads = stepped(on({"data": 2}), tx=jp.one_bit_adam(0.1, warmup=10))
    assert loss == pytest.approx(one_device[0], rel=1e-5)
    check_grads(grads, one_device[1], 1e-5)


@pytest.mark.slow
def test_an_evaluation_drops_the_same_weights(one_device: tuple[float, Any]) -> None:
    layout = on({"pipeline": 2, "data": 2})
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make_model, optax.sgd(0.1))
        found = jp.eval_step(layout, LOSS, pipeline=jp.pipeline.schedule("1f1b", 2, 2))(state, batch_of())
    assert float(found["loss"]) == pytest.approx(one_device[0], rel=1e-5)


def arrays(seed: int) -> tuple[jax.Array, ...]:
    q, *kv = jax.random.split(jax.random.key(seed), 3)
    draw = lambda key, heads: jax.random.normal(key, (ROWS, 16, heads, DIM))
    return draw(q, HEADS), *(draw(key, GROUPS) for key in kv)


# mesh, spec of queries, keys and values, whether a layout is ambient, options
LOCAL: dict[str, tuple[dict[str, int], P, bool, dict[str, Any]]] = {
    "data": ({"data": 4}, P("data"), False, {"impl": "flash", "axis": ()}),
    "data and model, with a layout": (
        {"data": 2, "model": 2},
        P("data", None, "model"),
        True,
        {"impl": "flash", "axis": ()},
    ),
    "ring beside data": ({"data": 2, "context": 2}, P("data", "context"), False, {"impl": "ring"}),
    "ulysses beside replica": (
        {"replica": 2, "ulysses": 2},
        P("replica", "ulysses"),
        True,
        {"impl": "ulysses", "axis": "ulysses"},
    ),
    "named": (
        {"expert": 2, "context": 2, "model": 2},
        P("context", "expert", "model"),
        True,
        {"impl": "ring_self_attention", "axis": "expert", "batch_axis": "context", "q_heads_axis": "model"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), covering(LOCAL, [True, False], keep=0, strength=1))
def test_attention_local_drops_what_one_device_drops(name: str, check: bool) -> None:
    sizes, spec, ambient, options = LOCAL[name]
    layout = on(sizes)
    want = jax.jit(lambda *x: jp.attention(*x, dropout=0.3, key=KEY, impl="dense"))
    with on({"data": 1}), jax.default_matmul_precision("highest"):
        wanted = np.asarray(want(*arrays(1)))
    local = lambda *x: jp.context.attention_local(*x, dropout=0.3, key=KEY, **options)
    with layout if ambient else jax.set_mesh(layout.mesh), jax.default_matmul_precision("highest"):
        got = jax.jit(jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=check))(*arrays(1))
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


class Attention(nnx.Module):
    """Attention split into two functions, as a branch of ``jp.overlap.interleave_batches`` needs it."""

    def __init__(self, rngs: nnx.Rngs):
        draw = lambda shape, *dims: nnx.Param(rngs.normal(shape) / 3, logical_dims=dims)
        self.q = draw((EMBED, HEADS, DIM), "embed", "heads", "head_dim")
        self.kv = draw((EMBED, HEADS, 2 * DIM), "embed", "heads", None)
        self.out = draw((HEADS, DIM, EMBED), "heads", "head_dim", "embed")

    def first(self, h: jax.Array, side: Any) -> jax.Array:
        q, kv = (jnp.einsum("bse,ehd->bshd", h, w[...]) for w in (self.q, self.kv))
        dims = ("batch", "seq", "heads", "head_dim")
        return jp.attention(q, *jnp.split(kv, 2, -1), dropout=0.4, key=KEY, q_dims=dims, kv_dims=dims)

    def second(self, o: jax.Array) -> jax.Array:
        return jnp.einsum("bshd,hde->bse", o, self.out[...])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", few([{"data": 2, "model": 2}, {"model": 4}], 1), ids=str)
def test_interleaved_branches_drop_the_same_weights(sizes: dict[str, int]) -> None:
    block, x = Attention(nnx.Rngs(0)), jnp.asarray(batch_of()["x"])
    branch = jp.overlap.Branch(before=lambda block, x: x, compute=Attention.first, output_projection=Attention.second)
    with on({"data": 1}), jax.default_matmul_precision("highest"):
        want = np.asarray(jax.jit(lambda x: x + block.second(block.first(x, None)))(x))
    with on(sizes), jax.default_matmul_precision("highest"):
        got = np.asarray(jax.jit(lambda x: jp.overlap.interleave_batches([branch])(block, x, None))(x))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_devices_that_hold_the_same_queries_drop_the_same_weights() -> None:
    """Along an axis that shards nothing, where JAX checks that the result is replicated."""
    layout = on({"data": 2, "model": 2})
    local = lambda *x: jp.context.attention_local(*x, impl="flash", axis=(), dropout=0.3, key=KEY)
    with jax.set_mesh(layout.mesh):
        got = jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))(*arrays(1))
    with on({"data": 1}):
        want = jp.attention(*arrays(1), dropout=0.3, key=KEY, impl="dense")
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_several_sequences_of_a_row_are_counted_with_it() -> None:
    """Windows of tokens are separate sequences; those of one row follow one another."""

    def windows(block: Any, x: jax.Array, side: Any) -> jax.Array:
        cut = x.reshape(-1, SEQ // 2, EMBED)
        o = jp.attention(*projected(block, cut), dropout=0.4, key=KEY)
        return x + jnp.einsum("bshd,hde->bse", o, block["out"]).reshape(x.shape)

    loss = dataclasses.replace(LOSS, layer=windows, chunked_layer=None)
    want = stepped(on({"data": 1}), loss)
    for layout, options in (zero(1, {"data": 2}, grad_accum_steps=2), piped("1f1b", {"pipeline": 2, "data": 2})):
        got = stepped(layout, loss, **options)
        assert got[0] == pytest.approx(want[0], rel=1e-5)
        check_grads(got[1], want[1], 1e-5)


def test_an_axis_of_which_nothing_is_known_is_named() -> None:
    layout = on({"context": 2, "ulysses": 2, "data": 2})
    local = lambda *x, **more: jp.context.attention_local(*x, axis="context", dropout=0.3, key=KEY, **more)
    spec = P(("data", "ulysses"), "context")
    with jax.set_mesh(layout.mesh):
        with raises(ConfigError, "ulysses", "dropout"):
            jax.eval_shape(jax.shard_map(local, in_specs=spec, out_specs=spec), *arrays(0))
        named = functools.partial(local, batch_axis=("data", "ulysses"), q_heads_axis=())
        jax.eval_shape(jax.shard_map(named, in_specs=spec, out_specs=spec), *arrays(0))


def test_sequences_that_are_not_the_rows_are_named() -> None:
    def halved(block: Any, x: jax.Array, side: Any) -> jax.Array:
        half = len(x) // 2
        return x.at[:half].set(layer(block, x[:half], side))

    loss = dataclasses.replace(LOSS, layer=halved, chunked_layer=None)
    with raises(ConfigError, "attention: dropout", "has 2"):
        stepped(on({"data": 2}), loss, grad_accum_steps=2)


@pytest.mark.slow
def test_a_shard_map_within_one_that_cuts_microbatches_is_named(one_device: tuple[float, Any]) -> None:
    def inner(block: Any, x: jax.Array, side: Any) -> jax.Array:
        local = lambda q, k, v: jp.context.attention_local(
            q, k, v, axis="context", order="contiguous", dropout=0.4, key=KEY
        )
        spec = P(None, "context")
        mapped = jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={"context"}, check_vma=False)
        return back(block, x, mapped(*projected(block, x)))

    loss, sizes = dataclasses.replace(LOSS, layer=inner, chunked_layer=None), {"data": 2, "context": 2}
    for layout, options in (zero(1, sizes), plain(sizes, grad_accum_steps=2, grad_reduction="per_microbatch")):
        assert stepped(layout, loss, **options)[0] == pytest.approx(one_device[0], rel=1e-5)
    with raises(ConfigError, "shard_map", "[batch]"):
        stepped(on(sizes), loss, grad_accum_steps=2)


def test_a_key_of_another_shape_is_named() -> None:
    with on({"data": 1}), raises(LayoutError, "attention: key"):
        jp.attention(*arrays(0), dropout=0.1, key=jax.random.split(KEY, 3))


def test_a_loss_that_draws_for_no_row_is_traced_once_and_without_numbers() -> None:
    traced: list[int] = []

    def counting(block: Any, x: jax.Array, side: Any, drops: bool) -> jax.Array:
        traced.append(1)
        return layer(block, x, side) if drops else x

    counts = []
    for drops in (False, True):
        layout, options = zero(1, {"data": 2})
        loss = dataclasses.replace(LOSS, layer=functools.partial(counting, drops=drops))
        traced.clear()
        with layout:
            state = jp.abstract_state(layout, make_model, optax.sgd(0.1))
            jp.train_step(layout, loss, **options).trace(state, batch_of())
        counts.append(len(traced))
    assert counts[1] == counts[0] + 1
