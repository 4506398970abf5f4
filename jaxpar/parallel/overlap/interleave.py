"""``interleave_batches``: runs a layer on two half batches, so that one half communicates while the other computes.

Each device's own rows, or its own tokens, are split in halves (as MindSpore's ``fine_grain_interleave`` does), so the
split sends no bytes. The mesh axes of the batch and of the sequence are manual: weights are gathered once for both
halves, and their gradients are summed over both before they are reduced.

Two independent halves alone hide little. The TPU compiler overlaps no reduce-scatter, and it lets both halves gather at
the same time and compute at the same time. A layer that consists of :class:`Branch` es is therefore interleaved
explicitly. Permutes replace the all-gathers and reduce-scatters of the sequence
(:mod:`jaxpar.parallel.overlap.permute_collectives`), and barriers keep what one half sends next to what the other
computes, in the forward and the backward pass.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, LayoutError, ModelError, did_you_mean, listing
from jaxpar.parallel.batch_rows import batch_rows, numbering, row_numbers, rows_wanted
from jaxpar.parallel.collectives import gather_reduce
from jaxpar.parallel.collectives.gather_reduce import Parts, axes_of, seq_axes
from jaxpar.parallel.manual_axes import manual_shard_map
from jaxpar.parallel.overlap.branches import Branch, interleave_branches
from jaxpar.parallel.overlap.permute_collectives import ppermute_all_gather, ppermute_reduce_scatter
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout, current_layout, hint, manual_axes
from jaxpar.sharding.resolve import num_shards_over, resolve
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import at_least_fp32

Cut = Literal["batch", "seq"]
COUNTS, CUTS = (1, 2), get_args(Cut)
MAX_DIRECT = 8
"""The most devices over which pieces are sent straight to their device, rather than around rings.

Over 8 devices of a v5p, straight pieces keep the links busy for twice as long as rings do: five sixths of the time that
the products of the 70B model take. But one product hides all of them, while the hops of a ring are hidden only one
after another. Over 16 devices, each device has half as many products to hide them.
"""
INSIDE, RESIDUAL = ("batch", "seq", "embed"), ("batch", "residual_seq", "embed")

type BatchLayer = Callable[[Any, jax.Array, Any], jax.Array]
type PartRows = jax.Array | tuple[jax.Array, ...]
type _NamedArray = tuple[jax.Array, tuple[str | None, ...] | None]


def interleave_batches(
    layer: BatchLayer | Sequence[Branch], count: int = 2, *, dim: Cut = "batch"
) -> Callable[[Any, Any, Any], Any]:
    """Returns ``layer(block, x, side) -> x`` that runs on ``count`` independent parts of each device's rows or tokens.

    The arguments of the returned function are:

    - ``block``: an NNX module, whose weights are gathered as their logical dims say; or any pytree of replicated
      arrays.
    - ``x``: ``[rows, seq, ...]``, or the parts that :func:`cut` made. With parts, the result is parts too, so a scan
      over layers cuts and joins once.
    - ``side``: a pytree of arrays ``[rows or 1, seq or 1, ...]``, which are split as ``x`` is; of scalars; and of keys.
      Each part on each device receives its own key. A value that ``layer`` captures, even a key, is the same in all
      parts.

    Args:
      layer: a function of one array ``x``, or the layer's branches in order, which are interleaved explicitly. Each
        device runs it on its own rows and tokens: the axes of the dims ``batch`` and ``seq`` are manual, other axes
        stay automatic. Wrap the returned function in ``jax.checkpoint``, not ``layer``: inside it, the backward pass
        could not gather again the weights that the parts share.
      count: the number of parts, 1 or 2.
      dim: ``batch`` splits rows. ``seq`` splits sequences, and requires branches: a part depends on earlier parts only
        through what their branches carry. The tokens have to be in the order of :func:`order_of_halves`.

    Raises:
      ConfigError: another count or dim, or ``dim="seq"`` without branches. The returned function raises it for rules
        that shard neither ``residual_seq`` nor ``seq``, for rules that shard ``seq`` if ``dim`` is ``seq``, and for
        rows or tokens that cannot be split evenly.
      NoLayoutError: the returned function runs while no layout is ambient.
      LayoutError: ``side`` holds an array with other rows or tokens.
      ModelError: the module holds variables other than parameters.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", seq="context", residual_seq="context", embed=None)
    >>> with jp.Layout(jp.MeshSpec(data=2, context=-1).build(), rules):
    ...     run = interleave_batches(lambda block, x, side: x + jnp.tanh(x @ block["w"]))
    ...     jax.jit(run)({"w": jnp.zeros((8, 8))}, jnp.ones((4, 16, 8)), None).shape
    (4, 16, 8)
    """
    check_count(count, dim)
    if dim == "seq" and callable(layer):
        raise ConfigError(
            "interleave_batches(): dim is 'seq', but the layer is a single function, which does not declare what one "
            "part of a sequence passes to the next. Remedy: pass its branches, with Branch(carried=...) where tokens "
            "see others, or use dim='batch'."
        )

    @numbering
    def run(block: Any, x: PartRows, side: Any) -> Any:
        given_parts = isinstance(x, tuple)
        plan = _SplitPlan.of(dim, count, with_permutes=not callable(layer))
        shape = plan.full_shape(x)
        plan.check_parts(shape, count)
        leaves, build = _weights(block)
        entries = [plan.entry(w, names) for w, names in leaves]
        sides, structure = jax.tree.flatten(side)

        def local(ws: list[jax.Array], x: PartRows, sides: list[Any], numbers: Any) -> Any:
            own_block = build([_enter(entry, w) for entry, w in zip(entries, ws, strict=True)])
            xs = x if isinstance(x, tuple) else plan.parted(x, count)
            parts = [jax.tree.unflatten(structure, [plan.part(s, at, count) for s in sides]) for at in range(count)]
            within = plan.rows_of_parts(numbers, count)
            if not callable(layer):
                ys = interleave_branches(layer, plan, own_block, xs, parts, within)
                return ys if given_parts else plan.joined(ys)
            found = []
            for at, (one, part) in enumerate(zip(xs, parts, strict=True)):
                with within(at):
                    found.append(layer(own_block, one, part))
            return tuple(found) if given_parts else plan.joined(found)

        spec = (plan.row_spec,) * count if given_parts else plan.row_spec
        numbers = row_numbers(shape[0], ()) if rows_wanted() else None
        of_rows = None if numbers is None else PartitionSpec(plan.rows)
        in_specs = [entry.spec for entry in entries], spec, [plan.side_spec(s, shape) for s in sides], of_rows
        ws = [entry.widened(w) for entry, (w, _) in zip(entries, leaves, strict=True)]
        return plan.inside(local, in_specs, spec)(ws, x, sides, numbers)

    return run


def cut(x: jax.Array, count: int = 2, *, dim: Cut = "batch") -> tuple[jax.Array, ...]:
    """Splits an array ``[rows, seq, ...]`` into ``count`` parts, each with a part of each device's rows or tokens.

    Raises:
      ConfigError: as :func:`interleave_batches`.
    """
    check_count(count, dim)
    plan = _SplitPlan.of(dim, count, with_permutes=dim == "seq")
    plan.check_parts(x.shape, count)
    in_specs, out_specs = (plan.row_spec,), (plan.row_spec,) * count
    return plan.inside(lambda x: plan.parted(x, count), in_specs, out_specs)(x)


def join(parts: tuple[jax.Array, ...], *, dim: Cut = "batch") -> jax.Array:
    """Joins the parts that :func:`cut` made."""
    plan = _SplitPlan.of(dim, 1, with_permutes=dim == "seq")
    in_specs = (plan.row_spec,) * len(parts)
    return plan.inside(lambda *xs: plan.joined(xs), in_specs, plan.row_spec)(*parts)


def order_of_halves(seq: int, count: int = 2) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the position of each of ``seq`` tokens in the order that ``dim="seq"`` requires, int32 ``[seq]``.

    Each device holds its share of the first part, and then its share of the next: ``x[:, order_of_halves(seq)]`` puts
    the tokens into this order, under the ambient layout.

    Raises:
      ConfigError: as :func:`interleave_batches`.

    >>> import jaxpar as jp
    >>> with jp.Layout(jp.MeshSpec(model=2, data=-1).build(), jp.Rules(batch="data", seq=None, residual_seq="model")):
    ...     order_of_halves(8).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    check_count(count, "seq")
    plan = _SplitPlan.of("seq", count, with_permutes=True)
    plan.check_parts((0, seq), count)
    at = np.arange(seq, dtype=np.int32).reshape(count, num_shards_over(plan.permute_axes, plan.layout.sizes), -1)
    return at.swapaxes(0, 1).reshape(-1)


def check_count(count: int, dim: str = "batch") -> None:
    """Raises a ConfigError for an unsupported number of parts, or a dim that cannot be split."""
    if isinstance(count, bool) or count not in COUNTS:
        raise ConfigError(
            f"overlap.ways must be 1 or 2, got {count!r}: while one half communicates, the other computes. Remedy: use "
            f"2, or 1 for no overlap."
        )
    if dim not in CUTS:
        raise ConfigError(
            f"overlap.dim must be 'batch' or 'seq', got {dim!r}.{did_you_mean(dim, CUTS)} Remedy: use batch to split "
            f"each device's rows, seq to split its tokens."
        )


@dataclass(frozen=True)
class _Entry:
    """How a weight enters the ``shard_map``.

    Attributes:
      spec: its sharding on entry.
      parts: the axes that are gathered inside.
      dtype: its dtype inside.
      wide: whether it enters in fp32, so that its gradient is summed in fp32.
    """

    spec: PartitionSpec
    parts: Parts
    dtype: Any
    wide: bool

    def widened(self, w: jax.Array) -> jax.Array:
        # XLA:CPU aborts on a 16-bit sum in a shard_map with some automatic axes.
        return at_least_fp32(w) if self.wide and jnp.issubdtype(self.dtype, jnp.floating) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(parts: Parts, dtype: Any, w: jax.Array) -> jax.Array:
    return gather_reduce.gather(w, parts, gather_reduce.current_precision()).astype(dtype)


def _scattered(parts: Parts, dtype: Any, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    precision, axes = gather_reduce.current_precision(), tuple(axis for dim in parts.dims for axis in dim)
    # The default is the compute dtype, or wider where `summing` says so, as for all other gathered weights.
    if not precision.reduce:
        precision = replace(precision, reduce=str(precision.summing(grad.dtype) or grad.dtype))
    return (gather_reduce.reduce(grad, parts, axes, precision).astype(like.dtype),)


_gathered.defvjp(lambda parts, dtype, w: (_gathered(parts, dtype, w), w[:0]), _scattered)


def _enter(entry: _Entry, w: jax.Array) -> jax.Array:
    """Returns a weight as the layer uses it. ``shard_map`` sums its gradient over the axes that do not shard it."""
    if not any(entry.parts.dims):
        return w.astype(entry.dtype)
    return checkpoint_name(_gathered(entry.parts, entry.dtype, w), GATHERED)


@dataclass(frozen=True)
class _SplitPlan:
    """The mesh axes of the interleaved layer, without those that an enclosing ``shard_map`` has made manual.

    Attributes:
      layout: the ambient layout.
      dim: the dim that is split into parts.
      rows: the axes that shard the rows.
      seq: the axes that shard the tokens everywhere.
      permute_axes: the axes that shard the tokens only between branches; their collectives are written as permutes.
      splits: whether the rules shard ``seq`` or ``residual_seq`` at all.
    """

    layout: Layout
    dim: Cut
    rows: Axes
    seq: Axes
    permute_axes: Axes
    splits: bool

    @classmethod
    def of(cls, dim: Cut, count: int, *, with_permutes: bool) -> _SplitPlan:
        """Returns the plan for ``count`` parts under the ambient layout.

        Raises:
          ConfigError: the rules do not allow this split.
        """
        layout = current_layout()
        rows, seq, residual = axes_of(layout, "batch"), seq_axes(layout), axes_of(layout, "residual_seq")
        manual = jax.sharding.get_abstract_mesh().manual_axes
        free = lambda axes: tuple(axis for axis in axes if axis not in manual)
        permute_axes = tuple(axis for axis in residual if axis not in (*seq, *rows))
        fits = with_permutes and residual[: len(seq)] == seq
        plan = cls(layout, dim, free(rows), free(seq), free(permute_axes) if fits else (), bool(seq or residual))
        plan._check_split(count)
        return plan

    def _check_split(self, count: int) -> None:
        if count > 1 and not self.splits and self.layout.mesh.size > 1:
            sizes = ", ".join(f"{axis} {size}" for axis, size in self.layout.sizes.items() if size > 1)
            raise ConfigError(
                f"overlap.ways is {count}, but on the mesh ({sizes}) the rules shard neither 'residual_seq' (sequence "
                f"parallelism) nor 'seq' (context parallelism), so layers have no communication to overlap. Remedy: "
                f"use the rules residual_seq: model and heads: model, or seq: context, or set overlap: {{ways: 1}}."
            )
        if count > 1 and self.dim == "seq" and (self.seq or not self.permute_axes) and self.layout.mesh.size > 1:
            why = "the rules shard 'residual_seq' over no axis besides those of 'seq' and 'batch'"
            if self.seq:
                split = ", ".join(f"{axis} {self.layout.sizes[axis]}" for axis in self.seq)
                why = f"the rules shard 'seq' over {split}, and attention gathers these tokens itself"
            raise ConfigError(
                f"overlap.ways is {count} and overlap.dim is 'seq', but {why}. Remedy: use the rules residual_seq: "
                f"model, heads: model and seq: null, or set overlap.dim: batch."
            )

    def full_shape(self, x: PartRows) -> tuple[int, ...]:
        """Returns the shape of the array before it was cut into parts."""
        if not isinstance(x, tuple):
            return tuple(x.shape)
        shape = list(x[0].shape)
        shape[CUTS.index(self.dim)] *= len(x)
        return tuple(shape)

    def parted(self, x: jax.Array, count: int) -> tuple[jax.Array, ...]:
        """Splits a device's local array."""
        return tuple(jnp.split(x, count, CUTS.index(self.dim)))

    def joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Joins the parts of a device's local array."""
        return jnp.concatenate(parts, CUTS.index(self.dim))

    def check_parts(self, shape: Sequence[int], count: int) -> None:
        """Raises a ConfigError unless each device's rows, or tokens, can be split evenly."""
        if self.dim == "seq":
            size, axes, what = shape[1], self.permute_axes, "tokens"
            whole, other = "a sequence", "overlap: {ways: 1}"
        else:
            size, axes, what = shape[0], self.rows, "rows"
            whole, other = "a batch, or microbatches,", "overlap.dim: seq or overlap: {ways: 1}"
        num_shards = num_shards_over(axes, self.layout.sizes)
        if size % (num_shards * count):
            over = f" ({size} over {num_shards} devices of {', '.join(axes)})" if num_shards > 1 else ""
            raise ConfigError(
                f"overlap.ways is {count}, but a device's {size / num_shards:g} {what}{over} cannot be split into "
                f"{count} equal parts. Remedy: use {whole} of a multiple of {num_shards * count} {what}, or set "
                f"{other}."
            )

    def gather_seq(self, h: jax.Array) -> jax.Array:
        """Gathers the sequence: from the sharding of ``residual_seq`` to that of ``seq``."""
        if not self.permute_axes:
            return hint(h, *INSIDE)
        return ppermute_all_gather(h, self.permute_axes, dim=1, rings=self._rings())

    def scatter_seq(self, y: jax.Array) -> jax.Array:
        """Sums and scatters the sequence: from the sharding of ``seq`` to that of ``residual_seq``."""
        if not self.permute_axes:
            return hint(y, *RESIDUAL)
        return ppermute_reduce_scatter(y, self.permute_axes, dim=1, rings=self._rings())

    def _rings(self) -> tuple[int, ...]:
        """Returns the sizes of the rings for permutes; empty where pieces are sent straight.

        Between few devices one product hides all straight pieces. Between many they would congest the links of a torus.
        """
        links = links_of(self.layout.mesh, self.layout.rings)
        found = () if links is None or links.torus is None else links.rings(self.permute_axes)
        return found if math.prod(found) > MAX_DIRECT else ()

    @property
    def axes(self) -> Axes:
        """All mesh axes of the layer."""
        return (*self.rows, *self.seq, *self.permute_axes)

    @property
    def row_spec(self) -> PartitionSpec:
        """The sharding of the rows and tokens between branches."""
        return PartitionSpec(self.rows, (*self.seq, *self.permute_axes))

    def side_spec(self, s: Any, shape: Sequence[int]) -> PartitionSpec:
        if not jnp.ndim(s):
            return PartitionSpec()
        fits = s.shape[0] in (1, shape[0]) and (s.ndim == 1 or s.shape[1] in (1, shape[1]))
        if not fits:
            raise LayoutError(
                f"interleave_batches(): side has an array of shape {tuple(s.shape)}, which cannot be split like "
                f"{shape[0]} rows of {shape[1]} tokens. Remedy: use the shape [{shape[0]} or 1, {shape[1]} or 1, ...]."
            )
        axes = (self.rows if s.shape[0] > 1 else (), self.seq if s.ndim > 1 and s.shape[1] > 1 else ())
        return PartitionSpec(*axes[: s.ndim])

    def part(self, s: Any, at: int, count: int) -> Any:
        """Returns what the part ``at`` of this device's rows receives of an entry of ``side``."""
        if not jnp.ndim(s) and jnp.issubdtype(getattr(s, "dtype", jnp.float32), jax.dtypes.prng_key):
            here = jax.lax.axis_index((*self.rows, *self.seq)) if self.rows or self.seq else 0
            return jax.random.fold_in(s, here * count + at)
        if self.dim == "seq":
            if jnp.ndim(s) < 2 or s.shape[1] == 1:
                return s
            # The array holds the tokens of all devices; each device's tokens are split.
            shards = num_shards_over(self.permute_axes, self.layout.sizes)
            by_device = s.reshape(s.shape[0], shards, count, -1, *s.shape[2:])
            return by_device[:, :, at].reshape(s.shape[0], s.shape[1] // count, *s.shape[2:])
        return jnp.split(s, count)[at] if jnp.ndim(s) and s.shape[0] > 1 else s

    def rows_of_parts(self, numbers: Any, count: int) -> Callable[[int], AbstractContextManager[None]]:
        """Returns, for each part, the context with its global row numbers; ``numbers`` are those of all parts."""
        cuts = numbers is not None and self.dim == "batch"
        parts = jnp.split(numbers, count) if cuts else [numbers] * count
        return lambda at: batch_rows(parts[at])

    def entry(self, w: jax.Array, names: tuple[str | None, ...] | None) -> _Entry:
        """Returns how a weight with these logical dims enters the ``shard_map``."""
        manual = manual_axes(self.layout, self.axes, but=jax.sharding.get_abstract_mesh().manual_axes)
        stored, used = (self._resolved(w, names, role) for role in ("params", "activations"))
        stored, used = (tuple(tuple(a for a in dim if a in manual) for dim in found) for found in (stored, used))
        pairs = list(zip(stored, used, strict=True))
        if any(have[: len(want)] != want for have, want in pairs):
            stored, pairs = used, [(want, want) for want in used]  # the compiler reshards it before the shard_map
        parts = Parts(tuple(have[len(want) :] for have, want in pairs))
        on_cpu = platform_of(self.layout.mesh) == "cpu" and bool(set(self.layout.mesh.axis_names) - manual)
        # This applies within a pipeline stage too: its fp32 sums are over other axes. A weight that all axes shard is
        # not summed, so it keeps its dtype: a cast would change the value that the layer uses, and would be saved for
        # the backward pass.
        summed = not {*self.axes} <= {axis for dim in used for axis in dim}
        wide = summed and not any(parts.dims) and gather_reduce.summing(w.dtype, inside=True) is not None
        return _Entry(PartitionSpec(*stored), parts, w.dtype, wide or (on_cpu and w.dtype.itemsize < 4))

    def _resolved(self, w: jax.Array, names: tuple[str | None, ...] | None, role: str) -> tuple[Axes, ...]:
        if names is None:
            return ((),) * w.ndim
        names = names[len(names) - w.ndim :]  # a layer of a stack lacks the first dims
        outer = jax.sharding.get_abstract_mesh().manual_axes
        sizes = {axis: size for axis, size in self.layout.sizes.items() if axis not in outer}
        options: dict[str, Any] = {"itemsize": w.dtype.itemsize, "path": "a weight of interleave_batches()"}
        found = resolve(self.layout.rules, sizes, names, w.shape, role=role, **options)
        if found.problems:
            raise LayoutError(found.problems)
        return found.axes

    def inside(self, f: Callable[..., Any], in_specs: Any, out: Any) -> Callable[..., Any]:
        """Returns ``f`` as a ``shard_map`` over the manual axes."""
        return manual_shard_map(f, self.axes, in_specs, out) if self.axes else f


def _weights(block: Any) -> tuple[list[_NamedArray], Callable[[list[jax.Array]], Any]]:
    """Returns a block's arrays with their logical dims, and a function that builds a block from such arrays.

    Raises:
      ModelError: the module holds arrays that are not trained.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(block, nnx.Module):
        leaves, structure = jax.tree.flatten(block)
        return [(w, None) for w in leaves], lambda ws: jax.tree.unflatten(structure, ws)
    from jaxpar.nnx import names_of

    graphdef, params, rest = nnx.split(block, nnx.Param, ...)
    if jax.tree.leaves(rest):
        paths = ["/".join(map(str, keys)) for keys, _ in nnx.to_flat_state(rest)]
        raise ModelError(
            f"interleave_batches(): the layer has the variables {listing(paths)}, which would diverge: each half sees "
            f"its own rows. Remedy: keep counters, keys and statistics out of it, and pass keys in side."
        )
    leaves, structure = jax.tree.flatten(params)
    found = [names_of(v.get_metadata(), "/".join(map(str, keys))) for keys, v in nnx.to_flat_state(params)]
    pairs = list(zip(leaves, found, strict=True))
    return pairs, lambda ws: nnx.merge(graphdef, jax.tree.unflatten(structure, ws), rest)
