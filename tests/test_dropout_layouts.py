"""Attention dropout: one key drops the same weights in every layout, however rows, heads, tokens and layers are split or cut."""

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
from one_step import check_grads

import jaxpar as jp

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
        jp.attention if impl != "local" else functools.partial(jp.attention_local, axis="context", order="contiguous")
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


LOSS = jp.Staged(
    "blocks",
    lambda model, batch: batch["x"],
    layer,
    lambda model, x, batch: jnp.mean((x * model["head"] - batch["y"]) ** 2),
    dims=("batch", "seq", "embed"),
    carried_layer=carried,
    carry=lambda model, batch: [jax.ShapeDtypeStruct((*batch["x"].shape[:2], GROUPS, DIM), jnp.float32)] * 2,
)


def on(sizes: dict[str, int], rules: jp.Rules = RULES) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: math.prod(sizes.values())]), rules)


def stepped(layout: jp.Layout, loss: Any = LOSS, tx: Any = None, **options: Any) -> tuple[float, Any]:
    """Loss and gradients of one step."""
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make_model, tx or optax.sgd(0.1))
        step = jp.train_step(layout, loss, keep_grads=True, donate=False, **options)
        _, metrics = step.lower(state, batch_of()).compile(compiler_options=QUICK)(state, batch_of())
    return float(metrics["loss"]), jax.device_get(metrics["grads"])


@pytest.fixture(scope="module")
def one_device() -> tuple[float, Any]:
    found, (bare, _) = stepped(on({"data": 1})), stepped(on({"data": 1}), using(impl="dense", key=jax.random.key(8)))
    assert abs(found[0] - bare) > 1e-2 * abs(bare)  # another key is another loss
    return found


def using(**options: Any) -> jp.Staged:
    return dataclasses.replace(LOSS, layer=functools.partial(layer, **options))


def zero(stage: int, sizes: dict[str, int], **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    found = jp.Zero(stage, min_bytes=0)
    return on(sizes, found.rules(RULES)), {**found.step, **options}


def piped(name: str, sizes: dict[str, int], microbatches: int = 2, **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    kept = {key: options.pop(key) for key in ("keeps", "lowering", "before") if key in options}
    loss = {"loss": options.pop("loss")} if "loss" in options else {}
    schedule = jp.schedule(name, stages=sizes["pipeline"], microbatches=microbatches, **options)
    return on(sizes), {"pipeline": jp.Pipeline(schedule, **kept), **loss}


def plain(sizes: dict[str, int], **options: Any) -> tuple[jp.Layout, dict[str, Any]]:
    return on(sizes), options


CASES: dict[str, tuple[jp.Layout, dict[str, Any]]] = {
    "data 4": plain({"data": 4}),
    "replica 2, data 2, flash": plain({"replica": 2, "data": 2}, loss=using(impl="flash")),
    "microbatches 2": plain({"data": 2}, accumulate=2),
    "microbatches 4, reduced each time": plain({"data": 2}, accumulate=4, reduce="each"),
    "microbatches 4, flash": plain({"data": 2}, accumulate=4, loss=using(impl="flash")),
    "ZeRO 1": zero(1, {"data": 4}),
    "ZeRO 1, microbatches 2": zero(1, {"replica": 2, "data": 2}, accumulate=2),
    "ZeRO 2": zero(2, {"data": 4}),
    "ZeRO 3, microbatches 2": zero(3, {"data": 4}, accumulate=2),
    "model 2": plain({"model": 2, "data": 2}, loss=using(impl="flash")),
    "ZeRO 1, model 2": zero(1, {"data": 2, "model": 2}),
    "ring": plain({"context": 2, "data": 2}, loss=using(impl="ring")),
    "ulysses, microbatches 2": plain({"ulysses": 2, "data": 2}, loss=using(impl="ulysses"), accumulate=2),
    "ZeRO 1, gather": zero(1, {"context": 2, "data": 2}, loss=using(impl="gather")),
    "1f1b": piped("1f1b", {"pipeline": 2, "data": 2}),
    "1f1b, flash, before each": piped("1f1b", {"pipeline": 2, "data": 2}, before="each") ,
    "gpipe, residuals, model 2": piped("gpipe", {"pipeline": 2, "model": 2}, 4, keeps="residuals"),
    "zb_h1, divergent": piped("zb_h1", {"pipeline": 2, "data": 2}, keeps="residuals", lowering="divergent"),
    "chunks of sequences": piped("seq1f1b", {"pipeline": 2, "data": 2}, sequence_chunks=2),
    "1f1b, ring": piped("1f1b", {"pipeline": 2, "context": 2, "data": 2}, loss=using(impl="local")),
    "two copies": plain({"data": 2, "context": 2}, loss=dataclasses.replace(LOSS, layer=jp.in_copies(using(impl="local").layer))),
    "two copies, ZeRO 1": zero(
        1, {"data": 2, "context": 2}, loss=dataclasses.replace(LOSS, layer=jp.in_copies(using(impl="local").layer))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_key_drops_the_same_weights(name: str, one_device: tuple[float, Any]) -> None:
    layout, options = CASES[name]
    loss, grads = stepped(layout, **options)
    assert loss == pytest.approx(one_device[0], rel=1e-5)
    check_grads(grads, one_device[1], 1e-5)
