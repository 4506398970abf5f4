"""Which mesh axes may shard each dim of a traced program, as sharding propagates from constraints in both directions.

The partitioner decides when it compiles; a trace has only the shardings of arguments and of constraints. Dims between
which an operation can pass a sharding are therefore one class, and each axis that a member names may shard all of them.
Types of Explicit axes name the shardings themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec

from jaxpar.sharding.rules import Axes
from jaxpar.utils.jaxprs import explicit_sharding, inner_jaxprs, opened, scan_counts, sizes_of

type VarDim = tuple[Any, int]
"""A dim of a variable."""

type DimPair = tuple[VarDim, VarDim]


class MayShard:
    """The axes that may shard each dim of a program's variables.

    Args:
      jaxpr: the program.
      specs: of each argument, ``None`` where it is not known to be sharded.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: jax.numpy.sin(x).T @ y)(*[jax.numpy.ones((8, 8))] * 2).jaxpr
    >>> shards = MayShard(jaxpr, [PartitionSpec("data", "model"), None])
    >>> shards.axes(jaxpr.outvars[0], 0), shards.axes(jaxpr.outvars[0], 1)
    (frozenset({('model',)}), frozenset())
    """

    def __init__(self, jaxpr: Jaxpr, specs: Sequence[PartitionSpec | None] = ()):
        self._parent: dict[VarDim, VarDim] = {}
        self._seeds: dict[VarDim, set[Axes]] = {}
        for var, spec in zip(jaxpr.invars, specs, strict=False):
            self._seed(var, spec)
        self._visit(jaxpr)

    def axes(self, atom: Any, dim: int) -> frozenset[Axes]:
        """Returns the tuples of axes by which a dim may be sharded; empty if it is whole."""
        if (sharding := explicit_sharding(atom)) is not None:
            entry = sharding.spec[dim] or ()
            return frozenset({(entry,) if isinstance(entry, str) else entry}) - {()}
        return frozenset(self._seeds.get(self._root((atom, dim)), ())) if isinstance(atom, Var) else frozenset()

    def _visit(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            for inner in inner_jaxprs(eqn):
                self._visit(opened(inner))
            for a, b in _links(eqn):
                if isinstance(a[0], Var) and isinstance(b[0], Var):
                    self._unite(a, b)
            if eqn.primitive.name == "sharding_constraint":
                self._seed(eqn.invars[0], _spec(eqn))  # sharding propagates backwards too
                self._seed(eqn.outvars[0], _spec(eqn))
            elif eqn.primitive.name == "shard_map":
                for var, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
                    self._seed(var, spec)
                for var, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True):
                    self._seed(var, spec)

    def _seed(self, atom: Any, spec: PartitionSpec | None) -> None:
        for dim, entry in enumerate(spec or ()):
            if isinstance(entry, str | tuple) and entry and isinstance(atom, Var):
                axes = (entry,) if isinstance(entry, str) else entry
                self._seeds.setdefault(self._root((atom, dim)), set()).add(axes)

    def _root(self, place: VarDim) -> VarDim:
        parent = self._parent
        while (above := parent.get(place, place)) != place:
            parent[place] = parent.get(above, above)
            place = above
        return place

    def _unite(self, a: VarDim, b: VarDim) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a
            if seeds := self._seeds.pop(b, None):
                self._seeds.setdefault(a, set()).update(seeds)


def _spec(eqn: JaxprEqn) -> PartitionSpec | None:
    return getattr(eqn.params["sharding"], "spec", None)


def _links(eqn: JaxprEqn) -> Iterable[DimPair]:
    """The pairs of dims between which an equation can pass a sharding."""
    return _RULES.get(eqn.primitive.name, _positions)(eqn)


def _pairs(a: Any, b: Any, dims: Iterable[tuple[int, int]]) -> Iterator[DimPair]:
    yield from (((a, i), (b, j)) for i, j in dims)


def _positions(eqn: JaxprEqn) -> Iterator[DimPair]:
    """Dims of one size at one place; of calls and loops the operands and results of their bodies."""
    inner = inner_jaxprs(eqn)
    if inner:
        yield from _calls(eqn, inner)
        return
    for out in eqn.outvars:
        for atom in eqn.invars:
            a, b = sizes_of(atom), sizes_of(out)
            if len(a) == len(b):
                yield from _pairs(atom, out, ((i, i) for i in range(len(a)) if a[i] == b[i]))


def _calls(eqn: JaxprEqn, inner: Sequence[Jaxpr | ClosedJaxpr]) -> Iterator[DimPair]:
    for body in map(opened, inner):
        ends: list[tuple[Sequence[Any], Sequence[Any]]] = [(eqn.invars, body.invars), (eqn.outvars, body.outvars)]
        for outside, inside in ends:
            for a, b in zip(outside[-len(inside) :] if inside else (), inside, strict=False):
                yield from _pairs(a, b, ((i, i) for i in range(min(len(sizes_of(a)), len(sizes_of(b))))))


def _constraint(eqn: JaxprEqn) -> Iterator[DimPair]:
    """Only dims that the constraint leaves to the compiler; it reshards the others, or makes them whole."""
    free = eqn.params.get("unconstrained_dims", ()) if _spec(eqn) is not None else ()
    yield from _pairs(eqn.invars[0], eqn.outvars[0], ((i, i) for i in free))


def _scan(eqn: JaxprEqn) -> Iterator[DimPair]:
    body, (consts, carries) = opened(eqn.params["jaxpr"]), scan_counts(eqn)
    ends: list[tuple[Sequence[Any], Sequence[Any], int]] = [
        (eqn.invars, body.invars, consts + carries),
        (eqn.outvars, body.outvars, carries),
    ]
    for outside, inside, whole in ends:
        for n, (a, b) in enumerate(zip(outside, inside, strict=True)):
            stacked = int(n >= whole)
            yield from _pairs(a, b, ((i + stacked, i) for i in range(len(sizes_of(b)))))
    for a, b in zip(body.invars[consts : consts + carries], body.outvars[:carries], strict=True):
        yield from _pairs(a, b, ((i, i) for i in range(len(sizes_of(b)))))


def _while(eqn: JaxprEqn) -> Iterator[DimPair]:
    first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body = opened(eqn.params["body_jaxpr"])
    same: list[tuple[Sequence[Any], Sequence[Any]]] = [
        (eqn.invars[first:], body.invars),
        (eqn.outvars, body.outvars),
        (body.invars[consts:], body.outvars),
        (eqn.invars[first + consts :], opened(eqn.params["cond_jaxpr"]).invars[first:]),
    ]
    for left, right in same:
        for a, b in zip(left, right, strict=True):
            yield from _pairs(a, b, ((i, i) for i in range(len(sizes_of(b)))))


def _windows(eqn: JaxprEqn) -> Iterator[DimPair]:
    """Dims at one place, of whatever sizes."""
    for out in eqn.outvars:
        for atom in eqn.invars:
            if len(sizes_of(atom)) == len(sizes_of(out)):
                yield from _pairs(atom, out, ((i, i) for i in range(len(sizes_of(out)))))


def _broadcast(eqn: JaxprEqn) -> Iterator[DimPair]:
    x, out = eqn.invars[0], eqn.outvars[0]
    places = enumerate(eqn.params["broadcast_dimensions"])
    yield from _pairs(x, out, ((i, k) for i, k in places if sizes_of(x)[i] == sizes_of(out)[k]))


def _transpose(eqn: JaxprEqn) -> Iterator[DimPair]:
    yield from _pairs(eqn.invars[0], eqn.outvars[0], ((i, k) for k, i in enumerate(eqn.params["permutation"])))


def _squeeze(eqn: JaxprEqn) -> Iterator[DimPair]:
    x = eqn.invars[0]
    gone = {dim % len(sizes_of(x)) for dim in eqn.params["dimensions"]}
    yield from _pairs(
        x, eqn.outvars[0], ((i, k) for k, i in enumerate(j for j in range(len(sizes_of(x))) if j not in gone))
    )


def _reduce(eqn: JaxprEqn) -> Iterator[DimPair]:
    axes = eqn.params.get("axes", ())
    for x, out in zip(eqn.invars, eqn.outvars, strict=False):
        left = [i for i in range(len(sizes_of(x))) if i not in axes]
        yield from _pairs(x, out, zip(left, range(len(sizes_of(out))), strict=False))


def _reshape(eqn: JaxprEqn) -> Iterator[DimPair]:
    """The major dims of each group of dims that become each other."""
    x, out = eqn.invars[0], eqn.outvars[0]
    a, b = ([(i, size) for i, size in enumerate(sizes_of(atom)) if size > 1] for atom in (x, out))
    while a and b:
        (i, left), (j, right) = a.pop(0), b.pop(0)
        yield (x, i), (out, j)
        while left != right:
            if left < right and a:
                left *= a.pop(0)[1]
            elif right < left and b:
                right *= b.pop(0)[1]
            else:
                return


def _dot_general(eqn: JaxprEqn) -> Iterator[DimPair]:
    (contracted, batch) = eqn.params["dimension_numbers"]
    (x, y), out = eqn.invars[:2], eqn.outvars[0]
    for left, right in (contracted, batch):
        yield from (((x, i), (y, j)) for i, j in zip(left, right, strict=True))
    free = [
        [(atom, i) for i in range(len(sizes_of(atom))) if i not in taken]
        for atom, taken in ((x, (*contracted[0], *batch[0])), (y, (*contracted[1], *batch[1])))
    ]
    for k, place in enumerate([*((x, i) for i in batch[0]), *free[0], *free[1]]):
        yield place, (out, k)


def _conv(eqn: JaxprEqn) -> Iterator[DimPair]:
    numbers, (x, w), out = eqn.params["dimension_numbers"], eqn.invars, eqn.outvars[0]
    lhs, rhs, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    yield (x, lhs[0]), (out, result[0])
    yield (x, lhs[1]), (w, rhs[1])
    yield (w, rhs[0]), (out, result[1])
    for i, j, k in zip(lhs[2:], rhs[2:], result[2:], strict=True):
        # The kernel's gradient has as many windows as the kernel numbers, and its own kernel is as large as the image.
        large = (x, i) if sizes_of(x)[i] > 1 else (out, k)
        yield large, ((out, k) if sizes_of(out)[k] > sizes_of(w)[j] else (w, j))


def _gather(eqn: JaxprEqn) -> Iterator[DimPair]:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    (x, indices), out = eqn.invars[:2], eqn.outvars[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(sizes_of(x))) if i not in gone]
    yield from _pairs(x, out, ((i, k) for i, k in zip(windows, numbers.offset_dims, strict=True) if sizes[i] > 1))
    rows = [k for k in range(len(sizes_of(out))) if k not in numbers.offset_dims]
    yield from _pairs(indices, out, zip(range(len(sizes_of(indices)) - 1), rows, strict=False))
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    yield from _pairs(x, indices, batching)


def _scatter(eqn: JaxprEqn) -> Iterator[DimPair]:
    numbers, (x, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    yield from _pairs(x, eqn.outvars[0], ((i, i) for i in range(len(sizes_of(x)))))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(sizes_of(x))) if i not in gone]
    yield from _pairs(x, updates, zip(windows, numbers.update_window_dims, strict=True))
    rows = [k for k in range(len(sizes_of(updates))) if k not in numbers.update_window_dims]
    yield from _pairs(indices, updates, zip(range(len(sizes_of(indices)) - 1), rows, strict=False))
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    yield from _pairs(x, indices, batching)


_RULES: dict[str, Callable[[JaxprEqn], Iterable[DimPair]]] = {
    "sharding_constraint": _constraint,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "scan": _scan,
    "while": _while,
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys((f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")), _reduce),
    **dict.fromkeys(
        ("scatter", *(f"scatter{sep}{kind}" for sep in "-_" for kind in ("add", "sub", "mul", "min", "max"))), _scatter
    ),
    **dict.fromkeys(
        (
            *(
                "concatenate",
                "pad",
                "slice",
                "dynamic_slice",
                "dynamic_update_slice",
                "split",
                "top_k",
                "reduce_window",
            ),
            *("reduce_window_max", "reduce_window_sum", "reduce_window_min", "select_and_scatter_add"),
            *("select_and_gather_add", "select_and_scatter", "sort"),
        ),
        _windows,
    ),
}
