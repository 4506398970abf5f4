"""Attention over a split sequence: what its programs send, compute and keep, and what it refuses."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    ("sizes", "options", "kind", "text"),
    [
        (
            {"context": 4},
            {"impl": "ring", "order": "zigzag", "seq": 20},
            LayoutError,
            (
                "attention: the queries' sequence has 20 tokens, but order 'zigzag' over 4 devices requires a multiple "
                "of 8. Remedy: use pad=True (adds 4 masked tokens), or order='striped', which requires a multiple of 4."
            ),
        ),
        (
            {"ulysses": 8},
            {"impl": "ulysses"},
            LayoutError,
            (
                "attention: 4 query heads cannot be exchanged among 8 devices over 'ulysses'. Remedy: use a number of "
                "devices that divides them (1, 2, 4), or impl='ring', which supports any number."
            ),
        ),
        (
            {"context": 4},
            {"impl": "hybrid"},
            LayoutError,
            (
                "attention(impl='hybrid'): the sequence is sharded over 'context', but it must be sharded over the "
                "axes of a ring, followed by 'ulysses' to exchange heads. Remedy: use a rule seq=('context', "
                "'ulysses') on a mesh with both axes, or impl='ring' or 'ulysses'."
            ),
        ),
        (
            {"data": 1},
            {"dropout": 0.1},
            ConfigError,
            (
                "attention: dropout is 0.1, but no key is given. Remedy: pass key=jax.random.key(...), a new one in "
                "every step, or dropout=0."
            ),
        ),
        (
            {"ulysses": 4},
            {"impl": "ulysses", "order": "zigzag"},
            LayoutError,
            (
                "attention(impl='ulysses'): order 'zigzag' applies to the devices of a ring, but there is no ring: the "
                "sequence is exchanged for heads over 'ulysses'. Remedy: use impl='ring' or 'hybrid', or "
                "order='contiguous' for tokens in their natural order."
            ),
        ),
        (
            {"data": 1},
            {"dropout": 1.0},
            ConfigError,
            "attention: dropout must be a fraction >= 0 and < 1, got 1.0.",
        ),
        ({"data": 1}, {"softcap": 0}, ConfigError, "attention: softcap must be a number > 0, got 0."),
        (
            {"data": 1},
            {"segment_ids": np.zeros((2, 3), int)},
            LayoutError,
            ("attention: segment_ids of the queries must be integers [2, 24], one per token, got int32[2, 3]."),
        ),
        (
            {"data": 1},
            {"bias": np.zeros((1, 3, 24, 24))},
            LayoutError,
            (
                "attention: bias must have the shape [2 or 1, 4 or 1, 24, 24] (batch, heads, queries, keys), got [1, "
                "3, 24, 24]."
            ),
        ),
        (
            {"data": 1},
            {"sinks": np.zeros(3)},
            LayoutError,
            "attention: sinks must be one number for each of 4 query heads, got shape [3].",
        ),
        (
            {"data": 1},
            {"prefix": np.zeros(3, int)},
            LayoutError,
            "attention: prefix must be one number, or one for each of 2 sequences, got shape [3].",
        ),
        (
            {"data": 1},
            {"casual": True},
            ConfigError,
            "attention: unknown option 'casual'. Did you mean 'causal'? The options are: causal, mask,",
        ),
        (
            {"data": 1},
            {"impl": "rings"},
            ConfigError,
            "attention: unknown impl 'rings'. Did you mean 'ring'? The implementations are: auto, dense,",
        ),
        (
            {"context": 4},
            {"impl": "ring", "order": "zigzagged"},
            ConfigError,
            "attention: unknown order 'zigzagged'. Did you mean 'zigzag'? The orders are: contiguous, zigzag, striped.",
        ),
        (
            {"context": 4},
            {"impl": "ring", "kv_grad_dtype": "float16"},
            ConfigError,
            "attention: kv_grad_dtype must be 'float32' or 'bfloat16', got 'float16'. Did you mean 'bfloat16'?",
        ),
        (
            {"context": 4},
            {"impl": "ring", "keep_gathered_kv": True},
            ConfigError,
            (
                "attention(impl='ring'): keep_gathered_kv=True keeps gathered keys and values for the backward pass, "
                "but only impl 'gather' gathers them. Remedy: use impl='gather', or leave keep_gathered_kv out."
            ),
        ),
        (
            {"context": 4},
            {"impl": "gather", "keep_gathered_kv": "all"},
            ConfigError,
            "attention: keep_gathered_kv must be True or False, got 'all'.",
        ),
        (
            {"data": 1},
            {"keys": 32},
            LayoutError,
            (
                "attention: 24 queries and 32 keys under a mask that compares their positions, but the position of the "
                "first query is unknown. Remedy: pass q_offset=8 if the last query is at the last key, q_offset=0 if "
                "the first query is at the first key, or causal=False."
            ),
        ),
        (
            {"data": 1},
            {"kv_heads": 3},
            LayoutError,
            "attention: 4 query heads are not a multiple of 3 key heads, so they cannot share the key heads evenly.",
        ),
        (
            {"data": 1},
            {"mask": jp.Mask(causal=True), "causal": False},
            ConfigError,
            (
                "attention: causal is False, but the mask has causal=True. Remedy: leave causal out, or set it in the "
                "mask."
            ),
        ),
        (
            {"data": 1},
            {"mask": "causal"},
            ConfigError,
            "attention: mask must be a jp.Mask or a function of two positions, got str.",
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_an_error(
    sizes: dict[str, int], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    options = dict(options)
    x = arrays(options.pop("kv_heads", 2), options.pop("seq", SEQ), options.pop("keys", None))
    with layout(**sizes), pytest.raises(kind, match=f"^{re.escape(text)}"):
        jp.attention(*x, **options)


def test_the_local_form_says_what_it_misses() -> None:
    x = arrays(2)
    text = (
        "attention_local: 'context' is not a manual axis here; the manual axes are: none. Remedy: call it inside "
        "jax.shard_map over 'context', or call jp.attention outside."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        jp.context.attention_local(*x)
    text = "attention_local: impl 'dense' is only valid for global arrays. Remedy: use one of flash, gather,"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
        jp.context.attention_local(*x, impl="dense")
    mesh, spec = jp.MeshSpec(context=4).build(jax.devices()[:4]), P(None, "context")
    local = lambda q, k, v: jp.context.attention_local(q, k, v, bias=jnp.zeros((1, 1, q.shape[1], k.shape[1])))
    text = (
        "attention: bias must have the shape [2 or 1, 4 or 1, 6, 24] (batch, heads, queries, keys), got [1, 1, 6, 6]."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), *x)
