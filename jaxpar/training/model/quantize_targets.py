"""Which weights of a model become integers, and which of their numbers share a scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from jaxpar.errors import ConfigError
from jaxpar.parallel.precision.quantized_array import Tile
from jaxpar.training.model.lora_targets import matches, matching
from jaxpar.training.model.matrices import find_weights
from jaxpar.training.model.parts import Path, show
from jaxpar.utils.checks import is_count

type InputDims = int | tuple[int, ...]
"""The dims that a product sums over, counted from the end."""
type ScaleDtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class QuantizeConfig:
    """Which weights become integers, and which of their numbers share a scale.

    Attributes:
      targets: patterns of the parameters' paths, as for :class:`jaxpar.lora.LoraConfig`. Vectors are never quantized,
        and paths that end in ``bias`` or ``scale`` only by a target that matches no other parameter of several dims.
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
    axis: InputDims | Mapping[str, InputDims] = field(default=-2, hash=False)
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
    matrices, _ = find_weights(shapes, {})
    for target in config.targets:
        matched = matching("quantize: targets", target, shapes, least_dims=2)
        chosen |= dict.fromkeys([path for path in matched if path in matrices] or matched)
    skipped = {path for pattern in config.skip for path in matching("quantize: skip", pattern, shapes)}
    return {path: config.tile(path, shapes[path]) for path in chosen if path not in skipped}
