"""``CollectiveFusion``: how many collectives a step uses for its gradients and weights.

A compiler combines small collectives up to thresholds of its own. A size sets this threshold. A list of layers instead
makes the groups here: each group is one array and one collective, and the compiler cannot reorder or merge them.
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
from jaxpar.utils.checks import is_count

_LANES, _TILE = 1024, 16
"""The TPU compiler keeps a reduce-scatter of full tiles; other numbers of rows become an all-reduce and a slice."""
_ENDLESS = 2**30
_OPTIONS = {
    ("tpu", "reduce"): ("xla_jf_crs_combiner_threshold_in_bytes", "xla_jf_crs_combiner_threshold_count"),
    # Combines gathers of any size, despite its name, and counts the gathered bytes.
    ("tpu", "gather"): ("xla_all_gather_latency_bound_threshold_in_bytes", "xla_all_gather_combiner_threshold_count"),
    ("gpu", "reduce"): ("xla_gpu_all_reduce_combine_threshold_bytes",),
    ("gpu", "gather"): ("xla_gpu_all_gather_combine_threshold_bytes",),
    ("gpu", "scatter"): ("xla_gpu_reduce_scatter_combine_threshold_bytes",),
}

type BucketSize = str | int | tuple[int, ...]
type Cross = Callable[[jax.Array, tuple[str, ...]], jax.Array]


@dataclass(frozen=True)
class CollectiveFusion:
    """Which collectives are fused: all-reduces of gradients, gathers of weights and reduce-scatters of gradients.

    Each attribute is one of:

    - ``"auto"``: the compiler decides.
    - a size such as ``"64MiB"``, or 0: the compiler's threshold. It combines collectives up to this many bytes of
      reduced or gathered data; larger tensors stay separate.
    - a list such as ``(4, 8)``: layers 0–3, 4–7, and those from 8 on each use one collective per dtype. Parameters
      outside the layers belong to the first group. It applies where each device sums its own gradients (stages 0 and
      1).

    Attributes:
      reduce: for all-reduces of gradients.
      gather: for all-gathers of weights.
      scatter: for reduce-scatters of gradients.

    Raises:
      ConfigError: another value, or layers that do not increase.

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
                if not points or not all(map(is_count, points)) or list(points) != sorted({*points}):
                    raise ConfigError(
                        f"fusion: {field.name} must be a list of increasing layers from 1 on, each of which begins a "
                        f"group, got {list(points)}."
                    )
                object.__setattr__(self, field.name, points)
            elif value != "auto":
                object.__setattr__(self, field.name, _size(value, field.name))

    def groups(self, kind: str, layers: int) -> list[tuple[int, int]] | None:
        """Returns the groups of layers as (first, last + 1), or ``None`` where the compiler decides.

        Args:
          kind: ``reduce``, ``gather`` or ``scatter``.
          layers: the number of layers of the model.

        Raises:
          ConfigError: a group begins after the last layer.
        """
        value = getattr(self, kind)
        if not isinstance(value, tuple):
            return None
        if value[-1] >= layers:
            raise ConfigError(
                f"fusion: {kind} is {list(value)}, but the model has {layers} layers, so no group begins at "
                f"{value[-1]}. Remedy: use numbers below {layers}."
            )
        edges = [0, *value, layers]
        return list(itertools.pairwise(edges))

    def compiler_options(self, layout: Layout) -> dict[str, int]:
        """Returns the sizes as options of the compiler for the layout's platform.

        Raises:
          ConfigError: this compiler has no such option.
        """
        platform = platform_of(layout.mesh)
        found: dict[str, int] = {}
        for kind in ("reduce", "gather", "scatter"):
            size = getattr(self, kind)
            if not isinstance(size, int):
                continue
            if (names := _OPTIONS.get((platform, kind))) is None:
                raise ConfigError(
                    f"fusion: {kind} is {size} bytes, but the compiler for {platform} has no such option. Remedy: use "
                    f"a list of layers that begin groups, or auto."
                )
            # XLA:GPU counts the bytes of one device's shard of the result.
            parts = math.prod(layout.sizes[a] for a in layout.resolve(("batch",)).axes[0]) if kind == "scatter" else 1
            found |= dict(zip(names, (size // parts, _ENDLESS), strict=False))
        return found


def _size(value: Any, name: str) -> int:
    try:
        return over("data", value).min_bytes
    except RulesError:
        raise ConfigError(
            f"fusion: {name} must be 'auto', a size such as '64MiB', or a list of layers, got {value!r}."
        ) from None


def in_groups(
    arrays: Sequence[jax.Array],
    parts: Sequence[Parts],
    layered: Sequence[bool],
    groups: Sequence[tuple[int, int]],
    cross: Cross,
    *,
    gathers: bool,
) -> list[jax.Array]:
    """Returns the arrays after their collectives, one per group, dtype and set of axes; the last layers go first.

    Args:
      arrays: the local arrays.
      parts: the axes that shard each array: before a gather, or after a reduction.
      layered: for each array, whether its first dim is the layers.
      groups: the groups of layers, as of :meth:`CollectiveFusion.groups`.
      cross: the collective over the given axes along the first dim. Its argument is ``[num_shards, rows, 1024]`` for a
        reduction, and ``[1, rows, 1024]`` for a gather or without axes.
      gathers: whether the collective gathers, rather than reduces.
    """
    pieces: dict[int, list[jax.Array]] = {i: [] for i in range(len(arrays))}
    before: list[jax.Array] = []
    for number, (first, last) in reversed(list(enumerate(groups))):
        chosen = [i for i in range(len(arrays)) if layered[i] or number == 0]
        given = [arrays[i][first:last] if layered[i] else arrays[i] for i in chosen]
        # The barrier keeps the compiler from merging this group with the previous one.
        given, _ = jax.lax.optimization_barrier((given, before))
        before = _group(given, [parts[i] for i in chosen], cross, gathers)
        for i, piece in zip(chosen, before, strict=True):
            pieces[i].insert(0, piece)
    return [jnp.concatenate(found) if len(found) > 1 else found[0] for found in pieces.values()]


def _group(arrays: Sequence[jax.Array], parts: Sequence[Parts], cross: Cross, gathers: bool) -> list[jax.Array]:
    # The dim that is sharded, and its axes; the first dim and no axes if none is.
    sharded = [next(((dim, axes) for dim, axes in enumerate(part.dims) if axes), (0, ())) for part in parts]
    groups_by_kind: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        groups_by_kind.setdefault((x.dtype, sharded[i][1]), []).append(i)
    results: dict[int, jax.Array] = {}
    for (_, axes), members in groups_by_kind.items():
        num_shards = jax.lax.axis_size(axes)
        into, out = (1, num_shards) if gathers else (num_shards, 1)
        packed = [_pack(arrays[i], sharded[i][0], into) for i in members]
        rows = jnp.concatenate(packed, 1)
        crossed = cross(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % _TILE), (0, 0))), axes)
        start = 0
        for i, some in zip(members, packed, strict=True):
            own = jax.lax.slice_in_dim(crossed, start, start + some.shape[1], axis=1)
            start += some.shape[1]
            results[i] = _unpack(own, arrays[i].shape, sharded[i][0], into, out)
    return [results[i] for i in range(len(arrays))]


def _pack(x: jax.Array, dim: int, num_shards: int) -> jax.Array:
    """Returns ``x`` as ``[num_shards, rows, 1024]``; the TPU compiler changes a reduce-scatter of a flat array."""
    flat = jnp.moveaxis(x, dim, 0).reshape(num_shards, -1)
    return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % _LANES))).reshape(num_shards, -1, _LANES)


def _unpack(rows: jax.Array, shape: tuple[int, ...], dim: int, into: int, out: int) -> jax.Array:
    moved = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    flat = rows.reshape(out, -1)[:, : math.prod(moved) // into]
    return jnp.moveaxis(flat.reshape(shape[dim] * out // into, *moved[1:]), 0, dim)


def check_groups(paths: Sequence[str], parts: Sequence[Parts], layered: Sequence[bool]) -> None:
    """Raises a ConfigError where the groups cannot be made."""
    if not any(layered):
        raise ConfigError(
            f"fusion: groups consist of layers, but no parameter has {LAYERS!r} as its first dim. Remedy: use a size, "
            f"or auto."
        )
    for path, part, has_layers in zip(paths, parts, layered, strict=True):
        if sum(map(bool, part.dims)) > 1 or (has_layers and part.dims[0]):
            raise ConfigError(
                f"fusion: {path} is sharded over {', '.join(a for axes in part.dims for a in axes)} along its layers "
                f"or along several dims, so it cannot be split into groups of layers. Remedy: use a size, or auto."
            )
