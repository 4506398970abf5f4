"""Sharding propagation: how the sharding of an operation's operands determines that of its results.

There is one forward rule for each kind of operation. A spec has a tuple of mesh axes for each dim, major to minor. The
spec of a constant is ``None``, as a constant may have any sharding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxpar.analysis.units import axes_of_dims, shard_count

Spec = tuple[tuple[str, ...], ...]


class UnknownSharding(Exception):
    """No rule determines the sharding of this operation's results."""


class _Array(Protocol):
    shape: tuple[int, ...]
    spec: Spec | None


def without(spec: Spec | None, axes: Collection[str]) -> Spec | None:
    """Returns a spec without some axes."""
    return None if spec is None else tuple(tuple(a for a in dim if a not in axes) for dim in spec)


def merge(specs: Sequence[Spec | None], rank: int) -> Spec | None:
    """Returns the spec of an elementwise result.

    Each dim takes the axes of the first operand that shards it. No axis is used twice.

    Args:
      specs: those of the operands.
      rank: of the result and of all operands.
    """
    known = [spec for spec in specs if spec is not None]
    if not known:
        return None
    dims: list[tuple[str, ...]] = [()] * rank
    for spec in known:
        for i, axes in enumerate(spec):
            taken = {axis for dim in dims for axis in dim}
            if not dims[i] and not taken & set(axes):
                dims[i] = axes
    return tuple(dims)


def propagate(
    name: str, params: Mapping[str, Any], reads: Sequence[_Array], makes: Sequence[_Array], sizes: Mapping[str, int]
) -> list[Spec | None]:
    """Returns the specs of an operation's results.

    Args:
      name: the primitive.
      params: its parameters.
      reads, makes: its operands and results.
      sizes: mesh axis → size.

    Raises:
      UnknownSharding: no rule applies.
    """
    if name in ("sharding_constraint", "reshard", "mesh_cast"):
        sharding = params.get("sharding", params.get("dst_sharding"))
        spec = getattr(sharding, "spec", None)
        return [axes_of_dims(spec, len(makes[0].shape)) if spec is not None else reads[0].spec]
    if name == "optimization_barrier":
        return [x.spec for x in reads]
    if name in ("iota", "random_seed", "random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_split"):
        return [None] * len(makes)
    if all(x.spec is None for x in reads):
        return [None] * len(makes)
    rule = _RULES.get(name) or (_reduce if name.startswith(("reduce_", "arg")) and "axes" in params else None)
    if rule is not None:
        return [rule(params, reads, out, sizes) for out in makes]
    if name.startswith(_ALONG):
        _check_unsharded(name, params, reads[0])
    shape = makes[0].shape if makes else ()
    if all(out.shape == shape for out in makes) and all(_broadcasts(x.shape, shape) for x in reads):
        found = merge([x.spec for x in reads if x.shape], len(shape))
        return [found] * len(makes)
    raise UnknownSharding(name)


_ALONG = ("cum", "sort", "fft", "cholesky", "triangular_solve", "lu", "qr", "householder", "eig", "svd", "rev")
"""Operations whose results have the shape of an elementwise result, although they mix the elements of a dim."""


def _check_unsharded(name: str, params: Mapping[str, Any], read: _Array) -> None:
    """Raise ``UnknownSharding`` if an axis shards a dim whose elements the operation mixes."""
    rank = len(read.shape)
    mixed = params.get("axis", params.get("dimension", params.get("dimensions", (rank - 2, rank - 1))))
    if name == "fft":
        mixed = range(rank - len(params["fft_lengths"]), rank)
    dims = (mixed,) if isinstance(mixed, int) else mixed
    if any((read.spec or ((),) * rank)[dim] for dim in dims):
        raise UnknownSharding(name)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether an elementwise operation broadcasts ``shape`` to ``to``: scalars and dims of 1 do."""
    return not shape or (len(shape) == len(to) and all(a in (b, 1) for a, b in zip(shape, to, strict=True)))


def _dot(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    (lhs_in, rhs_in), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    left, right = (x.spec or ((),) * len(x.shape) for x in reads[:2])
    dims = [left[i] or right[j] for i, j in zip(lhs_batch, rhs_batch, strict=True)]
    dims += [axes for i, axes in enumerate(left) if i not in (*lhs_in, *lhs_batch)]
    dims += [axes for i, axes in enumerate(right) if i not in (*rhs_in, *rhs_batch)]
    return _once(dims)


def _once(dims: Iterable[tuple[str, ...]]) -> Spec:
    """Keep each axis only in the first dim that has it."""
    seen: set[str] = set()
    found = []
    for axes in dims:
        found.append(() if seen & set(axes) else axes)
        seen |= set(axes)
    return tuple(found)


def _broadcast(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    dims: list[tuple[str, ...]] = [()] * len(out.shape)
    for i, axes in zip(params["broadcast_dimensions"], reads[0].spec or (), strict=False):
        dims[i] = axes
    return tuple(dims)


def _transpose(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    spec = reads[0].spec or ()
    return tuple(spec[i] for i in params["permutation"])


def _reduce(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    """Drop dims: those of a reduction, or of a squeeze."""
    dropped = params["axes"] if "axes" in params else params["dimensions"]
    return tuple(axes for i, axes in enumerate(reads[0].spec or ()) if i not in dropped)


def _stack(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    """Returns the operands' dims with a new dim, which is not sharded."""
    spec = merge([x.spec for x in reads], len(out.shape) - 1) or ((),) * (len(out.shape) - 1)
    return (*spec[: params["axis"]], (), *spec[params["axis"] :])


def _unstack(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    return tuple(axes for i, axes in enumerate(reads[0].spec or ()) if i != params["axis"])


def _same_dims(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    """Keep the axes of dims that keep their size: slices, pads, concatenations, updates."""
    same = [x for x in reads if len(x.shape) == len(out.shape)]
    specs = [
        tuple(axes if a == b else () for axes, a, b in zip(x.spec, x.shape, out.shape, strict=True))
        for x in same
        if x.spec is not None
    ]
    return merge(specs, len(out.shape)) or ((),) * len(out.shape)


def _update(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec | None:
    return reads[0].spec if reads[0].spec is not None else _same_dims(params, reads[:2], out, sizes)


def _scatter(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec | None:
    """As :func:`_update`; zeros, as in the gradient of a lookup, are sharded as the places and the rows added to them.

    The gradient of ``jnp.take_along_axis`` has a dim for each of the places' dims, which are the batch.
    """
    base, places, rows = reads[:3]
    numbers = params["dimension_numbers"]
    if base.spec is not None:
        return base.spec
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    dims: list[tuple[str, ...]] = [()] * len(out.shape)
    for dim, place in zip(batch, getattr(numbers, "scatter_indices_batching_dims", ()), strict=True):
        dims[dim] = places.spec[place] if places.spec is not None else ()
    window = (dim for dim in range(len(out.shape)) if dim not in (*batch, *numbers.inserted_window_dims))
    for dim, row in zip(window, numbers.update_window_dims, strict=True):
        if rows.spec is not None and rows.shape[row] == out.shape[dim]:
            dims[dim] = rows.spec[row]
    return _once(dims)


def _reshape(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    spec = reads[0].spec or ()
    dims: list[tuple[str, ...]] = [()] * len(out.shape)
    for before, after in _groups(reads[0].shape, out.shape):
        # When dims are joined or split, the major dim carries the axes.
        major = next((i for i in before if reads[0].shape[i] > 1), None)
        target = next((i for i in after if out.shape[i] > 1), None)
        if major is None or target is None:
            continue
        if out.shape[target] % shard_count(spec[major], sizes) == 0:
            dims[target] = spec[major]
    return tuple(dims)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Returns the smallest runs of dims with equal products.

    >>> list(_groups((4, 6, 5), (4, 2, 3, 5)))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    i = j = 0
    while i < len(before) and j < len(after):
        left, right, a, b = [i], [j], before[i], after[j]
        while a != b:
            if a < b and i + 1 < len(before):
                i += 1
                left.append(i)
                a *= before[i]
            elif b < a and j + 1 < len(after):
                j += 1
                right.append(j)
                b *= after[j]
            else:
                return
        yield left, right
        i, j = i + 1, j + 1


def _gather(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    numbers, (table, places) = params["dimension_numbers"], reads[:2]
    collapsed = (*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ()))
    kept = [i for i in range(len(table.shape)) if i not in collapsed]
    window = dict(zip(numbers.offset_dims, kept, strict=True))
    batch = iter(places.spec or ((),) * len(places.shape))
    dims = []
    for i in range(len(out.shape)):
        if i in window:
            whole = params["slice_sizes"][window[i]] == table.shape[window[i]]
            dims.append(table.spec[window[i]] if table.spec is not None and whole else ())
        else:
            dims.append(next(batch))
    # An axis of a window dim and of a batch dim stays on the batch dim.
    taken = {axis for i, axes in enumerate(dims) if i not in window for axis in axes}
    return _once(() if i in window and taken & set(axes) else axes for i, axes in enumerate(dims))


def _collective(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    """Keep the operand's spec: collectives run inside a ``shard_map`` and do not affect the other axes."""
    return reads[0].spec or ((),) * len(out.shape)


def _kernel(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    """Returns a replicated spec: outside of a ``shard_map``, the compiler cannot partition a kernel."""
    if any(any(x.spec or ()) for x in reads):
        raise UnknownSharding("pallas_call")
    return ((),) * len(out.shape)


def _conv(params: Mapping[str, Any], reads: Sequence[_Array], out: _Array, sizes: Mapping[str, int]) -> Spec:
    numbers = params["dimension_numbers"]
    dims: list[tuple[str, ...]] = [()] * len(out.shape)
    for x, side, i, o in ((reads[0], numbers.lhs_spec, 0, 0), (reads[1], numbers.rhs_spec, 0, 1)):
        if x.spec is not None:
            dims[numbers.out_spec[o]] = x.spec[side[i]]
    return _once(dims)


_RULES: dict[str, Any] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _reduce,
    "stack": _stack,
    "unstack": _unstack,
    "expand_dims": _reshape,
    "reshape": _reshape,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "dynamic_update_slice": _update,
    "pallas_call": _kernel,
}
_RESIZED = ("slice", "dynamic_slice", "pad", "concatenate", "split", "top_k", "select_and_scatter_add")
_RULES |= dict.fromkeys(_RESIZED, _same_dims)
_COLLECTIVES = ("all_gather", "all_to_all", "psum", "psum_invariant", "psum_scatter", "reduce_scatter", "ppermute")
_RULES |= dict.fromkeys((*_COLLECTIVES, "all_gather_invariant"), _collective)
