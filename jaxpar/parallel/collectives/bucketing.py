"""``CollectiveFusion``: how many collectives the gradients and weights of a step take.

A compiler puts small collectives together by thresholds of its own. A size sets that threshold; a list of layers makes the groups here, each
one array and one collective, in an order that no compiler undoes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, RulesError
from jaxpar.parallel.collectives.gather_reduce import Parts
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.names import LAYERS
from jaxpar.sharding.rules import over

_LANES, _TILE = 1024, 16
"""Whole tiles stay a reduce-scatter to the TPU's compiler; odd numbers of rows would be an all-reduce and a slice."""
_ENDLESS = 2**30
_OPTIONS = {
    ("tpu", "reduce"): ("xla_jf_crs_combiner_threshold_in_bytes", "xla_jf_crs_combiner_threshold_count"),
    # Combines gathers at any size, whatever its name says; counts the gathered bytes.
    ("tpu", "gather"): ("xla_all_gather_latency_bound_threshold_in_bytes", "xla_all_gather_combiner_threshold_count"),
    ("gpu", "reduce"): ("xla_gpu_all_reduce_combine_threshold_bytes",),
    ("gpu", "gather"): ("xla_gpu_all_gather_combine_threshold_bytes",),
    ("gpu", "scatter"): ("xla_gpu_reduce_scatter_combine_threshold_bytes",),
}

type BucketSize = str | int | tuple[int, ...]


@dataclass(frozen=True)
class CollectiveFusion:
    """For all-reduces of gradients, gathers of weights and scatters of gradients each: what goes in one collective.

    ``"auto"`` leaves it to the compiler. A size, as ``"64MiB"`` or 0, is the compiler's threshold: collectives are put together up to so many
    bytes of what is reduced or of what is gathered; larger tensors stay alone. A list, as ``(4, 8)``, puts layers 0–3, 4–7 and those from 8 on
    in one collective each (of each dtype; what is no layer goes with the first): where each device sums by itself (stages 0 and 1).

    Raises:
      ConfigError: none of these, or layers that do not rise.

    >>> CollectiveFusion(reduce="64MiB").groups("reduce", 12) is None
    True
    >>> CollectiveFusion(reduce=(4, 8)).groups("reduce", 12)
    [(0, 4), (4, 8), (8, 12)]
    """

    reduce: BucketSize = "auto"
    gather: BucketSize = "auto"
    scatter: BucketSize = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list | tuple):
                points = tuple(value)
                whole = all(isinstance(point, int) and not isinstance(point, bool) for point in points)
                if not whole or not points or list(points) != sorted({*points}) or points[0] < 1:
                    raise ConfigError(
                        f"fusion: {field.name} is {list(points)}, but layers that rise, from 1 on, are wanted: each begins a group."
                    )
                object.__setattr__(self, field.name, points)
            elif value != "auto":
                object.__setattr__(self, field.name, _size(value, field.name))

    def groups(self, kind: str, layers: int) -> list[tuple[int, int]] | None:
        """Runs of layers (first, one beyond the last) that go together, or ``None`` where the compiler decides.

        Raises:
          ConfigError: a group begins beyond the last layer.
        """
        value = getattr(self, kind)
        if not isinstance(value, tuple):
            return None
        if value[-1] >= layers:
            raise ConfigError(
                f"fusion: {kind} is {list(value)}, but of {layers} layers none begins a group at {value[-1]}. Remedy: "
                f"numbers below {layers}."
            )
        edges = [0, *value, layers]
        return list(itertools.pairwise(edges))

    def compiler_options(self, layout: Layout) -> dict[str, int]:
        """The sizes as the compiler of the layout's platform takes them.

        Raises:
          ConfigError: that compiler has no such option, and would put together what it likes.
        """
        platform = platform_of(layout.mesh)
        found: dict[str, int] = {}
        for kind in ("reduce", "gather", "scatter"):
            size = getattr(self, kind)
            if not isinstance(size, int):
                continue
            names = _OPTIONS.get((platform, kind))
            if names is None:
                raise ConfigError(
                    f"fusion: {kind} is {size} bytes, but the compiler for {platform} takes no size for this. Remedy: a list of "
                    f"layers that begin groups, or auto."
                )
            # XLA:GPU counts a device's part of what is scattered.
            parts = math.prod(layout.sizes[a] for a in layout.resolve(("batch",)).axes[0]) if kind == "scatter" else 1
            found |= dict(zip(names, (size // parts, _ENDLESS), strict=False))
        return found


def _size(value: Any, name: str) -> int:
    try:
        return over("data", value).min_bytes
    except RulesError:
        raise ConfigError(
            f"fusion: {name} is {value!r}, but 'auto', a size as '64MiB', or a list of layers is wanted."
        ) from None


def in_groups(
    arrays: Sequence[jax.Array],
    parts: Sequence[Parts],
    layered: Sequence[bool],
    groups: Sequence[tuple[int, int]],
    cross: Callable[[jax.Array, tuple[str, ...]], jax.Array],
    *,
    gathers: bool,
) -> list[jax.Array]:
    """Arrays crossed group by group, each group of one dtype and the same axes as one array, the last layers first.

    Args:
      parts: the axes that each array is, or will be, split over.
      layered: whether its first dim is the layers.
      cross: the collective, of [ways, rows, 1024] over the axes along the first dim; of [1, rows, 1024] over none.
      gathers: whether the arrays are parts that become whole, or the other way round.
    """
    pieces: dict[int, list[jax.Array]] = {i: [] for i in range(len(arrays))}
    before: list[jax.Array] = []
    for number, (first, last) in reversed(list(enumerate(groups))):
        chosen = [i for i in range(len(arrays)) if layered[i] or number == 0]
        given = [arrays[i][first:last] if layered[i] else arrays[i] for i in chosen]
        # Behind all of the group before, or a compiler would put both together.
        given, _ = jax.lax.optimization_barrier((given, before))
        before = _group(given, [parts[i] for i in chosen], cross, gathers)
        for i, piece in zip(chosen, before, strict=True):
            pieces[i].insert(0, piece)
    return [jnp.concatenate(found) if len(found) > 1 else found[0] for found in pieces.values()]


def _group(
    arrays: Sequence[jax.Array],
    parts: Sequence[Parts],
    cross: Callable[[jax.Array, tuple[str, ...]], jax.Array],
    gathers: bool,
) -> list[jax.Array]:
    alike: dict[Any, list[int]] = {}
    for i, (x, part) in enumerate(zip(arrays, parts, strict=True)):
        alike.setdefault((x.dtype, _axes(part)), []).append(i)
    results: dict[int, jax.Array] = {}
    for (_, axes), members in alike.items():
        ways = math.prod(jax.lax.axis_size(axis) for axis in axes)
        into, out = (1, ways) if gathers else (ways, 1)
        packed = [_pack(arrays[i], _dim(parts[i]), into) for i in members]
        rows = jnp.concatenate(packed, 1)
        crossed = cross(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _TILE), (0, 0))), axes)
        start = 0
        for i, some in zip(members, packed, strict=True):
            own = jax.lax.slice_in_dim(crossed, start, start + some.shape[1], axis=1)
            start += some.shape[1]
            results[i] = _unpack(own, arrays[i].shape, _dim(parts[i]), into, out)
    return [results[i] for i in range(len(arrays))]


def _axes(part: Parts) -> tuple[str, ...]:
    return next((axes for axes in part.dims if axes), ())


def _dim(part: Parts) -> int:
    return next((dim for dim, axes in enumerate(part.dims) if axes), 0)


def _pack(x: jax.Array, dim: int, ways: int) -> jax.Array:
    """As [ways, rows, 1024]: rows of lanes stay a reduce-scatter to the TPU's compiler, a flat array would not."""
    flat = jnp.moveaxis(x, dim, 0).reshape(ways, -1)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % _LANES))).reshape(ways, -1, _LANES)


def _unpack(rows: jax.Array, shape: tuple[int, ...], dim: int, into: int, out: int) -> jax.Array:
    moved = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    flat = rows.reshape(out, -1)[:, : math.prod(moved) // into]
    return jnp.moveaxis(flat.reshape(shape[dim] * out // into, *moved[1:]), 0, dim)


def check_groups(paths: Sequence[str], parts: Sequence[Parts], layered: Sequence[bool]) -> None:
    """Raises ConfigError where the groups cannot be made."""
    if not any(layered):
        raise ConfigError(
            f"fusion: groups are made of layers, but no parameter has {LAYERS!r} as its first dim. Remedy: a size, or auto."
        )
    for path, part, has_layers in zip(paths, parts, layered, strict=True):
        if sum(map(bool, part.dims)) > 1 or (has_layers and part.dims[0]):
            raise ConfigError(
                f"fusion: {path} is split over {', '.join(a for axes in part.dims for a in axes)} along its layers or along several dims, "
                f"so its groups would not be parts of it. Remedy: a size, or auto."
            )
