"""``FlaxAttention`` gives what Flax's own attention gives, with its masks, and raises for what it cannot take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from flax import linen as nn
from flax import nnx
from profiles import few

import jaxpar as jp
from jaxpar.context import FlaxAttention
from jaxpar.errors import ConfigError, LayoutError

X = jax.random.normal(jax.random.key(0), (2, 6, 8))
OURS = FlaxAttention()
SEEN = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
MASKS = {
    "none": None,
    "causal": nn.make_causal_mask(X[:, :, 0]),
    "padding": SEEN[:, None, None, :] > 0,
    "both": nn.combine_masks(nn.make_causal_mask(SEEN), nn.make_attention_mask(SEEN, SEEN)),
    "for all sequences": jnp.tril(jnp.ones((6, 6), bool)),
    "each head": jnp.stack([jnp.tril(jnp.ones((6, 6))), jnp.ones((6, 6))])[None],
}
# A query that sees no key has no result in common: rows of padding are left out.
ROWS = SEEN[..., None] > 0


def of_nnx(attention_fn: Any, **options: Any) -> Any:
    return nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0), **options)


def of_linen(attention_fn: Any, **options: Any) -> Any:
    return nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn, **options)


def same(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.where(ROWS, got, 0), np.where(ROWS, want, 0), atol=2e-6)


@pytest.mark.parametrize("name", few(["both", *(name for name in MASKS if name != "both")], 1))
def test_a_mask_hides_what_it_hides_in_flax(name: str) -> None:
    mask = MASKS[name]
    variables = of_linen(nn.dot_product_attention).init(jax.random.key(0), X)
    with jp.unsharded():
        same(of_nnx(OURS)(X, mask=mask), of_nnx(nnx.dot_product_attention)(X, mask=mask))
        same(*(of_linen(f).apply(variables, X, mask=mask) for f in (OURS, nn.dot_product_attention)))


@pytest.mark.slow
def test_a_causal_option_a_bias_and_cross_attention() -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (2, n, 2, 4)) for key, n in zip(keys, (4, 6, 6), strict=True))
    bias = jax.random.normal(jax.random.key(2), (2, 4, 6))
    with jp.unsharded():
        same(of_nnx(OURS)(X, is_causal=True), of_nnx(nnx.dot_product_attention)(X, is_causal=True))
        same(of_nnx(FlaxAttention(mask=jp.Mask()))(X), of_nnx(nnx.dot_product_attention)(X, is_causal=True))
        for more in ({}, {"is_causal": True}, {"mask": jnp.ones((4, 1), bool), "dtype": jnp.float32}):
            got = OURS(q, k, v, bias=bias, **more)
            np.testing.assert_allclose(got, nnx.dot_product_attention(q, k, v, bias=bias, **more), atol=2e-6)


@pytest.mark.slow
def test_it_works_under_a_sharded_sequence() -> None:
    rules = jp.Rules(batch=None, seq="context", heads=None, kv_heads=None, head_dim=None)
    want = of_nnx(nnx.dot_product_attention)(X, mask=MASKS["both"])
    with jp.Layout(jp.MeshSpec(context=2).build(jax.devices()[:2]), rules):
        same(jax.jit(lambda x: of_nnx(FlaxAttention(impl="ring"))(x, mask=MASKS["both"]))(X), want)


def test_dropout_drops_and_is_off_where_flax_says_so() -> None:
    module = of_nnx(OURS, dropout_rate=0.5, broadcast_dropout=False)
    with jp.unsharded():
        plain = module(X, deterministic=True)
        one, same_key, other = (module(X, deterministic=False, rngs=nnx.Rngs(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same_key)
    assert not np.allclose(one, plain) and not np.allclose(one, other)


BROADCAST = "FlaxAttention: dropout_rate"
UNKNOWN = "sow_weights"


@pytest.mark.parametrize(
    ("options", "call", "name"),
    [
        ({"dropout_rate": 0.5}, {"deterministic": False}, BROADCAST),
        ({"precision": "highest"}, {"sow_weights": True}, UNKNOWN),
    ],
    ids=["broadcast_dropout", "sow_weights"],
)
def test_what_it_cannot_take_is_an_error(options: Any, call: Any, name: str) -> None:
    linen = of_linen(OURS, **options)
    variables = of_linen(nn.dot_product_attention).init(jax.random.key(0), X)
    with jp.unsharded():
        for run in (
            lambda: of_nnx(OURS, **options)(X, rngs=nnx.Rngs(0), **call),
            lambda: linen.apply(variables, X, rngs={"dropout": jax.random.key(0)}, **call),
        ):
            with raises(ConfigError, name):
                run()


def test_linen_passes_every_argument_that_it_has() -> None:
    """Linen leaves out what the signature of ``attention_fn`` does not name."""
    variables = of_linen(nn.dot_product_attention).init(jax.random.key(0), X)
    with jp.unsharded(), pytest.raises(ConfigError, match="'qk_attn_weights_einsum'"):
        of_linen(OURS, qk_attn_weights_einsum_cls=lambda: jnp.einsum).apply(variables, X)


def test_a_mask_of_positions_and_other_lengths_need_the_position_of_the_query() -> None:
    """Flax decodes one token at a time and does not say where it is: a causal mask would show it the first key only."""
    q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 6, 2, 4))
    with jp.unsharded(), raises(LayoutError, "attention", "1 queries"):
        FlaxAttention(mask=jp.Mask())(q, k, k)
