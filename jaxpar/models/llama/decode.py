"""Forward passes with a key/value cache of a Llama, or of a decoder with experts, for :class:`jaxpar.Generator`.

Shape suffixes: B batch, S sequence, E embed, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import hint, sharded_dot
from jaxpar.errors import ConfigError
from jaxpar.inference import Int8
from jaxpar.inference.cached_model import DecoderFns, Stack
from jaxpar.inference.kv_cache import cached_attention, fill_cache, init_cache
from jaxpar.models.embedding import lookup
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.layers import Block, token_info
from jaxpar.models.llama.model import Llama, embedding_scaled
from jaxpar.models.losses import output_and_scalars, soft_capped
from jaxpar.parallel.collectives.gather_reduce import axes_of
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.staged_loss import stacked_part
from jaxpar.parallel.precision.quantized_array import QuantizedArray, is_quantized
from jaxpar.sharding.layout import current_layout
from jaxpar.training.model.quantize_targets import QuantizeConfig, ScaleDtype
from jaxpar.utils.checks import INT32

CONTRACTING_DIMS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("q", "k", "v", "q_up", "kv_up"), (-3,)),
    **dict.fromkeys(("gate", "up", "down", "head", "q_down", "kv_down"), (-2,)),
    "o": (-3, -2),
    "embedding": (-1,),
}
"""Contracting dims of each matrix. An int8 matrix shares one scale along these dims."""
_INT8 = "int8"
_ROUTER, _ROUTER_BIAS = "router", "router_bias"
"""They choose experts, and rounding could change the choice: the matrix is never int8, and the bias is unchanged."""


def cached_llama(
    config: LlamaConfig, *, weights: str | QuantizeConfig | None = None, cache: str | None = None
) -> DecoderFns:
    """Returns the cached forward passes of a Llama, or of a decoder with experts, for :class:`jaxpar.Generator`.

    With experts no choice is dropped, whatever the capacity in training, so that a request's tokens do not depend on
    other requests. Layers with a dense MLP before those with experts are another stack, so pipeline stages then gather
    each other's weights in every step.

    Args:
      config: the configuration of the training; ``remat``, ``copies`` and the options of the dispatch have no effect
        here.
      weights: ``int8`` stores every matrix as 8-bit integers with a scale per column (:class:`jaxpar.inference.Int8`),
        that of an expert per expert and column; norms and routers are not quantized. A
        :class:`jaxpar.compression.QuantizeConfig`, such as :func:`quantized_weights` returns, stores those that it
        chooses as integers of 8 or 4 bits, with a scale per column or per group. ``None`` stores matrices in the
        compute dtype. :meth:`jaxpar.Generator.prepare` quantizes the weights.
      cache: ``int8`` stores keys and values as 8-bit integers with a scale per token and head. ``None`` stores them in
        the compute dtype.

    Raises:
      ConfigError: ``weights`` or ``cache`` is neither ``int8`` nor ``None``.

    >>> from jaxpar.models.llama import preset
    >>> cached_llama(preset("tiny"), cache="int8").cache(1, 16)["keys"].values.value.dtype
    dtype('int8')
    """
    quantize = weights if isinstance(weights, QuantizeConfig) else None
    for key, value in (("weights", None if quantize else weights), ("cache", cache)):
        if value not in (_INT8, None):
            raise ConfigError(f"cached_llama: {key} must be {_INT8!r} or None, got {value!r}.")
    dtype = jnp.dtype(config.dtype)
    cache_dtype = jnp.dtype(cache or dtype)

    def shapes(batch: int, slots: int) -> Any:
        sizes = (config.layers, batch, config.kv_heads, slots, config.qk_dim)
        return init_cache(*sizes, cache_dtype, value_dim=config.value_dim)

    def embed(model: Llama, tokens_BS: jax.Array) -> jax.Array:
        table, tokens_BS = model.embedding[...], hint(tokens_BS, "batch", "seq")
        if isinstance(table, QuantizedArray):
            table = table.by_channel([-1]) or table.astype(dtype)
        if not isinstance(table, Int8):
            return embedding_scaled(lookup(table, tokens_BS, dtype), config)
        scales_BS = hint(jnp.take(table.scales, tokens_BS, mode="clip"), "batch", "residual_seq")
        rows_BSE = (lookup(table.values, tokens_BS, jnp.int8) * scales_BS[..., None]).astype(dtype)
        return embedding_scaled(rows_BSE, config)

    prompts, token = functools.partial(_prompts, config, cache_dtype), functools.partial(_token, config)

    def prefill(model: Llama, tokens_BS: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        x_BSE, caches, first = embed(model, tokens_BS), [], 0
        for name in config.stacks:
            layers = stacked_part(model, (name,))
            x_BSE, cache = prompts(layers, x_BSE, slots, first)
            caches.append(cache)
            first += jax.tree.leaves(layers[0])[0].shape[0]
        return x_BSE, caches[0] if len(caches) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *caches)

    def step(model: Llama, tokens_B: jax.Array, at_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        x_BSE, first = embed(model, tokens_B[:, None]), 0
        for name in config.stacks:
            layers = stacked_part(model, (name,))
            x_BSE, cache = token(layers, x_BSE, at_B, cache, (0, 1), first)
            first += jax.tree.leaves(layers[0])[0].shape[0]
        return x_BSE[:, 0], cache

    def logits(model: Llama, x_BE: jax.Array) -> jax.Array:
        head_EV = model.embedding[...].T if config.tie_embeddings else model.head[...]
        (z_BV,) = sharded_dot(model.norm(x_BE), (head_EV, ("embed", "vocab")), dtype=dtype)
        return soft_capped(hint(z_BV, "batch", "vocab"), config.logit_softcap)

    stack = Stack(config.stacks, embed, prompts, token) if len(config.stacks) == 1 else None
    prepare = _matrices(dtype, weights if isinstance(weights, str) else None)
    return DecoderFns(shapes, prefill, step, logits, config.vocab, prepare=prepare, quantize=quantize, stack=stack)


def quantized_weights(
    config: LlamaConfig,
    bits: int = 8,
    group: int | None = None,
    *,
    targets: Sequence[str] = ("*blocks/*",),
    skip: Sequence[str] = (),
    scales: ScaleDtype = "float32",
) -> QuantizeConfig:
    """Returns how the matrices of a built-in model become integers: by default those of its layers.

    Norms, biases and routers are never quantized: rounding could change the choice of experts. Embedding and head are a
    small part of a large model, and are quantized only as ``targets``.

    Args:
      config: of the model.
      bits, group, targets, skip, scales: as for :class:`jaxpar.compression.QuantizeConfig`.

    >>> from jaxpar.models.llama import preset
    >>> quantized_weights(preset("tiny"), 4, 32).tile(("blocks", "attention", "o"), (2, 4, 16, 64))
    (1, 2, 16, 1)
    """
    layers = any(pattern.endswith("*") for pattern in targets)
    never = ["*norm/scale"] if layers else []
    if layers and hasattr(config, "bias_rate"):  # a model with experts
        never += [_ROUTER, *([_ROUTER_BIAS] if config.bias_rate is not None else [])]
    elif layers and config.qkv_bias:
        never.append("*_bias")
    return QuantizeConfig(tuple(targets), bits, group, CONTRACTING_DIMS, (*never, *skip), scales)


def _prompts(
    config: LlamaConfig, cache_dtype: Any, layers: Any, x_BSE: jax.Array, slots: int, first: int = 0
) -> tuple[jax.Array, Any]:
    """Run full prompts through the layers; return the last activations and the key/value cache in ``cache_dtype``.

    ``first`` is the number of the first of these layers in the model, or in the stage.
    """
    tokens = token_info(jax.lax.broadcasted_iota(jnp.int32, x_BSE.shape[:2], 1), config)
    leaves, block_of = layers
    local, differ = _local_layers(config, leaves, first)

    def layer(x_BSE: jax.Array, layer_input: Any) -> tuple[jax.Array, Any]:
        local, leaves = layer_input
        block: Block = block_of(leaves)
        cache: dict[str, Any] = {}
        here = tokens.of_layer(local if differ else config.local_layers[0])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            cache.update(keys=fill_cache(k, slots, cache_dtype), values=fill_cache(v, slots, cache_dtype))
            return block.attention.attend(q, k, v, here)

        return output_and_scalars(block(x_BSE, here, attend))[0], cache

    return jax.lax.scan(layer, x_BSE, (local, leaves))


def _token(
    config: LlamaConfig, layers: Any, x_BSE: jax.Array, at_B: jax.Array, cache: Any, group: Any, first: int = 0
) -> tuple[jax.Array, Any]:
    """Run one token of each row through the layers; return the last activations and the updated cache.

    ``first`` is the number of the first of these layers in the cache.
    """
    tokens = token_info(at_B[:, None], config)
    leaves, block_of = layers
    local, differ = _local_layers(config, leaves, first)

    def layer(carry: Any, layer_input: Any) -> tuple[Any, None]:
        x_BSE, cache = carry
        number, local, leaves = layer_input
        block, updated = block_of(leaves), dict[str, Any]()
        here = tokens.of_layer(local if differ else config.local_layers[0])
        window: Any = config.sliding_window if config.local_layers[0] else None
        if differ:
            window = jnp.where(local, config.sliding_window or 0, INT32)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            options = {"window": window, **block.attention.score_options}
            o, updated["cache"] = cached_attention(q, k, v, cache, number, at_B, group, **options)
            return o

        y_BSE, _ = output_and_scalars(block(x_BSE, here, attend))
        return (y_BSE, updated["cache"]), None

    numbers = first + jnp.arange(local.shape[0], dtype=jnp.int32)
    # Carry the full cache through the scan: as a stacked output, every step would copy it.
    carry, _ = jax.lax.scan(layer, (x_BSE, cache), (numbers, local, leaves))
    return carry


def _local_layers(config: LlamaConfig, leaves: Any, first: int) -> tuple[jax.Array, bool]:
    """Returns for each of these layers whether it has the sliding window, and whether layers of the model differ.

    Args:
      config: of the model.
      leaves: the arrays of the layers; those of this stage, if stages share the layers.
      first: the number of the first of them in the model, or in the stage.
    """
    count = jax.tree.leaves(leaves)[0].shape[0]
    layers, differ = jnp.asarray(config.local_layers), len(set(config.local_layers)) > 1
    if AXIS in jax.sharding.get_abstract_mesh().manual_axes:
        first = first + jax.lax.axis_index(AXIS) * count
        if differ and axes_of(current_layout(), "seq"):
            raise ConfigError(
                f"generate: {AXIS} stages run layers with and without a sliding window at the same time, but the rule "
                "for 'seq' shards the prompts, and attention then sends keys. Remedy: seq: null for generation."
            )
    return jax.lax.dynamic_slice_in_dim(layers, first, count), differ


def _matrices(dtype: Any, weight_dtype: str | None) -> Callable[[Any], Any]:
    """Returns a function that casts parameters to the compute dtype, or quantizes them to int8."""

    def convert(path: Any, x: Any) -> Any:
        if isinstance(x, QuantizedArray):
            return x
        name = path[-1].key
        if "norm" in jax.tree_util.keystr(path) or name == _ROUTER_BIAS:
            return x
        if weight_dtype is None or name == _ROUTER or name.endswith("bias"):
            return x.astype(dtype)
        return Int8.of(x, CONTRACTING_DIMS[name])

    return lambda params: jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_quantized)
