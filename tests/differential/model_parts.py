"""Functions that the models of the family call: the library's, and the same in plain jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

DROPPED = 0.25
ATTENTION_KEY = 5
"""The seed of the attention dropout key, the same in every layout."""


class Tools(NamedTuple):
    """Functions of a model that have a parallel form.

    Attributes:
      hint: ``hint(x, *dims)``.
      attend: causal attention of queries, keys and values [batch, seq, heads, head_dim].
      loss: ``loss(x, head, targets, counted)``: the mean over tokens, and the weight of that mean or ``None``.
      look_up: ``look_up(table, tokens)`` of an NNX table, which otherwise casts to the dtype of its construction.
      narrow: casts the input of the first layer to the compute dtype.
      key: the step's key, for dropout.
    """

    hint: Callable[..., Any]
    attend: Callable[..., Any]
    loss: Callable[..., Any]
    look_up: Callable[..., Any]
    narrow: Callable[[Any], Any]
    key: Any = None

    def drop(self, x: Any, number: int) -> Any:
        """``x`` with a quarter of its entries dropped if there is a key; draws are fp32 whatever the dtype of ``x``."""
        if self.key is None:
            return x
        kept = jax.random.uniform(jax.random.fold_in(self.key, number), x.shape, jnp.float32) >= DROPPED
        return jnp.where(kept, x / (1 - DROPPED), 0)


def library(case: Any, key: Any = None) -> Tools:
    """The library's functions."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        options: dict[str, Any] = {"dropout": DROPPED, "key": jax.random.key(ATTENTION_KEY)}
        return jp.attention(q, k, v, **(options if case.attention_dropout else {}))

    def loss(x: Any, head: Any, targets: Any, counted: Any) -> Any:
        from jaxpar.models.losses import cross_entropy, linear_cross_entropy

        mask = None if case.mean == "all" else counted
        weight = None if mask is None else jnp.sum(counted)
        if case.loss == "linear":
            return linear_cross_entropy(x, head.astype(x.dtype), targets, mask), weight
        logits = jp.hint(x @ head.astype(x.dtype), "batch", "seq", "vocab")
        if case.loss == "cross_entropy":
            return cross_entropy(logits, targets, mask), weight
        return averaged(case, plain_losses(logits, targets), counted)

    # Where rows do not divide, only a model without activation annotations runs.
    hint = (lambda x, *dims: x) if case.uneven else jp.hint
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(case.precision)
    # Otherwise a table returns the dtype of its construction.
    look_up = (lambda table, x: table(x)) if dtype is None else (lambda table, x: table.embedding[...][x])
    narrow = lambda x: x if dtype is None else x.astype(dtype)
    return Tools(hint, attend, loss, look_up, narrow, key if case.dropout else None)


def plain(case: Any, key: Any, keep: Any) -> Tools:
    """The same without the library. ``keep`` [batch, heads, seq, seq] holds the dropout factors of the attention
    weights."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, 2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
        weights = jax.nn.softmax(jnp.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", weights if keep is None else weights * keep, v)

    def loss(x: Any, head: Any, targets: Any, counted: Any) -> Any:
        return averaged(case, plain_losses(x @ head, targets), counted)

    look_up = lambda table, x: table.embedding[...][x]
    return Tools(lambda x, *dims: x, attend, loss, look_up, lambda x: x, key if case.dropout else None)


def plain_losses(logits: Any, targets: Any) -> Any:
    """The cross entropy of each token, at least in fp32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Not take_along_axis: XLA:CPU aborts on it with a sharded vocabulary and manual axes.
    right = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)


def averaged(case: Any, losses: Any, counted: Any) -> Any:
    """The mean that the case configures, and its weight."""
    if case.mean == "all":
        return jnp.mean(losses), None
    weight = jnp.sum(counted)
    return jnp.sum(losses * counted) / (weight if case.mean == "bare" else jnp.maximum(weight, 1)), weight


def batch_of(case: Any) -> dict[str, Any]:
    """Tokens or numbers, targets, and the mask of those that count; the last one always counts."""
    rng, shape = np.random.default_rng((case.seed, 1)), (case.batch, case.seq)
    counted = (rng.random(shape) < (0.2 if case.mean == "bare" else 0.6)).astype(np.float32)
    counted[-1, -1] = 1
    if case.tokens:
        draw = lambda: rng.integers(0, case.vocab, shape).astype(np.int32)
    else:
        draw = lambda: rng.normal(size=(*shape, case.embed)).astype(np.float32)
    return {"x": draw(), "targets": draw(), "counted": counted}


def squares(case: Any, y: Any, batch: Any) -> Any:
    """The mean square of rows of numbers."""
    return averaged(case, jnp.mean(jnp.square(y - batch["targets"]), -1), batch["counted"])


def named_init(case: Any) -> Callable[..., Any]:
    """An initializer: normal, and centred or normalized over its first dim where the case configures it."""

    def init(key: Any, shape: Any, dtype: Any = jnp.float32, *rest: Any, **named: Any) -> Any:
        w = jax.random.normal(key, shape, dtype) / max(1, shape[0]) ** 0.5
        if case.init == "centred":
            return w - w.mean(0)
        return jax.nn.softmax(w, 0) if case.init == "softmax" else w

    return init
