"""The Llama's next-token loss as a ``PipelineLoss``, for pipeline parallelism."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import hint
from jaxpar.errors import ConfigError
from jaxpar.models.embedding import lookup
from jaxpar.models.llama.config import LlamaConfig, halved
from jaxpar.models.llama.interleaved import halves_order, interleaved_block
from jaxpar.models.llama.layers import Block, Rope, layer_shapes, rope_table
from jaxpar.models.llama.model import Llama, remat
from jaxpar.models.llama.sequence_chunks import ChunkCarry, carried_block, empty_carry
from jaxpar.models.losses import linear_cross_entropy
from jaxpar.parallel.attention.context import split_ways
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.pipeline import PipelineLoss
from jaxpar.training.remat import RematPolicy

type TokenBatch = dict[str, jax.Array]


def staged_next_token_loss(config: LlamaConfig) -> PipelineLoss:
    """Return :func:`jaxpar.models.losses.next_token_loss` of a Llama as a :class:`jaxpar.pipeline.PipelineLoss`.

    Batches hold ``tokens`` and ``targets`` [batch, seq] int. Every layer recomputes by ``config.remat``.

    Raises:
      ConfigError: ``config.remat`` differs between layers or slices activations; or ``config.reshard_after_forward`` is
        not ``True``, although a pipeline gathers weights once per step anyway.
    """
    dtype, recompute = jnp.dtype(config.dtype), RematPolicy.of(config.remat)
    _check(config, recompute)

    def before(model: Llama, batch: TokenBatch) -> jax.Array:
        return lookup(model.embedding[...], hint(batch["tokens"], "batch", "seq"), dtype, by_hand=True)

    def side(model: Llama, batch: TokenBatch) -> tuple[Rope, jax.Array | None]:
        return rope_table(batch["positions"], config), batch.get("segment_ids")

    def layer(block: Block, x_BSE: jax.Array, side: tuple[Rope, jax.Array | None]) -> jax.Array:
        rope, documents_BS = side
        # Under a pipeline the layer sees the local part of the sequence, otherwise all of it.
        ways, in_halves = split_ways(), halved(config)
        order = None if in_halves else config.context.settled_order(*layer_shapes(config, x_BSE.shape[:2]), ways)
        one = lambda block, x_BSE: block(x_BSE, rope, order, documents_BS)
        if config.copies > 1:
            how = config.copies, config.copies_dim, config.context
            one = interleaved_block(*how, rope, order, documents_BS)
        run = remat(recompute, config.reshard_after_forward)(one)
        y_BSE: jax.Array = run(block, x_BSE)
        return y_BSE

    def chunked_layer(
        block: Block, x_BSE: jax.Array, side: tuple[Rope, jax.Array | None], carry: ChunkCarry, chunk: jax.Array
    ) -> tuple[jax.Array, ChunkCarry]:
        if config.copies > 1:
            raise ConfigError(
                f"overlap.ways is {config.copies}, but the schedule cuts sequences into chunks, each of which carries "
                f"keys and values of all rows to the next. Remedy: sequence_chunks: 1, or overlap: {{ways: 1}}."
            )
        return carried_block(config, recompute)(block, x_BSE, *side, carry, chunk)

    def after(model: Llama, x_BSE: jax.Array, batch: TokenBatch) -> jax.Array:
        h_BSE = hint(model.norm(x_BSE), "batch", "seq", "embed")
        return linear_cross_entropy(h_BSE, model.unembedding(), batch["targets"])

    return PipelineLoss(
        layers="blocks",
        embed=before,
        layer=layer,
        head=after,
        prepare=lambda model, batch: _prepared(config, batch),
        layer_inputs=side,
        dims=("batch", "residual_seq", "embed"),
        chunked_layer=chunked_layer,
        chunk_carry=lambda model, batch: empty_carry(config, batch),
    )


def _check(config: LlamaConfig, recompute: RematPolicy) -> None:
    asked = (
        ("remat.layers", list(recompute.layers) or None, "all layers are one program, which recomputes as one"),
        (
            "remat.slice_activation",
            recompute.slice_activation or None,
            "what goes from layer to layer lies by 'residual_seq'",
        ),
        (
            "reshard_after_forward",
            None if config.reshard_after_forward is True else config.reshard_after_forward,
            "weights are gathered once a step, and kept",
        ),
    )
    for key, value, why in asked:
        if value is not None:
            raise ConfigError(f"pipeline: {key} is {value}, but under a pipeline {why}. Remedy: leave {key} out.")


def _prepared(config: LlamaConfig, batch: TokenBatch) -> TokenBatch:
    """Return the batch in the token order of the layers, with ``positions`` [batch, seq]."""
    own: TokenBatch = {name: batch[name] for name in ("tokens", "targets", "segment_ids") if name in batch}
    shape = batch["tokens"].shape
    if halved(config):
        _, at, laid = halves_order(*own.values())
        return {**dict(zip(own, laid, strict=True)), "positions": jnp.broadcast_to(at, shape)}
    order: Any = config.context.settled_order(*layer_shapes(config, shape))
    at = jnp.arange(shape[1], dtype=jnp.int32)
    if order is not None:
        ring = config.context.settled_ring(*layer_shapes(config, shape))
        at = jnp.asarray(permutation(order, shape[1], ring))
        own = {name: x[:, at] for name, x in own.items()}
    return {**own, "positions": jnp.broadcast_to(at[None], shape)}
