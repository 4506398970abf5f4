"""Tests that attention which ``jp.attention`` does not compute is left as it is, and that the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jaxpar as jp
from tests.planning.attention import styles

Change = Callable[..., Any]


def scores_of(q: Any, k: Any) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def values_of(weights: jax.Array, v: Any) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def rows() -> jax.Array:
    return jnp.arange(styles.SEQ)[:, None]


def columns() -> jax.Array:
    return jnp.arange(styles.SEQ)


def of_keys(x: jax.Array) -> jax.Array:
    """A number for each key ``[batch, 1, 1, keys]``, which depends on the batch."""
    return x[:, None, None, :, 0, 0]


def masked(scores: jax.Array) -> jax.Array:
    return jnp.where(styles.causal(), scores, -1e30)


def dropped(q: Any, k: Any, v: Any) -> jax.Array:
    return nn.dot_product_attention(q, k, v, dropout_rate=0.5, dropout_rng=jax.random.key(0), deterministic=False)


def returned(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
    weights = jax.nn.softmax(scores_of(q, k))
    return values_of(weights, v), weights.max()


def precise(q: Any, k: Any, v: Any) -> jax.Array:
    return nn.dot_product_attention(q, k, v, precision=jax.lax.Precision.HIGHEST)


def rounded(q: Any, k: Any, v: Any) -> jax.Array:
    return nn.dot_product_attention(q, k, v, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)


def over_queries(q: Any, k: Any, v: Any) -> jax.Array:
    return values_of(jax.nn.softmax(scores_of(q, k), 2), v)


def over_heads(q: Any, k: Any, v: Any) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqkd", jax.nn.softmax(scores_of(q, k), 1), v)


def keys_of_two_dims(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkgd->bqhkg", q, k), 3)
    return jnp.einsum("bqhkg,bkgd->bqhgd", weights, v)


def one_head_of_values(q: Any, k: Any, v: Any) -> jax.Array:
    return jnp.einsum("bhqk,bkd->bqhd", jax.nn.softmax(scores_of(q, k)), v[:, :, 0])


def weights_repeated(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.broadcast_to(jax.nn.softmax(scores_of(q, k)), (3, *scores_of(q, k).shape))
    return jnp.einsum("nbhqk,bkhd->nbqhd", weights, v)


def one_query(q: Any, k: Any, v: Any) -> jax.Array:
    return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(jnp.einsum("bhd,bkhd->bhk", q[:, 0], k)), v)


def queries_of_two_dims(q: Any, k: Any, v: Any) -> jax.Array:
    q = q[:, :4, None] * q[:, None, :6]
    weights = jax.nn.softmax(jnp.einsum("bxyhd,bkhd->bhxyk", q, k))
    return jnp.einsum("bhxyk,bkhd->bxyhd", weights, v)


def not_divided(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.exp(scores_of(q, k))
    return values_of(weights, v) / weights.sum(-1).mT[..., None]


def divided_by_the_largest(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.exp(scores_of(q, k))
    return values_of(weights / weights.max(-1, keepdims=True), v)


def multiplied_by_the_sum(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.exp(scores_of(q, k))
    return values_of(weights * weights.sum(-1, keepdims=True), v)


def less_another_maximum(q: Any, k: Any, v: Any) -> jax.Array:
    scores = scores_of(q, k)
    weights = jnp.exp(scores - (2 * scores).max(-1, keepdims=True))
    return values_of(weights / weights.sum(-1, keepdims=True), v)


def over_keys_and_heads(q: Any, k: Any, v: Any) -> jax.Array:
    return values_of(jax.nn.softmax(scores_of(q, k), (1, 3)), v)


WHOLE: list[tuple[Change, str]] = [
    (dropped, "its softmax weights go through mul, as in dropout"),
    (returned, "its scores are used elsewhere too"),
    (precise, "its matmuls have a precision of their own"),
    (rounded, "its matmuls have a precision of their own"),
    (over_queries, "its weights are not contracted along the keys"),
    (over_heads, "its softmax is not over the keys"),
    (keys_of_two_dims, "its keys have several dims of their own"),
    (one_head_of_values, "its keys and values have different dims"),
    (weights_repeated, "its weights are repeated or summed"),
    (one_query, "it has one query"),
    (queries_of_two_dims, "several of its dims may be the sequence"),
    (not_divided, "a matmul reads exponentials of the scores"),
    (divided_by_the_largest, "its exponentials of the scores go through reduce_max"),
    (multiplied_by_the_sum, "its exponentials of the scores go through mul"),
    (less_another_maximum, "its scores go through sub"),
    (over_keys_and_heads, "its softmax is over 2 dims"),
]
CHANGED: list[tuple[str, Change, str]] = [
    ("multiplied by data", lambda s, q, k: s * jnp.exp(q[0, 0, 0, 0]), "its scores go through mul"),
    ("half hidden", lambda s, q, k: jnp.where(styles.causal(), s, -5.0), "its mask puts -5, which does not hide a key"),
    (
        "a sum of positions is no band",
        lambda s, q, k: jnp.where(rows() + columns() > 6, s, -1e30),
        "its mask compares positions in another way than a causal mask or a window",
    ),
    (
        "strictly causal",
        lambda s, q, k: jnp.where(rows() > columns(), s, -1e30),
        "its mask hides from each query the key of the same position",
    ),
    (
        "later keys only",
        lambda s, q, k: jnp.where(rows() < columns(), s, -1e30),
        "its mask hides from each query the key of the same position",
    ),
    (
        "repeated by a bias",
        lambda s, q, k: (s[None] + q[:3, 0, 0, 0, None, None, None, None])[1],
        "its scores go through add",
    ),
    (
        "repeated by a mask",
        lambda s, q, k: jnp.where(q[:3, 0, 0, 0, None, None, None, None] > 0, s[None], -1e30)[1],
        "its scores go through select_n",
    ),
    (
        "a part of the later keys",
        lambda s, q, k: jnp.where((rows() < columns()) & (columns() > 4), -1e30, s),
        "its scores are replaced where a mask holds",
    ),
    (
        "numbers of its own",
        lambda s, q, k: jnp.where(styles.causal(), s, of_keys(k) * jnp.ones_like(s)),
        "its scores are replaced where a mask holds",
    ),
    (
        "scaled late",
        lambda s, q, k: 0.5 * masked(s),
        "its scores are scaled after a mask, a bias or a softcap",
    ),
    ("negative softcap", lambda s, q, k: jnp.tanh(s) * -2.0, "a negative softcap"),
    ("no factor", lambda s, q, k: jnp.tanh(s), "its softcap has no factor"),
    ("no factor, and a bias", lambda s, q, k: jnp.tanh(s) + of_keys(k), "its softcap has no factor"),
    ("no factor, and a mask", lambda s, q, k: masked(jnp.tanh(s)), "its scores go through select_n"),
    ("capped late", lambda s, q, k: jnp.tanh(masked(s)), "its scores go through tanh"),
    ("less a bias", lambda s, q, k: s - of_keys(k), "its scores go through sub"),
    (
        "bias after a mask",
        lambda s, q, k: jnp.where(of_keys(k) > 0, s, -1e30) + of_keys(k),
        "a bias is added to its scores after a mask",
    ),
    (
        "bias of data and a mask",
        lambda s, q, k: masked(s + of_keys(k)),
        "one of its masks is added to the scores, and another replaces them",
    ),
    (
        "bias of data and a softcap",
        lambda s, q, k: 2 * jnp.tanh(s) + of_keys(k),
        "it has a softcap, and a mask that is added",
    ),
    (
        "two masks",
        lambda s, q, k: jnp.where(of_keys(k) > 0, masked(s), -1e9),
        "its masks put different scores",
    ),
    (
        "first query without keys",
        lambda s, q, k: s + jnp.where(rows() > columns(), 0, -1e9),
        "its mask hides all keys from a query",
    ),
]


def site_of(function: Change) -> tuple[Any, str]:
    """The attention that is found in a model, and the report."""

    def loss_fn(p: Any, batch: Any) -> jax.Array:
        o = function(*(batch["x"] @ p[name] for name in "qkv"))
        return sum(jnp.square(x).mean() for x in jax.tree.leaves(o))

    shape = styles.BATCH, styles.SEQ, styles.HEADS, 8
    make_model = lambda key: {name: jax.random.normal(key, (8, styles.HEAD)) for name in "qkv"}
    annotation = jp.annotate(make_model, loss_fn, {"x": jax.ShapeDtypeStruct(shape, "float32")})
    (site,) = annotation.attention
    return site, str(annotation)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        *(pytest.param(function, reason, id=function.__name__) for function, reason in WHOLE),
        *(
            pytest.param(lambda q, k, v, f=f: values_of(jax.nn.softmax(f(scores_of(q, k), q, k)), v), reason, id=name)
            for name, f, reason in CHANGED
        ),
    ],
)
def test_what_attention_does_not_compute_is_left_as_it_is_and_says_why(function: Any, reason: str) -> None:
    site, report = site_of(function)
    assert site.reason == reason and site.attention is None
    assert f"  1      left as it is: {reason}" in report
