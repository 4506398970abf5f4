"""Low-rank adapters (LoRA): a model whose weights are frozen, and a trained pair of small matrices beside some of them.

After Hu et al. 2021 (arXiv:2106.09685). The adapters are the parameters of the adapted model; the weights are carried,
so that they have neither gradients nor optimizer state. A weight is ``[*stacked, *inputs, *outputs]``. Its adapter is
``lora_a`` ``[*stacked, *inputs, rank]`` and ``lora_b`` ``[*stacked, rank, *outputs]``, sharded by the rules of the same
dims; the dim ``rank`` has no name.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.sharding.names import Names
from jaxpar.training.model.lora_targets import Adapter, LoraConfig, find_adapters
from jaxpar.training.model.parts import (
    FROZEN,
    Kind,
    MakeModel,
    ModelParts,
    Path,
    leaves_with_paths,
    map_with_paths,
    show,
)
from jaxpar.utils.arrays import at_least_fp32

A, B, CARRIED = "lora_a", "lora_b", "carried"
"""The names of an adapter's two arrays, and of the variables that the model itself carries."""
_ENTRIES = {"params": FROZEN, "variables": CARRIED}
"""Where the variables hold the two parts of the model without adapters."""


def adapt(make_model: MakeModel, config: LoraConfig) -> LoraModel:
    """Returns a ``make_model`` of the same model, whose weights are frozen and some of which have adapters.

    Its parameters are the adapters: ``lora_a`` is random, ``lora_b`` is 0, so the model computes what it did before.
    ``loss_fn`` receives the model itself, whatever it is: an NNX module, Linen variables or a pytree.

    Args:
      make_model: as for :func:`jaxpar.init`.
      config: rank and targets.

    Raises (when the model is built):
      ConfigError: a pattern matches no weight of two dims or more, or ``inputs`` do not fit a weight.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data", mlp=None))
    >>> state = jp.abstract_state(layout, adapt(make_model, LoraConfig(rank=2, targets=("w",))), optax.adam(1e-3))
    >>> {name: (x.shape, x.sharding.spec) for name, x in state.params["w"].items()}
    {'lora_a': ((16, 2), P('data', None)), 'lora_b': ((2, 4), P(None, None))}
    """
    return LoraModel(make_model, config)


@dataclass(frozen=True)
class LoraModel:
    """The function of a PRNG key that :func:`adapt` returns."""

    make_model: MakeModel
    config: LoraConfig

    def __call__(self, key: jax.Array) -> AdaptedModel:
        return AdaptedModel(self.make_model(key), self.config, key)


@dataclass(frozen=True)
class AdaptedModel:
    """A model, and the adapters that it is to have, whose initial values depend on ``key``."""

    model: Any
    config: LoraConfig
    key: jax.Array


@dataclass(frozen=True)
class LoraKind:
    """A model with adapters.

    Attributes:
      kind: of the model without adapters.
      adapters: of its weights.
      scale: the factor of their products.
      dims: the names of the model's own leaves, by path.
    """

    kind: Kind
    adapters: tuple[Adapter, ...]
    scale: float
    dims: tuple[tuple[Path, Names], ...]

    def merge(self, params: Any, variables: Any) -> Any:
        return self.kind.merge(self.merged(params, variables), variables[CARRIED])

    def carried(self, model: Any, variables: Any, updates: Any) -> Any:
        return {**variables, CARRIED: self.kind.carried(model, variables[CARRIED], updates)}

    def merged(self, params: Any, variables: Any) -> Any:
        """Returns the weights with the products of their adapters added."""
        pairs = {adapter.path: (adapter, *adapter_of(params, adapter)) for adapter in self.adapters}

        def one(path: Path, w: jax.Array) -> jax.Array:
            if path not in pairs:
                return w
            adapter, a, b = pairs[path]
            return (at_least_fp32(w) + adapter.product(a, b, self.scale)).astype(w.dtype)

        return map_with_paths(one, variables[FROZEN])


def adapter_of(params: Any, adapter: Adapter) -> tuple[Any, Any]:
    """Returns ``lora_a`` and ``lora_b`` of a weight, from the parameters of an adapted model."""
    for name in adapter.path:
        params = params[name]
    return params[A], params[B]


def adapted_parts(model: AdaptedModel, parts: ModelParts) -> ModelParts:
    """Returns the parts of a model with adapters: these are trained, everything else is carried.

    Raises:
      ConfigError: as for :func:`adapt`.
      ModelError: the model has adapters already.
    """
    if isinstance(parts.kind, LoraKind):
        raise ModelError("adapt(make_model): the model has adapters already. Remedy: adapt it once.")
    if hasattr(parts.kind, "tiles"):
        raise ModelError(
            "adapt(make_model): the model's weights are rounded. Remedy: adapt the model without rounding."
        )
    config, dims = model.config, dict(parts.dims)
    leaves = {path: leaf for path, leaf in leaves_with_paths(parts.params)}
    names = {path: dims.get(("params", *path)) for path in leaves}
    adapters = tuple(find_adapters(config, {path: tuple(leaf.shape) for path, leaf in leaves.items()}, names))
    params: dict[str, Any] = {}
    named = {("variables", _ENTRIES[path[0]], *path[1:]): own for path, own in parts.dims}
    for adapter in adapters:
        table = params
        for name in adapter.path:
            table = table.setdefault(name, {})
        table |= zip((A, B), _initial(adapter, config, leaves[adapter.path].dtype, model.key), strict=True)
        own = names[adapter.path]
        if own is not None:
            paths = (("params", *adapter.path, name) for name in (A, B))
            named |= zip(paths, adapter.names(own), strict=True)
    kind = LoraKind(parts.kind, adapters, config.scale, parts.dims)
    variables = {FROZEN: parts.params, CARRIED: parts.variables}
    return replace(parts, params=params, variables=variables, dims=tuple(named.items()), kind=kind)


def _initial(adapter: Adapter, config: LoraConfig, dtype: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``lora_a``, uniform with a bound of 1 / sqrt(number of inputs) as in PEFT, and ``lora_b`` of zeros."""
    a, b = adapter.shapes(config.rank)
    # Not narrower than fp32: an update of 1e-4 of an adapter in bf16 would round away.
    dtype = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    bound = 1 / math.sqrt(math.prod(adapter.shape[adapter.stacked : adapter.middle]))
    own = jax.random.fold_in(key, zlib.crc32(show(adapter.path).encode()))
    return (bound * jax.random.uniform(own, a, jnp.float32, -1, 1)).astype(dtype), jnp.zeros(b, dtype)
