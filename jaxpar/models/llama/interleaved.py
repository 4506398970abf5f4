"""The Llama's blocks as branches for overlapped copies, and the token order that sequence halves need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import Mask, attention
from jaxpar.errors import ConfigError
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.layers import Block, Rope, TokenInfo, by_window
from jaxpar.parallel.overlap.branches import Branch
from jaxpar.parallel.overlap.interleave import interleave_batches, order_of_halves
from jaxpar.training.remat import OUTPUT

HALVES = "halves"
"""Name of the token order for copies that are sequence halves
(:func:`jaxpar.parallel.overlap.interleave.order_of_halves`)."""
type Side = tuple[Rope, jax.Array | None]
type KeyValueCarry = tuple[jax.Array, jax.Array, jax.Array | None]


def halves_order(*arrays_BS: jax.Array) -> tuple[str, jax.Array, tuple[jax.Array, ...]]:
    """Returns the order's name, the token positions [1, seq], and the arrays [batch, seq] permuted to this order."""
    at = order_of_halves(arrays_BS[0].shape[1])
    return HALVES, jnp.asarray(at)[None], tuple(x[:, at] for x in arrays_BS)


def interleaved_block(config: LlamaConfig, tokens: TokenInfo) -> Callable[[Block, Any], Any]:
    """Returns a block that runs on ``config.copies`` parts of each device's rows or tokens.

    Args:
      config: of the model; ``copies_dim`` is the dim that is split.
      tokens: positions, order and documents of the tokens; the order is a name or ``None``.

    Raises:
      ConfigError: the order is an array that came with the batch.
    """
    if tokens.order is not None and not isinstance(tokens.order, str):
        raise ConfigError(
            f"overlap.ways is {config.copies}, which does not support parallel.context.load_balance: balanced. Remedy: "
            "load_balance: zigzag, or overlap: {ways: 1}."
        )

    def mixed(block: Block, h_BSE: jax.Array, side: Side) -> jax.Array:
        rope, documents_BS = side
        return block.attention(h_BSE, TokenInfo(rope, tokens.order, documents_BS, local=tokens.local), half=True)

    def carried(
        block: Block, h_BSE: jax.Array, side: Side, carry: KeyValueCarry | None
    ) -> tuple[jax.Array, KeyValueCarry]:
        rope, documents_BS = side
        seen: list[KeyValueCarry] = []

        def attend(q_BSHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array) -> jax.Array:
            before = 0 if carry is None else carry[0].shape[1]
            pairs = zip(carry or (None, None, None), (k_BSKD, v_BSKD, documents_BS), strict=True)
            keys, values, documents = (_append(*pair) for pair in pairs)
            seen.append((keys, values, documents))
            options: dict[str, Any] = {"impl": config.context.impl, "block": config.context.block}
            options["segment_ids"] = None if documents_BS is None else (documents_BS, documents)
            run = lambda window: attention(q_BSHD, keys, values, q_offset=before, mask=Mask(window=window), **options)
            return by_window(tokens.local, config.sliding_window, run)

        return block.attention(h_BSE, TokenInfo(rope), attend, half=True), seen[0]

    attention_branch = Branch(
        before=lambda block, x_BSE: block.attention_norm(x_BSE),
        compute=mixed,
        output_projection=lambda block, o_BSHD: block.attention.output(o_BSHD),
        name=OUTPUT,
        carried=carried,
    )
    mlp_branch = Branch(
        before=lambda block, x_BSE: block.mlp_norm(x_BSE),
        compute=lambda block, h_BSE, side: block.mlp(h_BSE, half=True),
        output_projection=lambda block, hidden_BSF: block.mlp.output(hidden_BSF),
        name=OUTPUT,
    )
    run = interleave_batches((attention_branch, mlp_branch), config.copies, dim=config.copies_dim)
    return lambda block, x_BSE: run(block, x_BSE, (tokens.rope, tokens.documents_BS))


def _append(before: Any, x_BS: Any) -> Any:
    """Concatenate keys, values or documents of the earlier tokens with those of this part."""
    return x_BS if before is None else jnp.concatenate([before, x_BS], 1)
