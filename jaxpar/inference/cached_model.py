"""``DecoderFns``: a model's forward passes with a cache, and the logical dims of that cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.training.model.quantize_targets import QuantizeConfig

CACHE_SEQ = "cache_seq"
"""Logical dim of a cache's slots. Rules without an entry for it shard the slots as they shard ``seq``."""
CACHE_DIMS = (None, "batch", "kv_heads", CACHE_SEQ, "head_dim")
"""Logical dims of cached keys and values, [layers, batch, kv_heads, slots, head_dim]. Only pipeline stages shard the
layers."""


@dataclass(frozen=True)
class Stack:
    """A model's forward passes layer by layer, so that each pipeline stage keeps its own weights and cache.

    ``layers`` below is what :func:`jaxpar.parallel.pipeline.staged_loss.stacked_part` returns, for all layers or for
    those of a stage: the stacked arrays, and a function that builds one layer from the arrays of one layer.

    Attributes:
      path: path of the stack in the model, such as ``("blocks",)``. The first logical dim of its arrays is ``layers``,
        and so is that of every array of the cache.
      before: ``before(model, tokens) -> x``: maps tokens [batch, seq] to the input of the first layer,
        [batch, seq, ...].
      prompts: ``prompts(layers, x, slots) -> (x, cache)``: runs full prompts through the layers and returns their
        cache.
      token: ``token(layers, x, positions, cache, group) -> (x, cache)``: runs one token [batch, 1, ...] of each row.
        With ``group`` (number, groups) the rows belong to one group, and row ``i`` is the cache's row
        ``i * groups + number``; see :func:`jaxpar.inference.cached_attention`.
    """

    path: tuple[str, ...]
    before: Callable[[Any, jax.Array], jax.Array]
    prompts: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]
    token: Callable[[Any, jax.Array, jax.Array, Any, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class DecoderFns:
    """A model's forward passes with a cache, for :class:`jaxpar.Generator`. The model defines what its cache holds.

    Attributes:
      cache: ``cache(batch, slots)``: the cache as a pytree of :func:`jaxpar.tag` around shapes. It may hold keys and
        values in ``slots``, a recurrent state, or both.
      prefill: ``prefill(model, tokens, slots) -> (x, cache)``: runs full prompts [batch, seq] from position 0 and
        returns ``x`` [batch, seq, ...] and a cache of ``slots``. Prompts are padded at the end. Padding tokens must not
        change the tokens before them, and a step must not read their slots before it overwrites them.
      step: ``step(model, tokens, positions, cache) -> (x, cache)``: runs one token [batch] of each row at its own
        position [batch]; ``x`` is [batch, ...].
      logits: ``logits(model, x) -> [batch, vocab]`` for one ``x`` per row.
      vocab: vocabulary size.
      prepare: ``prepare(params) -> params``: converts parameters once to the form that a step reads fastest, so that no
        step casts them.
      quantize: which parameters :meth:`jaxpar.Generator.prepare` first turns into integers.
      stack: the forward passes layer by layer. With it, a mesh that shards the layers over ``pipeline`` keeps weights
        and cache on their stages; without it, each step gathers them.
      sequence: logical dims that have size 1 in a step and are therefore not sharded there.

    >>> import jax.numpy as jnp
    >>> bigram = DecoderFns(
    ...     cache=lambda batch, slots: {},
    ...     prefill=lambda model, tokens, slots: (model["table"][tokens], {}),
    ...     step=lambda model, tokens, positions, cache: (model["table"][tokens], cache),
    ...     logits=lambda model, x: x,
    ...     vocab=4,
    ... )
    >>> x, cache = bigram.step({"table": jnp.eye(4)}, jnp.array([2]), jnp.array([0]), {})
    >>> x.argmax(-1).tolist()
    [2]
    """

    cache: Callable[[int, int], Any]
    prefill: Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]
    step: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]
    vocab: int
    prepare: Callable[[Any], Any] = lambda params: params
    quantize: QuantizeConfig | None = None
    stack: Stack | None = None
    sequence: tuple[str, ...] = ("seq", "residual_seq")
