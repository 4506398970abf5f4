"""Attention over a split sequence: what its programs send, compute and keep, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from jax.sharding import PartitionSpec as P
from split_arrays import MESHES, QUICK, SEQ, arrays, layout

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.attention.tiled.padding import KEPT, SAVED


def traced(impl: str, gradient: bool, **options: Any) -> str:
    f = lambda *x: jp.attention(*x, impl=impl, **options)
    with layout(**MESHES[impl]):
        g = jax.grad(lambda *x: jnp.sum(f(*x)), argnums=(0, 1, 2)) if gradient else f
        return str(jax.make_jaxpr(g)(*arrays(2)))


@pytest.mark.parametrize(("keep", "saved", "gathers"), [(False, True, 4), (True, True, 2), (True, False, 4)])
def test_kept_keys_are_gathered_once(keep: bool, saved: bool, gathers: int) -> None:
    """The backward pass gathers keys and values again, unless they are kept and the policy saves attention's arrays."""
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(SAVED, KEPT) if saved else policies.nothing_saveable
    once = jax.checkpoint(lambda *x: jp.attention(*x, impl="gather", keep_gathered_kv=keep), policy=policy)
    with layout(context=4):
        grad = jax.jit(jax.grad(lambda *x: jnp.sum(once(*x) ** 2), argnums=(0, 1, 2)))
        assert grad.lower(*arrays(2)).as_text().count("stablehlo.all_gather") == gathers


def test_a_ring_sends_no_more_often_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices send keys and values three times forward and three times back, and their gradients three times."""
    monkeypatch.setattr("jaxpar.parallel.attention.split.ring.UNROLLED", 4)
    assert traced("ring", False, order="zigzag").count("ppermute[") == 2 * 3
    assert traced("ring", True, order="zigzag").count("ppermute[") == 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["ring", "gather", "ulysses"])
def test_an_audit_counts_the_tiles_that_devices_visit(impl: str) -> None:
    """Of 16 × 16 tiles of 16 tokens, 4 devices visit 136 in equal parts, with 7 matmuls for each of 4 heads."""
    shapes = [jax.ShapeDtypeStruct((1, 256, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    where = layout(**MESHES[impl])
    with where:
        loss = lambda *x: jnp.sum(jp.attention(*x, impl=impl, block=16) ** 2)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), compiler_options=QUICK).lower(*shapes).compile()
    report = jp.audit(compiled, mesh=where.mesh)
    assert report.matmul_flops == 7 * 2 * 8 * 4 * 16 * 16 * 136 // 4
    assert "LOWER BOUNDS" not in str(report)


@pytest.mark.slow
def test_the_backward_pass_takes_no_memory_before_it_begins() -> None:
    """The ring holds at most 13 arrays the size of a device's queries.

    It would hold 20 if it made zeros, blocks and the keys of later hops at the start.
    """
    shape, dims, where = (1, 1024, 4, 32), ("batch", "seq", "heads", "head_dim"), layout(context=4)
    given = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where.sharding(dims, shape))
    with where:
        ring = jax.grad(lambda *x: jnp.sum(jp.attention(*x, impl="ring", order="zigzag", block=16)), argnums=(0, 1, 2))
        program = jax.jit(ring, compiler_options=QUICK).lower(given, given, given).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 13 * math.prod(shape)


def test_a_window_ends_the_ring_early() -> None:
    near = {"mask": jp.Mask(causal=True, window=6)}  # within the neighbour's six tokens
    assert traced("ring", False, **near).count("ppermute[") == 2


def test_a_ring_has_no_loops_over_no_tiles() -> None:
    """In zigzag only the first hop has masked tiles; later the compiler could overlap a transfer with an empty loop."""
    first, in_the_loop, last = 2, 1, 1
    assert traced("ring", False, order="zigzag").count("while[") == first + in_the_loop + last


@pytest.mark.slow
def test_what_attention_made_is_kept_so_that_the_ring_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.parallel.attention.split.ring.UNROLLED", 4)

    def permutes(policy: str) -> int:
        rule = jp.RematPolicy(policy).rule(["attention"])
        block = jax.checkpoint(lambda *x: jp.attention(*x, impl="ring", order="zigzag"), policy=rule)
        with layout(context=4):
            grad = jax.jit(jax.grad(lambda *x: jnp.sum(block(*x) ** 2), argnums=(0, 1, 2)))
            return grad.lower(*arrays(2)).as_text().count("collective_permute")

    assert permutes("full") - permutes("save_attention") == 2 * 3


@pytest.mark.parametrize(
    ("sizes", "options", "kind", "name"),
    [
        ({"context": 4}, {"impl": "ring", "order": "zigzag", "seq": 20}, LayoutError, "queries'"),
        ({"ulysses": 8}, {"impl": "ulysses"}, LayoutError, "among 8"),
        ({"context": 4}, {"impl": "hybrid"}, LayoutError, "context"),
        ({"data": 1}, {"dropout": 0.1}, ConfigError, "0.1"),
        ({"ulysses": 4}, {"impl": "ulysses", "order": "zigzag"}, LayoutError, "attention(impl='ulysses')"),
        ({"data": 1}, {"dropout": 1.0}, ConfigError, "1.0"),
        ({"data": 1}, {"softcap": 0}, ConfigError, "attention: softcap"),
        ({"data": 1}, {"segment_ids": np.zeros((2, 3), int)}, LayoutError, "attention: segment_ids"),
        ({"data": 1}, {"bias": np.zeros((1, 3, 24, 24))}, LayoutError, "attention: bias"),
        ({"data": 1}, {"sinks": np.zeros(3)}, LayoutError, "attention: sinks"),
        ({"data": 1}, {"prefix": np.zeros(3, int)}, LayoutError, "attention: prefix"),
        ({"data": 1}, {"casual": True}, ConfigError, "casual"),
        ({"data": 1}, {"impl": "rings"}, ConfigError, "rings"),
        ({"context": 4}, {"impl": "ring", "order": "zigzagged"}, ConfigError, "zigzagged"),
        ({"context": 4}, {"impl": "ring", "kv_grad_dtype": "float16"}, ConfigError, "attention: kv_grad_dtype"),
        ({"context": 4}, {"impl": "ring", "keep_gathered_kv": True}, ConfigError, "keep_gathered_kv=True"),
        ({"context": 4}, {"impl": "gather", "keep_gathered_kv": "all"}, ConfigError, "attention: keep_gathered_kv"),
        ({"data": 1}, {"keys": 32}, LayoutError, "attention: 24"),
        ({"data": 1}, {"kv_heads": 3}, LayoutError, "of 3"),
        ({"data": 1}, {"mask": jp.Mask(causal=True), "causal": False}, ConfigError, "attention: causal"),
        ({"data": 1}, {"mask": "causal"}, ConfigError, "attention: mask"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_an_error(
    sizes: dict[str, int], options: dict[str, Any], kind: type[Exception], name: str
) -> None:
    options = dict(options)
    x = arrays(options.pop("kv_heads", 2), options.pop("seq", SEQ), options.pop("keys", None))
    with layout(**sizes), raises(kind, name):
        jp.attention(*x, **options)


def test_the_local_form_says_what_it_misses() -> None:
    x = arrays(2)
    with raises(LayoutError, "attention_local"):
        jp.context.attention_local(*x)
    with raises(ConfigError, "attention_local"):
        jp.context.attention_local(*x, impl="dense")
    mesh, spec = jp.MeshSpec(context=4).build(jax.devices()[:4]), P(None, "context")
    local = lambda q, k, v: jp.context.attention_local(q, k, v, bias=jnp.zeros((1, 1, q.shape[1], k.shape[1])))
    with raises(LayoutError, "attention: bias"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), *x)
