"""``DecoderFns``: how a model generates, and what it caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

CACHE_SEQ = "cache_seq"
"""The logical dim of a cache's slots. A table of rules that does not name it splits it as it splits ``seq``."""
CACHE_DIMS = (None, "batch", "kv_heads", CACHE_SEQ, "head_dim")
"""Logical dims of keys and of values: [layers, batch, kv_heads, slots, head_dim]. Only over a pipeline's stages are the layers split."""


@dataclass(frozen=True)
class Stack:
    """A model's forward passes layer by layer, so that the stages of a pipeline can each keep their own layers, and their cache.

    ``layers`` is what :func:`jaxpar.parallel.pipeline.staged_loss.stacked_part` gives, of all layers or of a stage's: stacked arrays, and what makes one layer of one layer's arrays.

    Attributes:
      path: of the stack in the model, as ``("blocks",)``; its first logical dim is ``layers``, as is that of every array of the cache.
      before: ``before(model, tokens) -> x``: what the first layer is given, of tokens [batch, seq]: [batch, seq, ...].
      prompts: ``prompts(layers, x, slots) -> (x, cache)``: whole prompts through layers, and the cache of these.
      token: ``token(layers, x, positions, cache, group) -> (x, cache)``: one token [batch, 1, ...] of each row. With ``group`` (number, groups)
        the rows are those of one group, of which row ``i`` is the cache's row ``i * groups + number``: see :func:`jaxpar.cached_attention`.
    """

    path: tuple[str, ...]
    before: Callable[[Any, jax.Array], jax.Array]
    prompts: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]
    token: Callable[[Any, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class DecoderFns:
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
      stack: the same layer by layer; a mesh that splits the layers over ``pipeline`` then keeps weights and cache where they are. Without it
        each step gathers them.
      sequence: the logical dims that a step finds at size 1, and so does not split.
    """

    cache: Callable[[int, int], Any]
    prefill: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]
    step: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]
    vocab: int
    prepare: Callable[[Any], Any] = lambda params: params
    stack: Stack | None = None
    sequence: tuple[str, ...] = ("seq", "residual_seq")
