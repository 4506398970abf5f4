"""Which weights of a model get low-rank adapters, and the shapes of these."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, listing
from jaxpar.sharding.names import LAYERS, Names
from jaxpar.training.model.parts import Path, show
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.checks import is_count

STACKED = (LAYERS, "dense_layers", "experts")
"""Logical dims along which a parameter holds separate weights, such as matrices with an adapter each."""


@dataclass(frozen=True)
class LoraConfig:
    """Which weights get adapters, and of which rank.

    Attributes:
      rank: the rank of the adapters.
      alpha: the product of an adapter is multiplied by ``alpha / rank``.
      targets: patterns of the weights' paths, with ``*`` and ``?``; a pattern may begin anywhere in a path, after a
        slash: ``attention/q`` is ``blocks/attention/q``.
      inputs: pattern → the number of dims that the weight sums over, where it is not found: by default the number with
        which the adapter is smallest.

    Raises:
      ConfigError: the rank is below 1, ``alpha`` is not above 0, or there are no targets.

    >>> LoraConfig(rank=4, alpha=8, targets=("attention/q",)).scale
    2.0
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)
    inputs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise ConfigError(f"lora: rank must be an integer of at least 1, got {self.rank!r}. Remedy: rank: 8.")
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha < math.inf):
            raise ConfigError(f"lora: alpha must be a number above 0, got {self.alpha!r}. Remedy: alpha: 16.")
        if isinstance(self.targets, str) or not self.targets or not all(isinstance(t, str) for t in self.targets):
            raise ConfigError(
                f"lora: targets must be a list of patterns, got {self.targets!r}. Remedy: targets: [attention/q], or "
                "['*'] for all weights."
            )

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight.

    Attributes:
      path: of the weight in the parameters.
      shape: of the weight.
      stacked: the number of its first dims along which it holds separate weights.
      inputs: the number of the following dims, which it sums over.
    """

    path: Path
    shape: tuple[int, ...]
    stacked: int
    inputs: int

    @property
    def middle(self) -> int:
        """The number of dims before those of the outputs."""
        return self.stacked + self.inputs

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of ``lora_a`` and ``lora_b``."""
        return (*self.shape[: self.middle], rank), (*self.shape[: self.stacked], rank, *self.shape[self.middle :])

    def names(self, names: Names) -> tuple[Names, Names]:
        """Returns the logical dims of ``lora_a`` and ``lora_b``, from those of the weight."""
        return (*names[: self.middle], None), (*names[: self.stacked], None, *names[self.middle :])

    def labels(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns a label for each dim of ``lora_a`` and ``lora_b``: the weight's dim, or ``rank``."""
        dims = tuple(range(len(self.shape)))
        return (*dims[: self.middle], rank), (*dims[: self.stacked], rank, *dims[self.middle :])

    def product(self, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
        """Returns what the adapter adds to the weight, in fp32 or wider."""
        dims = tuple(range(len(self.shape)))
        ours, theirs = self.labels(len(dims))
        return scale * jnp.einsum(at_least_fp32(a), ours, at_least_fp32(b), theirs, dims)


def find_adapters(
    config: LoraConfig, shapes: Mapping[Path, tuple[int, ...]], names: Mapping[Path, Names | None]
) -> Iterator[Adapter]:
    """Yields the adapters of a model's weights.

    Args:
      config: rank and targets.
      shapes: the shapes of the parameters, by path.
      names: their logical dims.

    Raises:
      ConfigError: as for :func:`adapt`.
    """
    stacked = {path: stacked_dims(names[path], shape) for path, shape in shapes.items()}
    chosen: dict[Path, None] = {}
    for pattern in config.targets:
        matched = matching("lora: targets", pattern, shapes)
        fitting = [path for path in matched if len(shapes[path]) - stacked[path] >= 2]
        if not fitting:
            first = matched[0]
            raise ConfigError(
                f"lora: targets: {pattern!r} matches only vectors, such as {show(first)} {list(shapes[first])}, which "
                "have no adapters. Remedy: patterns of weights with inputs and outputs."
            )
        chosen |= dict.fromkeys(fitting)
    for pattern in config.inputs:
        matching("lora: inputs", pattern, {path: shapes[path] for path in chosen})
    for path in shapes:
        if path in chosen:
            inputs = input_dims("lora", config.inputs, path, shapes[path], stacked[path], names[path])
            yield Adapter(path, shapes[path], stacked[path], inputs)


def matches(path: Path, pattern: str) -> bool:
    """Whether a pattern matches a path, or its end after a slash.

    >>> matches(("blocks", "attention", "q"), "attention/?"), matches(("blocks", "mlp", "up"), "lp/up")
    (True, False)
    """
    text = show(path)
    return fnmatch.fnmatchcase(text, pattern) or fnmatch.fnmatchcase(text, f"*/{pattern}")


def stacked_dims(names: Names | None, shape: tuple[int, ...], stacked: Collection[str] = STACKED) -> int:
    """Returns the number of first dims of a parameter along which it holds separate weights.

    >>> stacked_dims(("layers", "experts", "embed", "mlp"), (2, 4, 8, 16))
    2
    """
    count = 0
    while names is not None and len(names) == len(shape) and count < len(shape) and names[count] in stacked:
        count += 1
    return count


def input_dims(
    key: str,
    inputs: Mapping[str, int],
    path: Path,
    shape: tuple[int, ...],
    stacked: int,
    names: Names | None = None,
) -> int:
    """Returns the number of dims, after the stacked ones, that a weight sums over.

    Without a pattern it is the number with which inputs and outputs are of the most equal sizes, which is right for a
    projection between a model's width and its heads, and for a convolution. Dims that are named as heads and their
    ``head_dim`` are on the same side, which sizes alone cannot tell of a narrow model.

    Args:
      key: the beginning of the error.
      inputs: pattern → number.
      path, shape: of the weight.
      stacked: the number of its stacked dims.
      names: its logical dims.

    Raises:
      ConfigError: the number leaves no dim for inputs or outputs.

    >>> input_dims("lora", {}, ("attention", "o"), (3, 4, 8, 32), 1)
    2
    >>> [input_dims("lora", {}, ("kv_up",), (4, 2, 32), 0, x) for x in (None, ("latent", "heads", "head_dim"))]
    [2, 1]
    """
    dims = shape[stacked:]
    given = next((count for pattern, count in inputs.items() if matches(path, pattern)), None)
    if given is None:
        known = names if names is not None and len(names) == len(shape) else (None,) * len(shape)
        every = range(1, len(dims))
        splits = [n for n in every if not _is_within_heads(known, stacked + n)] or every
        return min(splits, key=lambda n: math.prod(dims[:n]) + math.prod(dims[n:]))
    if not is_count(given) or given >= len(dims):
        raise ConfigError(
            f"{key}: inputs of {show(path)} {list(shape)} must be from 1 to {len(dims) - 1}, the number of dims that "
            f"it sums over, got {given!r}."
        )
    return given


def _is_within_heads(names: Names, at: int) -> bool:
    """Whether the dims before and at ``at`` are heads and the numbers of each."""
    return names[at] == "head_dim" and (names[at - 1] or "").endswith("heads")


def matching(key: str, pattern: str, shapes: Mapping[Path, tuple[int, ...]], least_dims: int = 0) -> list[Path]:
    """Returns the paths that a pattern matches.

    Args:
      key: of the pattern, for the error.
      pattern: the pattern.
      shapes: of the parameters, by path.
      least_dims: of the parameters that count.

    Raises:
      ConfigError: the pattern matches nothing; with the nearest paths.
    """
    found = [path for path, shape in shapes.items() if len(shape) >= least_dims and matches(path, pattern)]
    if not found:
        ends = {"/".join(path[i:]): show(path) for path in shapes for i in range(len(path))}
        near = [ends[end] for end in difflib.get_close_matches(pattern, ends, n=6, cutoff=0.4)]
        nearest = list(dict.fromkeys(near))[:3] or [show(path) for path in shapes][:3]
        raise ConfigError(
            f"{key}: no weight matches {pattern!r}. The nearest are {listing(nearest)}. Remedy: one of these."
        )
    return found
