"""The Llama's next-token loss as a ``PipelineLoss``, for pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import hint
from jaxpar.errors import ConfigError
from jaxpar.models.embedding import lookup
from jaxpar.models.llama.config import LlamaConfig, halved
from jaxpar.models.llama.interleaved import halves_order, interleaved_block
from jaxpar.models.llama.layers import Block, Rope, TokenInfo, layer_shapes, local_rope_table, rope_table
from jaxpar.models.llama.model import Llama, embedding_scaled, remat
from jaxpar.models.llama.sequence_chunks import ChunkCarry, carried_block, empty_carry
from jaxpar.models.losses import TOKEN_ARRAYS, mean_over_targets, output_and_scalars, with_further
from jaxpar.parallel.attention.context import num_seq_shards
from jaxpar.parallel.attention.split.token_order import permutation
from jaxpar.parallel.pipeline.staged_loss import ADDED
from jaxpar.pipeline import PipelineLoss
from jaxpar.training.remat import RematPolicy

type TokenBatch = dict[str, jax.Array]
type LayerArrays = tuple[Rope, Rope | None, jax.Array | None]
"""Rotary angles of a microbatch, those of layers with a sliding window, and the document of each token."""


def staged_next_token_loss(config: LlamaConfig, *, further: bool = True) -> PipelineLoss:
    """Returns :func:`jaxpar.models.losses.next_token_loss` of a Llama as a :class:`jaxpar.pipeline.PipelineLoss`.

    Batches are those of ``next_token_loss``. Every layer recomputes by ``config.remat``.

    Args:
      config: of the model.
      further: with the losses of further tokens, if the model predicts any. Their layers are part of the head, which
        all stages run, each for its own microbatch.

    Raises:
      ConfigError: ``config.remat`` differs between layers or slices activations; or ``config.reshard_after_forward`` is
        not ``True``, although a pipeline gathers weights once per step anyway.

    >>> import jaxpar as jp
    >>> loss = staged_next_token_loss(jp.models.preset("tiny", remat="full"))
    >>> loss.path, loss.dims
    (('blocks',), ('batch', 'residual_seq', 'embed'))
    """
    dtype, recompute = jnp.dtype(config.dtype), RematPolicy.of(config.remat)
    _check(config, recompute)
    local_layers = config.local_layers[-config.block_layers :]

    def embed(model: Llama, batch: TokenBatch) -> jax.Array:
        x_BSE = lookup(model.embedding[...], hint(batch["tokens"], "batch", "seq"), dtype, by_hand=True)
        x_BSE = embedding_scaled(x_BSE, config)
        return model.run_dense(token_info(x_BSE, layer_inputs(model, batch)), x_BSE)

    def layer_inputs(model: Llama, batch: TokenBatch) -> LayerArrays:
        positions_BS = batch["positions"]
        ropes = rope_table(positions_BS, config), local_rope_table(positions_BS, config)
        return *ropes, batch.get("segment_ids")

    def token_info(x_BSE: jax.Array, layer_inputs: LayerArrays) -> TokenInfo:
        rope, local_rope, documents_BS = layer_inputs
        # Under a pipeline the layer sees the local part of the sequence, otherwise all of it.
        num_shards, in_halves = num_seq_shards(), halved(config)
        order = None if in_halves else config.context.settled_order(*layer_shapes(config, x_BSE.shape[:2]), num_shards)
        return TokenInfo(rope, order, documents_BS, local_rope)

    def layer(block: Any, x_BSE: jax.Array, layer_inputs: LayerArrays, number: Any = None) -> Any:
        local = local_layers[0] if number is None else _local_of(config, number)
        tokens = token_info(x_BSE, layer_inputs).of_layer(local)
        apply_block = lambda block, x_BSE: block(x_BSE, tokens)
        if config.copies > 1:
            apply_block = interleaved_block(config, tokens)
        return remat(recompute, config.reshard_after_forward)(apply_block)(block, x_BSE)

    def chunked_layer(
        block: Block, x_BSE: jax.Array, layer_inputs: LayerArrays, carry: ChunkCarry, chunk: jax.Array
    ) -> tuple[jax.Array, ChunkCarry]:
        if config.copies > 1:
            raise ConfigError(
                f"overlap.ways is {config.copies}, but the schedule splits sequences into chunks, each of which passes "
                "the keys and values of all rows to the next. Remedy: sequence_chunks: 1, or overlap: {ways: 1}."
            )
        tokens = token_info(x_BSE, layer_inputs).of_layer(local_layers[0])
        return carried_block(config, recompute)(block, x_BSE, tokens.rope, tokens.documents_BS, carry, chunk)

    def head(model: Llama, x_BSE: jax.Array, batch: TokenBatch) -> Any:
        h_BSE = hint(model.norm(x_BSE), "batch", "seq", "embed")
        value = mean_over_targets(h_BSE, model.unembedding(), batch, softcap=model.logit_softcap)
        if not (further and hasattr(model, "mtp")):
            return value
        order = token_info(x_BSE, layer_inputs(model, batch)).order
        return with_further(value, model.further_loss(h_BSE, batch, batch["positions"], order))

    return PipelineLoss(
        layers="blocks",
        embed=embed,
        layer=layer,
        head=head,
        prepare=lambda model, batch: _prepared(config, model, batch),
        layer_inputs=layer_inputs,
        dims=("batch", "residual_seq", "embed"),
        numbered=len(set(local_layers)) > 1,
        chunked_layer=chunked_layer if config.supports_chunks else None,
        chunk_carry=lambda model, batch: empty_carry(config, batch),
    )


def staged_token_loss(config: LlamaConfig) -> PipelineLoss:
    """Returns :func:`staged_next_token_loss` without the model's own losses: those of routers and of further tokens.

    It is for held-out data, as :func:`jaxpar.models.losses.token_loss`.

    Raises:
      ConfigError: as :func:`staged_next_token_loss`.

    >>> import jaxpar as jp
    >>> staged_token_loss(jp.models.preset("tiny")).path
    ('blocks',)
    """
    loss = staged_next_token_loss(config, further=False)

    def layer(*inputs: Any) -> Any:
        y_BSE, scalars = output_and_scalars(loss.layer(*inputs))
        return y_BSE, {name: value for name, value in scalars.items() if name != ADDED}

    return replace(loss, layer=layer)


def _local_of(config: LlamaConfig, number: jax.Array) -> jax.Array:
    """Returns whether the layer of this index in the stack has the sliding window."""
    if num_seq_shards() > 1:
        raise ConfigError(
            f"pipeline: {sum(config.local_layers)} of {config.layers} layers have a sliding window, so stages run "
            "different attentions at the same time, but the rule for 'seq' shards the sequence, and attention then "
            "sends keys and values. Remedy: seq: null, or no pipeline axis."
        )
    return jnp.asarray(config.local_layers[-config.block_layers :])[number]


def _check(config: LlamaConfig, recompute: RematPolicy) -> None:
    recompute.refuse_host_memory()
    layers, residual = list(recompute.layers), "activations between layers are sharded by 'residual_seq'"
    reshard, gathered = config.reshard_after_forward, "weights are gathered once per step and kept"
    for key, value, fits, why in (
        ("remat.layers", layers, not layers, "all layers share one program, so all of them recompute alike"),
        ("remat.slice_activation", recompute.slice_activation, not recompute.slice_activation, residual),
        ("reshard_after_forward", reshard, reshard is True, gathered),
    ):
        if not fits:
            raise ConfigError(f"pipeline: {key} is {value}, but under a pipeline {why}. Remedy: leave {key} out.")


def _prepared(config: LlamaConfig, model: Llama, batch: TokenBatch) -> TokenBatch:
    """Returns the batch in the token order of the layers, with ``positions`` [batch, seq]."""
    arrays: TokenBatch = {name: batch[name] for name in TOKEN_ARRAYS if name in batch}
    arrays |= model.further_targets(batch) if hasattr(model, "further_targets") else {}
    shape = batch["tokens"].shape
    if halved(config):
        _, at, permuted = halves_order(*arrays.values())
        return {"positions": jnp.broadcast_to(at, shape), **dict(zip(arrays, permuted, strict=True))}
    order: Any = config.context.settled_order(*layer_shapes(config, shape))
    at = jnp.arange(shape[1], dtype=jnp.int32)
    if order is not None:
        ring = config.context.settled_ring(*layer_shapes(config, shape))
        at = jnp.asarray(permutation(order, shape[1], ring))
        arrays = {name: x[:, at] for name, x in arrays.items()}
    return {"positions": jnp.broadcast_to(at[None], shape), **arrays}
