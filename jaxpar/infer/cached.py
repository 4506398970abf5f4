"""``Cached``: how a model generates, and what it caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

CACHE_SEQ = "cache_seq"
"""The logical dim of a cache's slots. A table of rules that does not name it splits it as it splits ``seq``."""
CACHE_DIMS = (None, "batch", "kv_heads", CACHE_SEQ, "head_dim")
"""Logical dims of keys and of values: [layers, batch, kv_heads, slots, head_dim]. The layers are not split: each step needs them all."""


@dataclass(frozen=True)
class Cached:
    """A model's forward passes with a cache, for :class:`jaxpar.Generator`; a model says here what it caches.

    Attributes:
      cache: ``cache(batch, slots)``: the cache as a pytree of :func:`jaxpar.tag` around shapes. What it holds is the model's own matter:
        keys and values in ``slots``, a recurrent state, or both.
      prefill: ``prefill(model, tokens, slots) -> (x, cache)``: whole prompts [batch, seq], each from position 0 on and filled up at its end
        with tokens that must not change what stands before them; ``x`` [batch, seq, ...], and the cache of ``slots``, in which what these
        tokens left is never looked at before it is written anew.
      step: ``step(model, tokens, positions, cache) -> (x, cache)``: one token [batch] of each row, at its own position [batch];
        ``x`` [batch, ...].
      logits: ``logits(model, x) -> [batch, vocab]``, of one ``x`` a row.
      vocab: how many tokens there are.
      prepare: ``prepare(params) -> params``: parameters as a step reads them fastest, cast once and not in each step.
      sequence: the logical dims that a step finds at size 1, and so does not split.
    """

    cache: Callable[[int, int], Any]
    prefill: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]
    step: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]
    vocab: int
    prepare: Callable[[Any], Any] = lambda params: params
    sequence: tuple[str, ...] = ("seq", "residual_seq")
