"""What a model of the family calls: as the library offers it, and as plain jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp

DROPPED = 0.25
ATTENTION_KEY = 5
"""The seed of the key that attention drops by, in every layout the same."""


class Tools(NamedTuple):
    """Functions of a model that have a parallel form.

    Attributes:
      hint: ``hint(x, *dims)``.
      attend: causal attention of queries, keys and values [batch, seq, heads, head_dim].
      loss: ``loss(x, head, targets, counted)``: the mean over tokens, and ``None`` or the number that it is over.
      look_up: ``look_up(table, tokens)`` of an NNX table, which by itself casts to the dtype that it was made with.
      narrow: casts what the first layer is given to the dtype of the compute.
      key: of the step, for dropout.
    """

    hint: Callable[..., Any]
    attend: Callable[..., Any]
    loss: Callable[..., Any]
    look_up: Callable[..., Any]
    narrow: Callable[[Any], Any]
    key: Any = None

    def drop(self, x: Any, number: int) -> Any:
        """``x`` without a quarter of its entries, where there is a key; draws are fp32 whatever ``x`` is."""
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

    # Where rows do not divide, a model that says nothing of its activations is the one that runs all the same.
    hint = (lambda x, *dims: x) if case.uneven else jp.hint
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(case.precision)
    # A table by itself gives the dtype that it was made with.
    look_up = (lambda table, x: table(x)) if dtype is None else (lambda table, x: table.embedding[...][x])
    narrow = lambda x: x if dtype is None else x.astype(dtype)
    return Tools(hint, attend, loss, look_up, narrow, key if case.dropout else None)


def plain(case: Any, key: Any, keep: Any) -> Tools:
    """The same without the library. ``keep``: what attention's dropout multiplies weights with, [batch, heads, seq, seq]."""

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
    """Cross entropy of each token, in fp32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # Not take_along_axis: of a split vocabulary beside manual axes XLA:CPU aborts on it.
    right = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)


def averaged(case: Any, losses: Any, counted: Any) -> Any:
    """The mean that the case asks for, and what it is over."""
    if case.mean == "all":
        return jnp.mean(losses), None
    weight = jnp.sum(counted)
    return jnp.sum(losses * counted) / (weight if case.mean == "bare" else jnp.maximum(weight, 1)), weight


def batch_of(case: Any) -> dict[str, Any]:
    """Tokens or numbers, targets, and what counts of them: the last always does."""
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
    """An initialiser: normal, and reduced over its first dim where the case asks for it."""

    def init(key: Any, shape: Any, dtype: Any = jnp.float32, *rest: Any, **named: Any) -> Any:
        w = jax.random.normal(key, shape, dtype) / max(1, shape[0]) ** 0.5
        if case.init == "centred":
            return w - w.mean(0)
        return jax.nn.softmax(w, 0) if case.init == "softmax" else w

    return init
