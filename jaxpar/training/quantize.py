"""Post-training quantization: weights in int8 or int4, chosen by patterns of their paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
from jaxpar.training.model import Path, leaves_with_paths, show
from jaxpar.training.model.lora_targets import matches, no_match
from jaxpar.utils.arrays import item_bytes
from jaxpar.utils.checks import is_count

type InputDims = int | tuple[int, ...]
"""The dims that a product sums over, counted from the end."""
type ScaleDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class QuantizeConfig:
    """Which weights become integers, and which of their numbers share a scale.

    Attributes:
      targets: patterns of the parameters' paths, as for :class:`jaxpar.lora.LoraConfig`; vectors are never quantized.
      bits: 8 or 4.
      group: how many neighboring inputs share a scale; ``None``: all inputs of an output channel.
      axis: the dims that the product sums over, counted from the end: a number, several, or pattern → these. By
        default the last but one, which is that of a kernel ``[inputs, outputs]``.
      skip: patterns of parameters that are not quantized although they are targets.
      scales: the dtype of the scales.

    Raises:
      ConfigError: a value is out of range.

    >>> QuantizeConfig(("mlp/*",), bits=4, group=32).tile(("mlp", "up"), (8, 256, 512))
    (1, 32, 1)
    """

    targets: tuple[str, ...]
    bits: int = 8
    group: int | None = None
    axis: InputDims | Mapping[str, InputDims] = -2
    skip: tuple[str, ...] = ()
    scales: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        for name, value, least in (("targets", self.targets, 1), ("skip", self.skip, 0)):
            if isinstance(value, str) or len(value) < least or not all(isinstance(pattern, str) for pattern in value):
                raise ConfigError(
                    f"quantize: {name} must be a list of patterns, got {value!r}. Remedy: {name}: [attention/*, mlp/*]."
                )
        if self.bits not in (4, 8):
            raise ConfigError(f"quantize: bits must be 8 or 4, got {self.bits!r}. Remedy: bits: 8.")
        if self.group is not None and not is_count(self.group):
            raise ConfigError(
                f"quantize: group must be an integer of at least 1, got {self.group!r}. Remedy: group: 32."
            )
        if self.scales not in get_args(ScaleDtype.__value__):
            raise ConfigError(f"quantize: scales must be float32 or bfloat16, got {self.scales!r}.")

    def tile(self, path: Path, shape: tuple[int, ...]) -> Tile:
        """Returns how many neighbors share a scale along each dim of a parameter.

        Raises:
          ConfigError: ``group`` does not divide its inputs, or it lacks the dims of ``axis``.
        """
        dims = self._inputs(path, shape)
        tile, rest = [1] * len(shape), self.group
        for dim in reversed(dims):
            size = shape[dim]
            step = size if rest is None or rest >= size else rest
            if (rest is not None and rest % step) or size % step:
                raise self._indivisible(path, shape, dims)
            tile[dim], rest = step, None if rest is None else rest // step
        if rest is not None and rest > 1:
            raise self._indivisible(path, shape, dims)
        return tuple(tile)

    def _inputs(self, path: Path, shape: tuple[int, ...]) -> list[int]:
        found = self.axis
        if isinstance(found, Mapping):
            found = next((dims for pattern, dims in found.items() if matches(path, pattern)), -2)
        given = (found,) if isinstance(found, int) else tuple(found)
        dims = sorted({dim % len(shape) for dim in given if -len(shape) <= dim < len(shape)})
        if not dims or len(dims) != len(given):
            raise ConfigError(
                f"quantize: {show(path)} {list(shape)}: axis must be one or more of its {len(shape)} dims, each once, "
                f"got {list(given)}. Remedy: axis: the dims that the product sums over."
            )
        return dims

    def _indivisible(self, path: Path, shape: tuple[int, ...], dims: list[int]) -> ConfigError:
        inputs = " x ".join(str(shape[dim]) for dim in dims)
        return ConfigError(
            f"quantize: {show(path)} {list(shape)}: groups of {self.group} do not divide its {inputs} inputs (axis "
            f"{[dim - len(shape) for dim in dims]}). Remedy: a group that divides them, or skip: [{show(path)}]."
        )


def find_tiles(config: QuantizeConfig, shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, Tile]:
    """Returns the parameters to quantize, and for each how many neighbors share a scale.

    Raises:
      ConfigError: a pattern matches no matrix, or a parameter has no such groups.
    """
    chosen: dict[Path, None] = {}
    for target in config.targets:
        found = [path for path, shape in shapes.items() if len(shape) > 1 and matches(path, target)]
        if not found:
            raise ConfigError(f"quantize: {no_match('targets', target, shapes)}")
        chosen |= dict.fromkeys(found)
    for pattern in config.skip:
        if not any(matches(path, pattern) for path in shapes):
            raise ConfigError(f"quantize: {no_match('skip', pattern, shapes)}")
    kept = [path for path in chosen if not any(matches(path, pattern) for pattern in config.skip)]
    return {path: config.tile(path, shapes[path]) for path in kept}


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
    leaves = [(_without_value(path), leaf) for path, leaf in leaves_with_paths(params, is_leaf=is_quantized)]
    _check_floats(leaves)
    tiles = find_tiles(config, {path: tuple(leaf.shape) for path, leaf in leaves})
    chosen = {path: leaf for path, leaf in leaves if path in tiles}
    made = quantize_leaves(chosen, tiles, config)
    structure = jax.tree.structure(params, is_leaf=is_quantized)
    return jax.tree.unflatten(structure, [made.get(path, leaf) for path, leaf in leaves])


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


def _check_floats(leaves: Iterable[tuple[Path, Any]]) -> None:
    for path, leaf in leaves:
        if is_quantized(leaf):
            raise ConfigError(
                f"quantize: {show(path)} {list(leaf.shape)} is quantized already. Remedy: jp.compression.dequantize."
            )
