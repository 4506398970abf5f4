"""Pruning as an optimizer: weights of small magnitude become 0 and stay 0, by masks in the optimizer's state.

The masks are arrays of the state like moments, so they are sharded like their parameters, and checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import ConfigError
from jaxpar.training.model import Path, leaves_with_paths, map_with_paths, show
from jaxpar.training.model.lora_targets import matches, matching
from jaxpar.training.model.matrices import find_weights
from jaxpar.training.optimizers import accepted
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.checks import is_count
from jaxpar.utils.contexts import param_dims


@dataclass(frozen=True)
class PruneConfig:
    """Which weights are pruned, how many of their numbers, and when.

    Attributes:
      sparsity: the fraction of the numbers of each parameter that end as 0, those of the smallest magnitude.
      pattern: instead, ``(n, m)`` keeps the n largest of each m neighbours along ``axis``, such as (2, 4).
      targets: patterns of the parameters' paths, as for :class:`jaxpar.lora.LoraConfig`. Vectors are never pruned, nor
        are stacks of them: a dim of layers or experts does not count. Biases and scales of several dims (by their
        logical dims, or a path that ends in ``bias`` or ``scale``) are pruned only by a target that matches no matrix.
      axis: with ``pattern`` the dim of the neighbours, the one that the product sums over: a number, or pattern →
        number. By default the last but one.
      begin: the step after which the first numbers are pruned.
      end: the step after which the masks stay. In between the sparsity grows as 1 - (1 - t)**3 (Zhu & Gupta 2017,
        arXiv:1710.01878); a ``pattern`` holds from ``begin`` on.
      every: steps between two changes of the masks.

    Raises:
      ConfigError: a number is out of range, or both or none of ``sparsity`` and ``pattern`` are given.
    """

    sparsity: float | None = None
    pattern: tuple[int, int] | None = None
    targets: tuple[str, ...] = ("*",)
    axis: int | Mapping[str, int] = field(default=-2)
    begin: int = 0
    end: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if (self.sparsity is None) is (self.pattern is None):
            raise ConfigError("prune: give either sparsity or pattern. Remedy: sparsity: 0.5, or pattern: [2, 4].")
        if self.sparsity is not None and not 0 < self.sparsity < 1:
            raise ConfigError(f"prune: sparsity must be between 0 and 1, got {self.sparsity!r}. Remedy: sparsity: 0.5.")
        if self.pattern is not None:
            valid = len(self.pattern) == 2 and all(map(is_count, self.pattern)) and self.pattern[0] < self.pattern[1]
            if not valid:
                raise ConfigError(
                    f"prune: pattern must be two numbers n < m, got {list(self.pattern)}. Remedy: pattern: [2, 4]."
                )
        if not (is_count(self.begin, 0) and is_count(self.end, 0) and self.begin <= self.end and is_count(self.every)):
            raise ConfigError(
                f"prune: begin, end and every must be steps with 0 <= begin <= end and every >= 1, got {self.begin}, "
                f"{self.end} and {self.every}."
            )


class PruneState(NamedTuple):
    """The state of :func:`prune`.

    Attributes:
      count: number of steps.
      masks: a tree like the parameters: true where a number is kept; ``optax.MaskedNode`` for those never pruned.
      inner: the state of the optimizer.
    """

    count: Any
    masks: Any
    inner: Any


def prune(tx: optax.GradientTransformation, config: PruneConfig) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that also prunes: after each update, masked numbers are exactly 0.

    The numbers of a parameter are ordered by magnitude, and equal ones by index, and the first of them are pruned.
    Where they end is found by counting, digit by digit of magnitude and index. So no device needs more than its own
    shard, and the masks are equal in every layout.

    Args:
      tx: any optimizer.
      config: what is pruned, and when.

    Raises (when initialized):
      ConfigError: a target matches no matrix, or m of ``pattern`` does not divide a parameter's dim ``axis``.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.array([[1.0, -4.0], [3.0, 2.0]])}
    >>> tx = prune(optax.sgd(0.0), PruneConfig(sparsity=0.5))
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["w"].tolist(), sparsity_of(state)
    ([[0.0, -4.0], [3.0, 0.0]], {'w': 0.5})
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> PruneState:
        targets = _targets(config, params)
        mask = lambda path, w: jnp.ones(jnp.shape(w), bool) if path in targets else optax.MaskedNode()
        return PruneState(jnp.zeros((), jnp.int32), map_with_paths(mask, params), tx.init(params))

    def update(updates: Any, state: PruneState, params: Any = None, **extra: Any) -> tuple[Any, PruneState]:
        if params is None:
            raise ConfigError("prune: the update needs the parameters. Remedy: tx.update(grads, state, params).")
        updates, inner = tx.update(updates, state.inner, params, **accepted(tx, extra))
        steps = state.count - config.begin
        due = (steps >= 0) & (state.count <= config.end) & (steps % config.every == 0)
        span = max(1, config.end - config.begin)
        share = jnp.where(config.end > config.begin, jnp.clip(steps / span, 0, 1), 1.0)
        sparsity = (config.sparsity or 0.0) * (1 - (1 - share) ** 3)

        def one(path: Path, w: jax.Array, change: jax.Array, mask: Any) -> tuple[jax.Array, Any]:
            if _is_masked(mask):
                return change, mask
            after = optax.apply_updates(w, change)
            mask = jax.lax.cond(due, lambda: _mask(config, path, after, sparsity), lambda: mask)
            return jnp.where(mask, change, -w.astype(change.dtype)), mask

        masks = jax.tree.leaves(state.masks, is_leaf=_is_masked)
        rows = zip(leaves_with_paths(params), jax.tree.leaves(updates), masks, strict=True)
        pairs = [one(path, w, change, mask) for (path, w), change, mask in rows]
        build = lambda leaves: jax.tree.unflatten(jax.tree.structure(params), leaves)
        changes, masks = (build([pair[i] for pair in pairs]) for i in range(2))
        return changes, PruneState(state.count + 1, masks, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def sparsity_of(state: PruneState) -> dict[str, float]:
    """Returns the fraction of zeros of each pruned parameter, by path, from the state of :func:`prune`."""
    return {show(path): float((~mask).mean()) for path, mask in leaves_with_paths(state.masks)}


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _targets(config: PruneConfig, params: Any) -> set[Path]:
    """Returns the pruned parameters."""
    shapes = {path: tuple(jnp.shape(w)) for path, w in leaves_with_paths(params)}
    names = {path[1:]: dims for path, dims in param_dims.value if path[0] == "params"}
    matrices, biases = map(set, find_weights(shapes, names))
    targets: set[Path] = set()
    for target in config.targets:
        matched = set(matching("prune: targets", target, shapes))
        if not (chosen := matched & matrices or matched & biases):
            first = min(matched)
            raise ConfigError(
                f"prune: targets: {target!r} matches only vectors, such as {show(first)} {list(shapes[first])}, which "
                "are never pruned. Remedy: patterns of weights with inputs and outputs."
            )
        targets |= chosen
    if config.pattern is not None:
        for path in sorted(targets):
            _axis(config, path, shapes[path])
    return targets


def _axis(config: PruneConfig, path: Path, shape: tuple[int, ...]) -> int:
    """Returns the dim of the neighbours of a ``pattern``."""
    axis = config.axis
    if not isinstance(axis, int):
        axis = next((number for pattern, number in axis.items() if matches(path, pattern)), -2)
    assert config.pattern is not None
    if not -len(shape) <= axis < len(shape) or shape[axis] % config.pattern[1]:
        raise ConfigError(
            f"prune: {show(path)} {list(shape)}: groups of {config.pattern[1]} must divide its dim {axis}. Remedy: "
            "axis: the dim that the product sums over, or targets without it."
        )
    return axis % len(shape)


def _mask(config: PruneConfig, path: Path, w: jax.Array, sparsity: jax.Array) -> jax.Array:
    size = at_least_fp32(jnp.abs(w))
    if config.pattern is not None:
        return _largest(size, *config.pattern, _axis(config, path, w.shape))
    return ~_first(_keys(size), sparsity)


def _largest(size: jax.Array, n: int, m: int, axis: int) -> jax.Array:
    """Returns where the n largest of each m neighbours are; of equal ones the first."""
    shape = size.shape
    groups = size.reshape(*shape[:axis], shape[axis] // m, m, *shape[axis + 1 :])
    place = jax.lax.broadcasted_iota(jnp.int32, groups.shape, axis + 1)
    larger = jnp.zeros(groups.shape, jnp.int32)
    for i in range(m):
        other = jax.lax.slice_in_dim(groups, i, i + 1, axis=axis + 1)
        larger += (other > groups) | ((other == groups) & (i < place))
    return (larger < n).reshape(shape)


class _Key(NamedTuple):
    """Something to order numbers by: an uint32 for each, and the number of bits of the largest."""

    values: jax.Array
    bits: int


def _keys(size: jax.Array) -> list[_Key]:
    """Returns what orders the numbers: their bits, which are in the order of the magnitudes, then their index."""
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
    digits = [bits] if bits.ndim == size.ndim else [bits[..., 1], bits[..., 0]]  # those of an fp64 are two
    index = [jax.lax.broadcasted_iota(jnp.uint32, size.shape, dim) for dim in range(size.ndim)]
    lengths = [31, 32][: len(digits)] + [(n - 1).bit_length() for n in size.shape]  # no sign bit
    return [_Key(*key) for key in zip([*digits, *index], lengths, strict=True) if key[1]]


def _first(keys: Sequence[_Key], share: jax.Array) -> jax.Array:
    """Returns where the first numbers are, a share of them, in the order of the first key, then of the second, ..."""
    tied = jnp.ones(keys[0].values.shape, bool)  # those that the keys so far do not tell apart from the last
    total = tied.size / 2**16 * share
    rest = jnp.floor(total).astype(jnp.uint32), jnp.round((total - jnp.floor(total)) * 2**16).astype(jnp.uint32)
    rest = rest[0] + (rest[1] >> 16), rest[1] & 0xFFFF
    first = ~tied
    for key in keys:
        limit = _limit(key, tied, rest)
        below = tied & (key.values < limit)
        high, low = _count(below)
        borrow = (low > rest[1]).astype(jnp.uint32)
        rest = rest[0] - high - borrow, rest[1] + (borrow << 16) - low
        first, tied = first | below, tied & (key.values == limit)
    return first


def _limit(key: _Key, among: jax.Array, most: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the greatest limit below which no more than ``most`` of the key's values are."""

    def step(i: jax.Array, limit: jax.Array) -> jax.Array:
        more = limit + (jnp.uint32(1) << (key.bits - 1 - i).astype(jnp.uint32))
        high, low = _count(among & (key.values < more))
        return jnp.where((high < most[0]) | ((high == most[0]) & (low <= most[1])), more, limit)

    return jax.lax.fori_loop(0, key.bits, step, jnp.uint32(0))


def _count(some: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many are true, in digits of 16 bits, because an array may have more numbers than an uint32 counts."""
    rows = jnp.sum(some, axis=tuple(range(1, some.ndim)), dtype=jnp.uint32)
    low = jnp.sum(rows & 0xFFFF, dtype=jnp.uint32)
    return jnp.sum(rows >> 16, dtype=jnp.uint32) + (low >> 16), low & 0xFFFF
