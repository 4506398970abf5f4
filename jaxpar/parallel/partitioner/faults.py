"""The table of what XLA's partitioner computes wrongly, and what a step does instead.

Each row was found by comparing programs with one device; ``docs/facts.md`` has the searches. ``jaxpar doctor`` runs the
smallest program of each (:mod:`jaxpar.parallel.partitioner.programs`), and a test fails if a new JAX mends one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.parallel.partitioner.convolution import SlicedConvolution
from jaxpar.parallel.partitioner.shards import MayShard
from jaxpar.sharding.rules import Axes, Sizes
from jaxpar.utils.jaxprs import sizes_of


@dataclass(frozen=True)
class Fault:
    """Something that the partitioner computes wrongly.

    Attributes:
      name: the operation.
      what: the wrong result.
      when: under which shardings.
      remedy: what the user may change.
    """

    name: str
    what: str
    when: str
    remedy: str


_OTHER_DIM = "shard another dim"
ROWS = Fault(
    "convolution of slices",
    "the result, or the gradient of the kernel, is multiplied by the size of an axis",
    "height, width or depth is sharded, and an axis shards the kernel or nothing",
    "use jp.spatial.conv, with windows that line up with the slices, which exchanges only the halo",
)
GROUPS = Fault(
    "kernel gradient of a grouped convolution",
    "it is multiplied by the sizes of the axes that shard neither batch nor space",
    "the batch is sharded, and there are such axes",
    "shard the batch over all axes",
)
FEATURES = Fault(
    "grouped convolution with sharded features",
    "its numbers are wrong, the compiler refuses the program, or aborts the process",
    "windows are of one number, or there is one window, or a kernel gradient has fewer groups than devices",
    _OTHER_DIM,
)
ORDER = Fault(
    "matmul into reverse mesh order",
    "its blocks are in the wrong order",
    "a dim of the result is sharded over axes in another order than the mesh, and another over an axis of the sum",
    "name the axes of a rule in the order of the mesh",
)
SHIFT = Fault(
    "padding that shifts an array",
    "numbers are in the wrong places",
    "one side of the padding is negative, the array is whole and the result is sharded along that dim",
    "slice before you pad",
)
SPREAD = Fault(
    "padding between elements",
    "the compiler refuses the program, or aborts the process",
    "that dim is sharded",
    _OTHER_DIM,
)
UPDATE = Fault(
    "update beyond the end of a dim",
    "it is lost, where one device moves it to the end",
    "dynamic_update_slice writes along a sharded dim, from a start that is too large",
    "limit the start with jnp.clip",
)
FFT = Fault(
    "Fourier transform of several dims",
    "the program does not run, or the compiler aborts the process",
    "one of the dims is sharded",
    _OTHER_DIM,
)


@dataclass(frozen=True)
class Repair:
    """What runs in place of an equation that the partitioner would compute wrongly.

    Attributes:
      fault: what would be wrong.
      axes: the axes that shard the dims in question.
      how: what the step does, and what it costs.
      run: computes the equation's results from its operands.
    """

    fault: Fault
    axes: frozenset[str]
    how: str
    run: Callable[..., Any]


def repair(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    """Returns what runs in place of an equation, or ``None`` if the partitioner computes it correctly.

    Args:
      eqn: the equation.
      shards: the axes that may shard each dim.
      live: the automatic mesh axes of more than one device, with their sizes, in mesh order.
    """
    find = _TABLE.get(eqn.primitive.name)
    return find(eqn, shards, live) if find is not None and live else None


def _over(shards: MayShard, atom: Any, dim: int, live: Sizes) -> frozenset[Axes]:
    """The tuples of automatic axes that may shard a dim."""
    return frozenset(tuple(axis for axis in axes if axis in live) for axes in shards.axes(atom, dim)) - {()}


def _sure(sets: frozenset[Axes]) -> frozenset[str]:
    """The axes that shard a dim by all accounts."""
    return frozenset.intersection(*map(frozenset, sets)) if sets else frozenset()


def _names(sets: Iterable[Axes]) -> frozenset[str]:
    return frozenset(axis for axes in sets for axis in axes)


def _constrained(x: jax.Array, dims: Mapping[int, Axes]) -> jax.Array:
    """Returns ``x`` with these dims sharded over these axes; the compiler shards the others as it likes."""
    spec = [dims.get(dim, PartitionSpec.UNCONSTRAINED) for dim in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*spec)))


def _bind(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _gathered(fault: Fault, eqn: JaxprEqn, axes: frozenset[str], dims: Sequence[Iterable[int]]) -> Repair:
    """Computes an equation whose operands and results have these dims whole on each device."""
    wholes = [dict.fromkeys(own, ()) for own in dims]

    def run(*operands: jax.Array) -> list[Any]:
        reads = [_constrained(x, own) if own else x for x, own in zip(operands, wholes, strict=False)]
        made = zip(_bind(eqn, *reads), wholes[len(operands) :], strict=True)
        return [_constrained(x, own) if own else x for x, own in made]

    return Repair(fault, axes, "gathers it", run)


def _convolution(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    """Where both operands are sharded, partial sums are added over all devices, also those that have the same ones."""
    (lhs, rhs), (out,) = eqn.invars, eqn.outvars
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"] > 1
    grouped = groups or eqn.params["feature_group_count"] > 1
    over = functools.partial(_over, shards, live=live)
    spatial = list(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True))
    space = tuple(over(lhs, i) | over(rhs, j) | over(out, k) for i, j, k in spatial)
    by_kernel = tuple(bool(over(rhs, j)) and sizes_of(rhs)[j] > sizes_of(out)[k] for _, j, k in spatial)
    backward = groups or any(by_kernel)
    rows = over(lhs, numbers.lhs_spec[1 if backward else 0])
    used = _names(axes for sets in space for axes in sets)
    features = [over(lhs, numbers.lhs_spec[0 if backward else 1]), over(rhs, numbers.rhs_spec[0])]
    sure = _sure(rows).union(*map(_sure, space)) - _names(axes for sets in features for axes in sets)
    idle = [axis for axis in live if axis not in sure]
    group_dims = (numbers.lhs_spec[0 if groups else 1], numbers.rhs_spec[0], numbers.out_spec[1])
    parted = _parted_groups(eqn, shards, live, group_dims)
    if parted and not groups:
        return _gathered(FEATURES, eqn, parted, [[group_dims[0]], range(len(sizes_of(rhs))), [group_dims[2]]])
    stretched = zip(space, eqn.params["lhs_dilation"], eqn.params["padding"], strict=True)
    aborts = any(sets and spread > 1 and min(sides) < 0 for sets, spread, sides in stretched)
    tiled = any(over(rhs, i) for i in range(len(sizes_of(rhs))))
    if not aborts and not parted and (len(live) < 2 or not idle or not (backward and (used or rows) or used and tiled)):
        return None
    fault, axes = (FEATURES, parted) if parted else (ROWS, used) if used else (GROUPS, _names(rows))
    clear = not parted and all(len(sets) < 2 for sets in (*space, rows)) and not used & _names(rows)
    first: Callable[[frozenset[Axes]], Axes] = lambda sets: next(iter(sets), ())
    if clear:
        conv = SlicedConvolution.of(eqn, tuple(map(first, space)), by_kernel, first(rows) if grouped else (), backward)
        if not conv.problem(live):
            return Repair(fault, axes, "runs it slice by slice", lambda *operands: [conv(*operands)])
    if not backward and not aborts:
        return _gathered(fault, eqn, axes, [[], range(len(sizes_of(rhs))), []])
    batch = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    spread = tuple(axis for axis in live if not clear or axis not in used)
    parted_windows = any(over(out, k) for _, _, k in spatial)  # then its sum over the batch is wrong too
    if backward and not parted_windows and sizes_of(lhs)[batch[0]] % math.prod(live[axis] for axis in spread) == 0:
        whole = [group_dims[2]] if parted else []
        run = functools.partial(_rows_over, eqn, batch, spread, whole)
        return Repair(fault, axes, "shards the batch over all axes", run)
    dims = [[places[n] for places, sets in zip(spatial, space, strict=True) if sets] for n in range(3)]
    if groups:
        more = [[dim] if parted else [] for dim in group_dims]
        dims = [[*dims[0], *more[0], batch[0]], [*dims[1], *more[1], batch[1]], [*dims[2], *more[2]]]
    return _gathered(fault, eqn, axes, dims)


def _parted_groups(eqn: JaxprEqn, shards: MayShard, live: Sizes, dims: Sequence[int]) -> frozenset[str]:
    """The axes that part groups of a convolution, ``dims`` of its operands and result, which is taken for a matmul.

    The partitioner does so if no spatial dim has real windows, and then forgets the groups.
    """
    by_batch, numbers = eqn.params["batch_group_count"], eqn.params["dimension_numbers"]
    if max(by_batch, eqn.params["feature_group_count"]) == 1:
        return frozenset()
    atoms, specs = (*eqn.invars, *eqn.outvars), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    axes = _names(own for x, dim in zip(atoms, dims, strict=True) for own in _over(shards, x, dim, live))
    windows = zip(*([sizes_of(x)[dim] for dim in spec[2:]] for x, spec in zip(atoms, specs, strict=True)), strict=True)
    unaligned = by_batch > 1 and by_batch % math.prod(live[axis] for axis in axes)
    return axes if unaligned or all(1 in sizes for sizes in windows) else frozenset()


def _rows_over(eqn: JaxprEqn, batch: Sequence[int], axes: Axes, whole: Sequence[int], *operands: Any) -> list[Any]:
    """Computes the gradient of a kernel with the batch, dim ``batch`` of each operand, sharded over ``axes``.

    Args:
      whole: dims of the result that are not sharded before all devices have their sum.
    """
    (out,) = _bind(eqn, *(_constrained(x, {dim: axes}) for x, dim in zip(operands, batch, strict=True)))
    return [_constrained(out, dict.fromkeys(whole, ())) if whole else out]


def _pad(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    """The partitioner slices a whole array as it slices the result, and forgets that its elements move."""
    x, out, config = eqn.invars[0], eqn.outvars[0], eqn.params["padding_config"]
    spread = [i for i, (_, _, inner) in enumerate(config) if inner]
    if gathered := _whole_dims(SPREAD, eqn, shards, live, spread, (x, out)):
        return gathered
    shifted = [i for i, (low, high, inner) in enumerate(config) if low and min(low, high) < 0 and not inner]
    axes = frozenset().union(*(_names(_over(shards, out, i, live)) for i in shifted))
    cuts = [(0, 0) if inner else (max(0, -low), max(0, -high)) for low, high, inner in config]
    starts = [before for before, _ in cuts]
    ends = [size - after for size, (_, after) in zip(sizes_of(x), cuts, strict=True)]
    if not axes or any(start > end for start, end in zip(starts, ends, strict=True)):
        return None
    rest = [(low + a, high + b, inner) for (low, high, inner), (a, b) in zip(config, cuts, strict=True)]
    run = lambda x, fill: [jax.lax.pad(jax.lax.slice(x, starts, ends), fill, rest)]
    return Repair(SHIFT, axes, "slices it before", run)


def _fft(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    x, out, count = eqn.invars[0], eqn.outvars[0], len(eqn.params["fft_lengths"])
    rank = len(sizes_of(x))
    return _whole_dims(FFT, eqn, shards, live, range(rank - count, rank) if count > 1 else (), (x, out))


def _whole_dims(
    fault: Fault, eqn: JaxprEqn, shards: MayShard, live: Sizes, dims: Iterable[int], places: Sequence[Any]
) -> Repair | None:
    """Keeps those of ``dims`` whole that may be sharded."""
    sharded = {i: _names(axes for atom in places for axes in _over(shards, atom, i, live)) for i in dims}
    sharded = {i: axes for i, axes in sharded.items() if axes}
    if not sharded:
        return None
    wholes = [list(sharded) if any(atom is place for place in places) else [] for atom in (*eqn.invars, *eqn.outvars)]
    axes = frozenset().union(*sharded.values())
    return _gathered(fault, eqn, axes, wholes)


def _update(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    x, update, *starts = eqn.invars
    dims = [i for i in range(len(starts)) if sizes_of(x)[i] > sizes_of(update)[i]]
    axes = frozenset().union(*(_names(_over(shards, x, i, live)) for i in dims))
    if not axes:
        return None

    def run(x: jax.Array, update: jax.Array, *starts: jax.Array) -> list[Any]:
        room = [a - b for a, b in zip(x.shape, update.shape, strict=True)]
        return _bind(
            eqn, x, update, *(jnp.clip(s, 0, most).astype(s.dtype) for s, most in zip(starts, room, strict=True))
        )

    return Repair(UPDATE, axes, "limits the start", run)


def _matmul(eqn: JaxprEqn, shards: MayShard, live: Sizes) -> Repair | None:
    out, order, (contracted, _) = eqn.outvars[0], list(live), eqn.params["dimension_numbers"]
    summed = frozenset[str]()
    for atom, dims in zip(eqn.invars, contracted, strict=True):
        summed |= _names(axes for dim in dims for axes in _over(shards, atom, dim, live))
    over = {dim: _over(shards, out, dim, live) for dim in range(len(sizes_of(out)))}
    mesh_order = {
        dim: tuple(sorted(axes, key=order.index))
        for dim, sets in over.items()
        for axes in sets
        if [*axes] != sorted(axes, key=order.index)
    }
    scattered = {dim for dim, sets in over.items() if _names(sets) & summed}
    wrong = {dim: axes for dim, axes in mesh_order.items() if scattered - {dim}}
    if not wrong:
        return None
    names = [axis for axes in wrong.values() for axis in axes]
    fits = lambda dim, axes: sizes_of(out)[dim] % math.prod(live[axis] for axis in axes) == 0
    clear = len(set(names)) == len(names) and all(fits(dim, axes) for dim, axes in wrong.items())
    wrong = wrong if clear else dict.fromkeys(wrong, ())
    axes = frozenset(axis for dim in wrong for axis in mesh_order[dim])
    run = lambda *operands: [_constrained(_bind(eqn, *operands)[0], wrong)]
    return Repair(ORDER, axes, "computes it in mesh order, and permutes the blocks", run)


_TABLE: Mapping[str, Callable[[JaxprEqn, MayShard, Sizes], Repair | None]] = {
    "conv_general_dilated": _convolution,
    "pad": _pad,
    "fft": _fft,
    "dynamic_update_slice": _update,
    "dot_general": _matmul,
}
