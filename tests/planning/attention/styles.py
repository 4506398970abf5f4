"""Attention as public models write it: functions of queries, keys, values ``[batch, seq, heads, head_dim]`` and others.

The sizes are awkward on purpose: heads of 5, values of 3, lengths that leave a query without keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

BATCH, SEQ, HEADS, HEAD = 4, 24, 4, 5
LENGTHS = (24, 13, 4, 1)
Style = Callable[..., jax.Array]


def arrays(kv_heads: int = HEADS, keys: int = SEQ, value_head: int = HEAD) -> tuple[jax.Array, ...]:
    """Queries, keys, values, a bias ``[heads, queries, keys]`` and how many keys each sequence has."""
    shapes = ((BATCH, SEQ, HEADS, HEAD), (BATCH, keys, kv_heads, HEAD), (BATCH, keys, kv_heads, value_head))
    shapes += ((HEADS, SEQ, keys),)
    randoms = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    return *randoms, jnp.asarray(LENGTHS)


def causal() -> jax.Array:
    return jnp.tril(jnp.ones((SEQ, SEQ), bool))


def padding(lengths: jax.Array, keys: int = SEQ) -> jax.Array:
    return jnp.arange(keys) < lengths[:, None]


def plain(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    weights = jax.nn.softmax(jnp.where(causal(), scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def heads_first(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """As in PyTorch: heads before the sequence, and a mask of -inf."""
    q, k, v = (x.swapaxes(1, 2) for x in (q / jnp.sqrt(HEAD), k, v))
    scores = jnp.matmul(q, k.swapaxes(-1, -2))
    scores = jnp.where(jnp.arange(SEQ)[:, None] < jnp.arange(SEQ), -jnp.inf, scores)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)


def flattened(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Batch and heads as one dim, without a scale or a mask."""
    q, k, v = (x.swapaxes(1, 2).reshape(BATCH * HEADS, SEQ, -1) for x in (q, k, v))
    weights = jax.nn.softmax(jax.lax.batch_matmul(q, k.transpose(0, 2, 1)), axis=2)
    return jax.lax.batch_matmul(weights, v).reshape(BATCH, HEADS, SEQ, -1).swapaxes(1, 2)


def own_softmax(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """One sequence at a time, with a softmax written out, and values before weights."""

    def one(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("khd,qhd->hkq", k, q) + jnp.where(causal(), 0.0, -1e9).T
        exponentials = jnp.exp(scores - scores.max(1, keepdims=True))
        return jnp.einsum("khd,hkq->qhd", v, exponentials / jnp.sum(exponentials, 1, keepdims=True))

    return jax.vmap(one)(q, k, v)


def jax_nn(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def jax_nn_masked(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    mask = padding(lengths, k.shape[1])[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, bias[None], mask, scale=0.3)


def jax_nn_window(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 2))


def flax_nnx(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    return nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(jnp.ones((BATCH, SEQ))))


def flax_linen(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Causal and padded; from the second sequence on, some queries are padding too and see no key."""
    pad = padding(lengths)
    mask = nn.combine_masks(nn.make_causal_mask(jnp.ones((BATCH, SEQ))), nn.make_attention_mask(pad, pad))
    return nn.dot_product_attention(q, k, v, mask=mask)


def flax_linen_bias(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    return nn.dot_product_attention(q, k, v, bias=bias)


def added_mask(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """As in Hugging Face's Flax models: a causal mask and one of padding become numbers that are added."""
    mask = nn.combine_masks(nn.make_causal_mask(jnp.ones((BATCH, SEQ))), padding(lengths - 1)[:, None, None])
    hidden = jax.lax.select(mask > 0, jnp.zeros(mask.shape), jnp.full(mask.shape, jnp.finfo("float32").min))
    return nn.dot_product_attention(q, k, v, bias=hidden)


def added_numbers(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """As in the first BERT: padding as numbers that are added; all keys of the last sequence are hidden."""
    hidden = (1.0 - padding(lengths - 1, k.shape[1]).astype("float32")) * -1e9
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + hidden[:, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def learned_bias(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """As in T5: a learned bias and an added mask, and no scale."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + (bias + (1.0 - causal()) * -1e10)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def alibi(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1)
    distance = jnp.arange(SEQ)[None, :] - jnp.arange(SEQ)[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + slopes[:, None, None] * distance
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(distance <= 0, scores, -1e10)), v)


def grouped(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """As in Gemma 2: queries in groups, a softcap, and a window."""
    groups = HEADS // k.shape[2]
    scores = jnp.einsum("btkgh,bskh->btkgs", q.reshape(BATCH, SEQ, -1, groups, HEAD) * 0.4, k)
    scores = jnp.tanh(scores.reshape(BATCH, SEQ, HEADS, -1) / 2.0) * 2.0
    rows, columns = jnp.arange(SEQ)[:, None], jnp.arange(SEQ)
    seen = (columns <= rows) & (columns > rows - 4)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -2.3819763e38)).reshape(BATCH, SEQ, -1, groups, SEQ)
    return jnp.einsum("btkgs,bskh->btkgh", weights, v).reshape(BATCH, SEQ, HEADS, -1)


def repeated(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    k, v = (jnp.repeat(x, HEADS // k.shape[2], 2) for x in (k, v))
    return plain(q, k, v, bias, lengths)


def broadcast(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Keys and values repeated by a broadcast and a reshape, heads first, with a bias for each head."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    shape = (BATCH, k.shape[1], HEADS // k.shape[1], SEQ)
    k, v = (jnp.broadcast_to(x[:, :, None], (*shape, x.shape[-1])).reshape(BATCH, HEADS, SEQ, -1) for x in (k, v))
    return (jax.nn.softmax(q @ k.mT + bias, -1) @ v).swapaxes(1, 2)


def multi_query(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    k, v = k[:, :, 0], v[:, :, 0]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k) / HEAD)
    return jnp.einsum("bhqk,bkd->bqhd", weights, v)


def documents(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """A mask of data for each query, with -inf elsewhere: documents in one row."""
    ids = jnp.where(padding(lengths), 0, 1)
    seen = (ids[:, :, None] == ids[:, None, :]) & causal()
    scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def symmetric_window(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Keys on both sides by their distance, and a bias that grows with it, rounded."""
    distance = jnp.abs(jnp.arange(SEQ)[:, None] - jnp.arange(SEQ))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + (bias * 4).astype(int).astype(float)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(distance < 3, scores, -1e30)), v)


def one_slope(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """A bias of positions that is the same for all heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + 0.5 * (jnp.arange(SEQ) - jnp.arange(SEQ)[:, None])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@jax.custom_jvp
def softmax(x: jax.Array) -> jax.Array:
    """Softmax with a derivative of its own."""
    exponentials = jnp.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@softmax.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    weights = softmax(x)
    return weights, weights * (dx - (weights * dx).sum(-1, keepdims=True))


def own_derivative(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    later = jnp.arange(SEQ)[:, None] < jnp.arange(SEQ)
    scores = jnp.where(~later, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)


def repeated_and_added(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Repeated keys and values, and a causal mask and one of padding as numbers that are added."""
    k, v = (jnp.repeat(x, HEADS // k.shape[2], 2) for x in (k, v))
    return added_mask(q, k, v, bias, lengths)


def rounded(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """Keys and values are rounded to bf16 and repeated, and later keys are hidden by numbers that are added."""
    k, v = (jnp.repeat(x.astype("bfloat16"), HEADS // k.shape[2], 2).astype("float32") for x in (k, v))
    later = jnp.arange(SEQ)[:, None] < jnp.arange(SEQ)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.where(later, -1e9, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def hidden_keys(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """The mask tells which keys are hidden, and not which are seen."""
    hidden = (jnp.arange(SEQ) >= lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(hidden, -1e30, jnp.einsum("bqhd,bkhd->bhqk", q, k)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def no_keys(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
    """All keys of the last sequence are hidden, and its queries get the mean of the values."""
    seen = padding(lengths - 1, k.shape[1])[:, None, None]
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.finfo("float32").min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


STYLES: dict[str, tuple[Style, str, dict[str, int]]] = {
    "documents": (documents, "24 queries, 24 keys, 4 heads, causal, mask", {}),
    "plain": (plain, "24 queries, 24 keys, 4 heads, causal", {"value_head": 3}),
    "heads first": (heads_first, "24 queries, 24 keys, 4 heads, causal", {}),
    "flattened": (flattened, "24 queries, 24 keys, 1 heads", {}),
    "own softmax": (own_softmax, "24 queries, 24 keys, 4 heads, causal", {}),
    "jax.nn": (jax_nn, "24 queries, 24 keys, 4 heads (2 of keys), causal", {"kv_heads": 2}),
    "jax.nn masked": (jax_nn_masked, "24 queries, 40 keys, 4 heads, mask, bias", {"keys": 40}),
    "jax.nn window": (jax_nn_window, "24 queries, 24 keys, 4 heads, window", {}),
    "nnx": (flax_nnx, "24 queries, 24 keys, 4 heads, causal", {}),
    "linen": (flax_linen, "24 queries, 24 keys, 4 heads, causal, mask", {}),
    "linen bias": (flax_linen_bias, "24 queries, 24 keys, 4 heads, bias", {}),
    "added numbers": (added_numbers, "24 queries, 40 keys, 4 heads, bias", {"keys": 40}),
    "added mask": (added_mask, "24 queries, 24 keys, 4 heads, mask", {}),
    "learned bias": (learned_bias, "24 queries, 24 keys, 4 heads, bias", {}),
    "alibi": (alibi, "24 queries, 24 keys, 4 heads, causal, bias", {}),
    "grouped": (grouped, "24 queries, 24 keys, 4 heads (2 of keys), causal, window, softcap 2", {"kv_heads": 2}),
    "repeated": (repeated, "24 queries, 24 keys, 4 heads (2 of keys), causal", {"kv_heads": 2, "value_head": 7}),
    "broadcast": (broadcast, "24 queries, 24 keys, 4 heads (2 of keys), bias", {"kv_heads": 2}),
    "multi-query": (multi_query, "24 queries, 24 keys, 4 heads (1 of keys)", {"kv_heads": 1}),
    "symmetric window": (symmetric_window, "24 queries, 24 keys, 4 heads, mask, bias", {}),
    "one slope": (one_slope, "24 queries, 24 keys, 4 heads, bias", {}),
    "own derivative": (own_derivative, "24 queries, 24 keys, 4 heads, causal", {}),
    "repeated and added": (repeated_and_added, "24 queries, 24 keys, 4 heads (2 of keys), mask", {"kv_heads": 2}),
    "rounded": (rounded, "24 queries, 24 keys, 4 heads, causal", {"kv_heads": 2}),
    "hidden keys": (hidden_keys, "24 queries, 24 keys, 4 heads, mask", {}),
    "no keys": (no_keys, "24 queries, 40 keys, 4 heads, mask", {"keys": 40}),
}
"""Each with what is found of it, and the options of :func:`arrays`."""
