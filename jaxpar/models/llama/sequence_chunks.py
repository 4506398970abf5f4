"""The Llama's layers on sequence chunks: each chunk attends to the keys and values carried from earlier chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxpar import Mask, RematPolicy, attention
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.layers import Block, Rope, TokenInfo, layer_shapes
from jaxpar.models.llama.model import remat

type ChunkCarry = dict[str, Any]
"""``keys`` and ``values`` [batch, seq, kv_heads, head_dim] of a layer; ``documents`` [batch, seq] if the batch is
packed."""
type ChunkedLayer = Callable[
    [Block, jax.Array, Rope, jax.Array | None, ChunkCarry, jax.Array], tuple[jax.Array, ChunkCarry]
]


def empty_carry(config: LlamaConfig, batch: dict[str, jax.Array]) -> ChunkCarry:
    """Returns the carry of a layer for all tokens [batch, seq] of a batch; keys and values are shapes."""
    _, kv = layer_shapes(config, batch["tokens"].shape)
    documents = batch.get("segment_ids")
    return {"keys": kv, "values": kv, **({} if documents is None else {"documents": documents})}


def carried_block(config: LlamaConfig, recompute: RematPolicy) -> ChunkedLayer:
    """Returns the layer of one chunk: ``(block, x, rope, documents, carry, chunk) -> (x, carry)``."""
    context, window = config.context, config.sliding_window if config.local_layers[0] else None

    def layer(
        block: Block, x_BSE: jax.Array, rope: Rope, documents_BS: jax.Array | None, carry: ChunkCarry, chunk: jax.Array
    ) -> tuple[jax.Array, ChunkCarry]:
        @remat(recompute, config.reshard_after_forward, _never_save_carry)
        def run(block: Block, x_BSE: jax.Array, carry: ChunkCarry) -> tuple[jax.Array, ChunkCarry]:
            start = chunk * x_BSE.shape[1]
            found: ChunkCarry = {}

            def attend(q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array) -> jax.Array:
                parts: dict[str, Any] = {"keys": k_BSKD, "values": v_BSKD, "documents": documents_BS}
                for name, full in carry.items():
                    found[name] = jax.lax.dynamic_update_slice_in_dim(full, parts[name], start, 1)
                segments = None if documents_BS is None else (documents_BS, found["documents"])
                # Slots after this chunk may hold another microbatch's keys. The causal mask hides them.
                options: dict[str, Any] = {"impl": context.impl, "block": context.block, "segment_ids": segments}
                options |= {"mask": Mask(window=window), **block.attention.score_options}
                return attention(q_BSHD, found["keys"], found["values"], q_offset=start, **options)

            return block(x_BSE, TokenInfo(rope), attend), found

        return run(block, x_BSE, carry)

    return layer


def _never_save_carry(policy: Any) -> Any:
    """Wrap a checkpoint policy so that it never saves the carry, which the stage stores once for all chunks."""

    def saved(primitive: Any, *args: Any, **parameters: Any) -> Any:
        carried = primitive.name in ("dynamic_update_slice", "sharding_constraint")
        return False if carried else policy(primitive, *args, **parameters)

    return None if policy is None else saved
