"""In ``unsharded`` a model runs as plain JAX, with the results of a layout; elsewhere the error names it."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import NoLayoutError

RULES = jp.Rules(
    batch="data", seq=None, embed=None, heads="model", kv_heads="model", head_dim=None, params={"embed": "data"}
)
LAYOUT = jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), RULES)
KEYS = jax.random.split(jax.random.key(0), 5)
W = {name: jax.random.normal(key, (8, heads, 4)) for name, heads, key in zip("qkv", (4, 2, 2), KEYS, strict=False)}
X = jax.random.normal(KEYS[3], (4, 6, 8))


def model(weights: Any, x: Any, **options: Any) -> Any:
    x = jp.constrain(x, "batch", "seq", "embed")
    q, k = jp.sharded_dot(
        x, (weights["q"], ("embed", "heads", "head_dim")), (weights["k"], ("embed", "kv_heads", None))
    )
    v = jnp.einsum("bse,ehd->bshd", x, jp.gather_weight(weights["v"], "embed", "kv_heads", "head_dim"))
    return jp.hint(jp.attention(q, k, v, **options), "batch", "seq", "heads", "head_dim")


def loss(weights: Any, x: Any) -> Any:
    return jnp.sum(model(weights, x) ** 2)


def test_results_and_gradients_are_those_of_a_layout() -> None:
    both = jax.jit(jax.value_and_grad(loss))
    with LAYOUT:
        want = both(W, X)
    with jp.unsharded():
        got, eager = both(W, X), loss(W, X)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(eager, want[0], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["ring", "auto", "ulysses", "split_kv"], 1))
def test_every_implementation_is_the_dense_one(impl: Any) -> None:
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0]] * 4)
    with jp.unsharded():
        want = model(W, X, impl="dense", mask=jp.Mask(window=2), segment_ids=segments)
        np.testing.assert_array_equal(model(W, X, impl=impl, mask=jp.Mask(window=2), segment_ids=segments), want)


def test_hints_do_nothing_whatever_they_name() -> None:
    sharded = jax.device_put(jnp.ones((4, 8)), LAYOUT.sharding(("batch", None)))
    with jp.unsharded():
        for call in (jp.hint, jp.constrain):
            assert call(sharded, "unknown", "names") is sharded and call(sharded, None, None) is sharded
        assert "sharding" not in str(jax.make_jaxpr(lambda x: jp.hint(x, "batch", None))(sharded))


def test_a_layout_around_it_is_suspended_and_comes_back() -> None:
    f = jax.jit(lambda x: jp.hint(x, "batch", None))
    x = jnp.ones((4, 8))
    with LAYOUT:
        with jp.unsharded():
            assert f(x).sharding.is_fully_replicated
        assert f(x).sharding.is_equivalent_to(LAYOUT.sharding(("batch", None)), 2)


def test_it_compiles_once() -> None:
    traced = []
    f = jax.jit(lambda x: traced.append(x) or jp.hint(x, "batch"))
    for _ in range(2):
        with jp.unsharded():
            f(jnp.ones(4))
    assert len(traced) == 1


def test_without_it_the_error_names_it() -> None:
    for call in (lambda: loss(W, X), lambda: jp.attention(X[:, :, None], X[:, :, None], X[:, :, None])):
        with raises(NoLayoutError, "constrain()"):
            call()


@pytest.mark.slow
def test_experts_are_computed_on_whole_arrays() -> None:
    rules = jp.Rules(batch=("data", "expert"), seq=None, embed=None, experts="expert", expert_mlp=None)
    inner, outer = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
    keys = jax.random.split(jax.random.key(2), 4)
    x, logits = jax.random.normal(keys[0], (4, 6, 8)), jax.random.normal(keys[1], (4, 6, 4))
    up, down = jax.random.normal(keys[2], (4, 8, 16)), jax.random.normal(keys[3], (4, 16, 8))

    def mixture(x: jax.Array, up: jax.Array) -> jax.Array:
        y, dropped = jp.experts(x, jp.moe.Router(4, 2)(logits), (up, inner), (up, inner), (down, outer))
        return (y**2).sum() + dropped

    with jp.Layout(jp.MeshSpec(data=2, expert=2).build(jax.devices()[:4]), rules):
        want = jax.jit(jax.value_and_grad(mixture, (0, 1)))(x, up)
    with jp.unsharded():
        got = jax.jit(jax.value_and_grad(mixture, (0, 1)))(x, up)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-3)
