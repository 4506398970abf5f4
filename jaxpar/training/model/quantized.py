"""Quantization-aware training: a model that computes with rounded weights, and trains the weights before rounding.

After Jacob et al. 2018 (arXiv:1712.05877). Every step rounds the weights to integers times scales, as
:func:`jaxpar.compression.quantize` does, and the gradient passes straight through the rounding. State, optimizer and
checkpoints hold the weights before rounding, under the same paths as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.parallel.precision.quantized_array import Tile, is_quantized, round_straight_through
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.model.parts import Kind, MakeModel, ModelParts, Path, leaves_with_paths, map_with_paths
from jaxpar.training.model.quantize_targets import QuantizeConfig, find_tiles


def quantize_aware(make_model: MakeModel, config: QuantizeConfig) -> QuantizeAware:
    """Returns a ``make_model`` of the same model, some of whose weights are rounded to integers times scales.

    Works with :func:`jaxpar.train_step` and :func:`jaxpar.eval_step` in any layout, with microbatches, ZeRO, remat and
    pipelines. ``state.params`` are the weights before rounding; :func:`jaxpar.compression.quantize` with the same
    configuration gives the integers that the model computes with. ``state.model`` and ``loss_fn`` have the rounded
    weights.

    Args:
      make_model: as for :func:`jaxpar.init`.
      config: which weights, and how many bits.

    Raises (when the model is built):
      ConfigError: a pattern matches no matrix, or a group does not divide a weight's inputs.
      ModelError: the model has adapters or is rounded already.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data", mlp=None))
    >>> config = QuantizeConfig(("w",), bits=4, group=8)
    >>> state = jp.init(layout, quantize_aware(make_model, config), optax.sgd(0.1))
    >>> len({float(x) for x in abs(state.model["w"][:8, 0])}) <= 8
    True
    """
    return QuantizeAware(make_model, config)


@dataclass(frozen=True)
class QuantizeAware:
    """The function of a PRNG key that :func:`quantize_aware` returns."""

    make_model: MakeModel
    config: QuantizeConfig

    def __call__(self, key: jax.Array) -> RoundedModel:
        return RoundedModel(self.make_model(key), self.config)


@dataclass(frozen=True)
class RoundedModel:
    """A model, and which of its weights are to be rounded."""

    model: Any
    config: QuantizeConfig


@dataclass(frozen=True)
class RoundedKind:
    """A model whose weights are rounded before it is put together.

    Attributes:
      kind: of the model itself.
      tiles: the rounded weights, and how many neighbors share a scale along each of their dims.
      bits: of the integers.
      scales: the dtype of the scales.
    """

    kind: Kind
    tiles: tuple[tuple[Path, Tile], ...]
    bits: int
    scales: str

    def merge(self, params: Any, variables: Any) -> Any:
        plain = lambda w: is_quantized(w) or isinstance(w, jax.ShapeDtypeStruct)
        one = lambda w, tile, **how: w if plain(w) else round_straight_through(w, tile, **how)
        return self.kind.merge(self.rounded(params, lambda _, *given, **how: one(*given, **how)), variables)

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        return self.kind.carried(model, variables, updates)

    def rounded(self, params: Any, round_one: Callable[..., jax.Array]) -> Any:
        """Returns the parameters with ``round_one(path, w, tile, bits=, scales=)`` in place of each such weight."""
        tiles, how = dict(self.tiles), {"bits": self.bits, "scales": jnp.dtype(self.scales)}
        one = lambda path, w: round_one(path, w, tiles[path], **how) if path in tiles else w
        return map_with_paths(one, params, is_leaf=is_quantized)


def rounded_parts(model: RoundedModel, parts: ModelParts) -> ModelParts:
    """Returns the parts of a model with rounded weights.

    Raises:
      ConfigError, ModelError: as for :func:`quantize_aware`.
    """
    if isinstance(parts.kind, LoraKind | RoundedKind):
        why = "has adapters, and its weights are frozen" if isinstance(parts.kind, LoraKind) else "is rounded already"
        raise ModelError(f"quantize_aware(make_model): the model {why}. Remedy: pass the make_model without that.")
    config = model.config
    tiles = find_tiles(config, {path: tuple(leaf.shape) for path, leaf in leaves_with_paths(parts.params)})
    return replace(parts, kind=RoundedKind(parts.kind, tuple(tiles.items()), config.bits, config.scales))
