"""Post-training quantization: weights in int8 or int4, chosen by patterns of their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxpar.errors import ConfigError
from jaxpar.parallel.precision.quantized_array import (
    QuantizedArray,
    Tile,
    is_quantized,
    quantize_array,
    quantize_sharded,
)
from jaxpar.sharding.rules import Axes
from jaxpar.training.model import Path, leaves_with_paths, map_with_paths, show
from jaxpar.training.model.quantize_targets import QuantizeConfig, find_tiles
from jaxpar.utils.arrays import item_bytes


def quantize(params: Any, config: QuantizeConfig) -> Any:
    """Returns parameters of which some are integers with scales.

    Each device reads its own shards. Scales are sharded like their parameters, along the dims that they keep; where
    groups lie across shards, the devices along that dim have equal scales. All values are equal in every layout.

    Args:
      params: any pytree of arrays, such as ``state.params``, Linen variables or an ``nnx.State``.
      config: which parameters, and how.

    Returns:
      The pytree with a :class:`jaxpar.compression.QuantizedArray` in place of each chosen array.

    Raises:
      ConfigError: a pattern matches no matrix; a group does not divide a parameter's inputs; or a parameter is
        quantized already.

    >>> import jax.numpy as jnp
    >>> params = {"mlp": {"up": jnp.ones((64, 8)), "bias": jnp.ones(8)}}
    >>> made = quantize(params, QuantizeConfig(("mlp/*",), bits=4, group=32))
    >>> made["mlp"]["up"].values.dtype.name, made["mlp"]["up"].scales.shape, made["mlp"]["bias"].shape
    ('int4', (2, 8), (8,))
    """
    leaves = {_without_value(path): leaf for path, leaf in leaves_with_paths(params, is_leaf=is_quantized)}
    tiles = find_tiles(config, {path: tuple(leaf.shape) for path, leaf in leaves.items()})
    chosen = {path: leaf for path, leaf in leaves.items() if path in tiles}
    for path, leaf in chosen.items():
        if is_quantized(leaf):
            raise ConfigError(
                f"quantize: {show(path)} {list(leaf.shape)} is quantized already. Remedy: jp.compression.dequantize."
            )
    made = quantize_leaves(chosen, tiles, config)
    return map_with_paths(lambda path, leaf: made.get(_without_value(path), leaf), params, is_leaf=is_quantized)


def quantize_leaves(
    leaves: Mapping[Path, Any], tiles: Mapping[Path, Tile], config: QuantizeConfig
) -> dict[Path, QuantizedArray]:
    """Returns these parameters as integers; inside of a jitted function the compiler decides what it gathers."""
    options: dict[str, Any] = {"bits": config.bits, "scales": jnp.dtype(config.scales)}
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves.values()):
        return {path: quantize_array(leaf, tiles[path], **options) for path, leaf in leaves.items()}
    shards = {path: _shards(leaf) for path, leaf in leaves.items()}

    def run(arrays: list[Any]) -> list[QuantizedArray]:
        made = []
        for path, x in zip(leaves, arrays, strict=True):
            if (found := shards[path]) is None:
                made.append(quantize_array(x, tiles[path], **options))
            else:
                made.append(quantize_sharded(x, tiles[path], found[1], found[0], **options))
        return made

    return dict(zip(leaves, jax.jit(run)(list(leaves.values())), strict=True))


def dequantize(params: Any, dtype: Any = None) -> Any:
    """Returns parameters with the array that each :class:`QuantizedArray` stands for.

    Args:
      params: as :func:`quantize` returns them.
      dtype: of these arrays; by default that of their scales.
    """
    one = lambda x: x.astype(dtype or x.scales.dtype) if is_quantized(x) else x
    return jax.jit(lambda tree: jax.tree.map(one, tree, is_leaf=is_quantized))(params)


def bytes_of(params: Any) -> int:
    """Returns the bytes of all arrays of a pytree over all devices, without copies; an int4 has half a byte.

    >>> import jax.numpy as jnp
    >>> bytes_of(quantize({"w": jnp.ones((64, 8))}, QuantizeConfig(("w",), bits=4, group=32)))
    320
    """
    return int(sum(leaf.size * item_bytes(leaf.dtype) for leaf in jax.tree.leaves(params)))


def _shards(leaf: Any) -> tuple[Mesh, tuple[Axes, ...]] | None:
    """Returns the mesh of an array, and the axes that shard each dim; ``None`` if it is not sharded over a mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or sharding.mesh.size == 1:
        return None
    entries = [*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec))]
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    return sharding.mesh, tuple(axes)


def _without_value(path: Path) -> Path:
    """Returns the path of a parameter; a variable of NNX adds one step to it."""
    return path[:-1] if len(path) > 1 and path[-1] == "value" else path
