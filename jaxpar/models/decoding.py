"""The Llama's forward passes with a cache of keys and values, for :class:`jaxpar.Generator`.

Shape suffixes: B batch, S sequence, E embed, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxpar as jp
from jaxpar import hint
from jaxpar.infer.cached import CACHE_DIMS, Cached
from jaxpar.infer.caching import cached_attention, filled
from jaxpar.models.embedding import lookup
from jaxpar.models.llama import Block, Llama, LlamaConfig, rope_table
from jaxpar.staged import stacked_part


def cached_llama(config: LlamaConfig) -> Cached:
    """How a Llama of this configuration generates. Recomputation and copies are for training, and change nothing here."""
    dtype = jnp.dtype(config.dtype)

    def cache(batch: int, slots: int) -> Any:
        shape = jax.ShapeDtypeStruct((config.layers, batch, config.kv_heads, slots, config.head_dim), dtype)
        return {name: jp.tag(shape, *CACHE_DIMS) for name in ("keys", "values")}

    def embedded(model: Llama, tokens_BS: jax.Array) -> jax.Array:
        return lookup(model.embedding[...], hint(tokens_BS, "batch", "seq"), dtype)

    def prefill(model: Llama, tokens_BS: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        rope = rope_table(jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1), config)
        leaves, block_of = stacked_part(model, ("blocks",))

        def layer(x_BSE: jax.Array, leaves: Any) -> tuple[jax.Array, Any]:
            block: Block = block_of(leaves)
            kept: dict[str, jax.Array] = {}

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                kept.update(keys=filled(k, slots), values=filled(v, slots))
                return block.attention.context(q, k, v, None)

            return block(x_BSE, rope, attend=attend), kept

        return jax.lax.scan(layer, embedded(model, tokens_BS), leaves)

    def step(model: Llama, tokens_B: jax.Array, at_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        rope = rope_table(at_B[:, None], config)
        leaves, block_of = stacked_part(model, ("blocks",))

        def layer(carry: Any, given: Any) -> tuple[Any, None]:
            x_BSE, cache = carry
            number, leaves = given
            kept: dict[str, Any] = {}

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                o, kept["cache"] = cached_attention(q, k, v, cache, number, at_B)
                return o

            return (block_of(leaves)(x_BSE, rope, attend=attend), kept["cache"]), None

        numbers = jnp.arange(config.layers, dtype=jnp.int32)
        # The cache goes from layer to layer whole: stacked anew from layers, all of it would be copied in every step.
        (x_BSE, cache), _ = jax.lax.scan(layer, (embedded(model, tokens_B[:, None]), cache), (numbers, leaves))
        return x_BSE[:, 0], cache

    def logits(model: Llama, x_BE: jax.Array) -> jax.Array:
        return hint(model.norm(x_BE) @ model.unembedding(), "batch", "vocab")

    return Cached(cache, prefill, step, logits, config.vocab, prepare=_matrices_in(dtype))


def _matrices_in(dtype: Any) -> Callable[[Any], Any]:
    """Every parameter but those of norms in the dtype of the compute."""

    def cast(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if "norm" in jax.tree_util.keystr(path) else x.astype(dtype), params
        )

    return cast
