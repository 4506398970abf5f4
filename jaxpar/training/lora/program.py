"""Runs a loss with adapters, without a gradient of the size of a weight.

A product of an array with the weight ``w + scale * a @ b`` becomes a product with ``w`` and one with ``a`` and ``b``.
The loss of the model without adapters is traced, and its equations are run with :class:`LowRank` values in place of the
weights. They are followed through casts, transposes, reshapes, slices, gathers of sharded weights, scans, recomputed
layers and jitted functions. Where a weight is used in any other way, it is the sum, inside the layer that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpar.errors import ConfigError
from jaxpar.parallel.collectives.gather_reduce import current_precision
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.training.lora.low_rank import (
    RANK,
    LowRank,
    concatenated,
    low_rank,
    parts,
    product,
    reshaped,
    sliced,
    transposed,
    without_dims,
)
from jaxpar.training.model.lora import CARRIED, LoraKind, adapter_of
from jaxpar.training.model.parts import FROZEN, Path, map_with_paths
from jaxpar.utils.jaxprs import opened, scan_counts, with_inlined

type Program = Callable[..., Any]
_UNCHANGED = frozenset(("sharding_constraint", "optimization_barrier", "copy", "copy_p", "name", "device_put"))
"""Primitives whose results have the values of their operands, which may be several."""


def with_adapters(run: Program, kind: LoraKind) -> Program:
    """Returns the loss of an adapted model, as a function of arrays.

    Args:
      run: ``run(params, variables, batch, extra) -> (loss, (aux, carried))`` of the model without adapters.
      kind: the adapted model.

    Raises (when called):
      ConfigError: adapters are in host memory.
    """

    def adapted(params: Any, variables: Any, batch: Any, extra: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
        if any(map(on_host, jax.tree.leaves(params))):
            raise ConfigError(
                "lora: adapters are parameters in host memory, which a step with adapters does not read. Remedy: "
                "offload only the optimizer state."
            )
        frozen = jax.tree.map(current_precision().computing, variables[FROZEN])
        if jax.config.jax_disable_jit:  # it is used to inspect values, which a traced program does not have
            merged = kind.merged(params, {FROZEN: frozen})
            loss, (aux, carried) = run(merged, variables[CARRIED], batch, extra)
            return loss, (aux, {FROZEN: variables[FROZEN], CARRIED: carried})
        found = {adapter.path: (adapter, *adapter_of(params, adapter)) for adapter in kind.adapters}

        def with_adapter(path: Path, w: Any) -> Any:
            if path not in found:
                return w
            adapter, a, b = found[path]
            return low_rank(w, a, b, *adapter.labels(RANK), kind.scale)

        weights = map_with_paths(with_adapter, frozen)
        loss, (aux, carried) = run_with_low_rank(run, weights, variables[CARRIED], batch, extra)
        return loss, (aux, {FROZEN: variables[FROZEN], CARRIED: carried})

    return adapted


def run_with_low_rank(run: Program, weights: Any, *arguments: Any) -> Any:
    """Returns ``run(weights, *arguments)``, without a sum of the size of a weight where a product of two suffices.

    Args:
      run: a function of arrays.
      weights: a tree of arrays and :class:`LowRank` values; ``run`` is traced with arrays of their shapes.
      arguments: trees of arrays.
    """
    is_pair = lambda x: isinstance(x, LowRank)
    leaves, structure = jax.tree.flatten(weights, is_leaf=is_pair)
    plain = jax.tree.unflatten(structure, [x.w if is_pair(x) else x for x in leaves])
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(plain, *arguments)
    traced = with_inlined(traced)
    results = LowRankRun(opened(traced), getattr(traced, "consts", ())).run([*leaves, *jax.tree.leaves(arguments)])
    return jax.tree.unflatten(jax.tree.structure(shapes), [_array(x) for x in results])


def _array(x: Any) -> Any:
    return x.merged() if isinstance(x, LowRank) else x


class LowRankRun:
    """One run of a jaxpr with values some of which are :class:`LowRank`.

    Args:
      jaxpr: the program.
      consts: the values of its constants.
      needed: which of its results are needed; by default all. The others are ``None``.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any] = (), needed: Sequence[bool] | None = None):
        self._jaxpr, self._consts = jaxpr, consts
        self._results = [atom for i, atom in enumerate(jaxpr.outvars) if needed is None or needed[i]]
        self._needed = needed
        self._values: dict[Any, Any] = {}
        self._pending: list[JaxprEqn] = []
        self._gathered = {atom for eqn in jaxpr.eqns if _is_name(eqn) for atom in eqn.invars if isinstance(atom, Var)}

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Returns the results for these arguments."""
        self._values |= zip(self._jaxpr.constvars, self._consts, strict=True)
        self._values |= zip(self._jaxpr.invars, values, strict=True)
        for eqn, live in _live(self._jaxpr, self._results):
            # Only results of equations that are pending are not known yet, and these are arrays.
            if not any(isinstance(self._values.get(atom), LowRank) for atom in eqn.invars if isinstance(atom, Var)):
                self._pending.append(eqn)
                continue
            self._flush()
            results = self._rule(eqn, [self._read(atom) for atom in eqn.invars], live)
            self._values |= zip(eqn.outvars, results, strict=True)
        self._flush()
        kept = iter([self._read(atom) for atom in self._results])
        return [
            next(kept) if self._needed is None or on else None for on in self._needed or [True] * len(self._results)
        ]

    def _read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self._values[atom]

    def _flush(self) -> None:
        """Run the pending equations, all of whose operands are arrays."""
        if self._pending:
            made = [var for eqn in self._pending for var in eqn.outvars if type(var) is Var]
            self._values |= zip(made, self._bound(self._pending, made, self._read), strict=True)
            self._pending = []

    def _bound(self, eqns: Sequence[JaxprEqn], made: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
        own = {var for eqn in eqns for var in eqn.outvars}
        reads = list(dict.fromkeys(a for eqn in eqns for a in eqn.invars if isinstance(a, Var) and a not in own))
        part = self._jaxpr.replace(eqns=list(eqns), invars=reads, outvars=list(made), constvars=())
        closed = part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, ())
        return list(jaxpr_as_fun(closed)(*map(read, reads)))

    def _alone(self, eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        """Returns the results of one equation for arrays."""
        given = {atom: x for atom, x in zip(eqn.invars, values, strict=True) if isinstance(atom, Var)}
        made = [var for var in eqn.outvars if type(var) is Var]
        results = iter(self._bound([eqn], made, given.__getitem__))
        return [next(results) if type(var) is Var else None for var in eqn.outvars]

    def _rule(self, eqn: JaxprEqn, values: list[Any], live: list[bool]) -> list[Any]:
        """Returns the results of an equation with weights among its operands."""
        name, params = eqn.primitive.name, eqn.params
        if name in _UNCHANGED:
            plain = self._alone(eqn, [x.w if isinstance(x, LowRank) else x for x in values])
            return [_with(x, w) for x, w in zip(values, plain, strict=True)]
        if name == "scan":
            return _scan(eqn, values, live)
        if name in ("remat2", "checkpoint"):
            body = opened(params["jaxpr"])
            given = {i: values[body.invars.index(v)] for i, v in enumerate(body.outvars) if v in body.invars}
            needed = [on and i not in given for i, on in enumerate(live)]
            again = jax.checkpoint(
                lambda *xs: LowRankRun(body, (), needed).run(xs),
                prevent_cse=params["prevent_cse"],
                policy=params["policy"],
            )
            return [given.get(i, x) for i, x in enumerate(again(*values))]
        if name in ("jit", "pjit", "closed_call", "core_call"):
            body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return LowRankRun(opened(body), getattr(body, "consts", ()), live).run(values)
        if name.startswith("custom_vjp_call"):
            found = self._custom_vjp(eqn, values, live)
        else:
            found = self._single(eqn, values)
        return self._alone(eqn, [_array(x) for x in values]) if found is None else found

    def _custom_vjp(self, eqn: JaxprEqn, values: list[Any], live: list[bool]) -> list[Any] | None:
        """A gather of sharded weights, a product with gathered ones, or a weight from host memory; else ``None``.

        Their own derivatives are about gradients of the weights, which are frozen here.
        """
        body = eqn.params.get("call_jaxpr")
        if body is None:
            return None
        inside = LowRankRun(opened(body), getattr(body, "consts", ()), live)
        if inside._gathered or any(eqn.primitive.name == "device_put" for eqn in opened(body).eqns):
            return inside.run(values)
        if len(eqn.outvars) != 1 or eqn.outvars[0] not in self._gathered:
            return None
        (moved,) = inside.run(values)
        (w,) = self._alone(eqn, [x.w if isinstance(x, LowRank) else x for x in values])
        return [_with(moved, w)] if isinstance(moved, LowRank) else None

    def _single(self, eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
        """The results of a primitive that moves or multiplies a weight; ``None`` for others."""
        name, params = eqn.primitive.name, eqn.params
        first = values[0]
        if name == "dot_general":
            return self._dot(eqn, values)
        if name == "concatenate":
            joined = self._alone(eqn, [x.w if isinstance(x, LowRank) else x for x in values])[0]
            found = concatenated(values, joined, params["dimension"])
            return None if found is None else [found]
        if not isinstance(first, LowRank) or any(isinstance(x, LowRank) for x in values[1:]):
            return None
        if name == "convert_element_type":
            return [first.map(lambda x: x.astype(params["new_dtype"]))]
        if name not in ("transpose", "squeeze", "reshape", "slice", "dynamic_slice", "split", "unstack"):
            return None
        w, *others = self._alone(eqn, [first.w, *values[1:]])
        if name in ("split", "unstack"):
            return parts(first, [w, *others], params["axis"])
        if name == "transpose":
            return [transposed(first, w, params["permutation"])]
        if name == "squeeze":
            return [without_dims(first, w, params["dimensions"])]
        if name == "dynamic_slice":
            return [sliced(first, w, values[1:], params["slice_sizes"])]
        if name == "slice" and params["strides"] is None:
            return [sliced(first, w, params["start_indices"], w.shape)]
        found = reshaped(first, w) if name == "reshape" and params["dimensions"] is None else None
        return None if found is None else [found]

    def _dot(self, eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
        left, right = values
        if isinstance(left, LowRank) and isinstance(right, LowRank):
            return None
        is_left = isinstance(left, LowRank)
        weight, x = (left, right) if is_left else (right, left)
        out, params = eqn.outvars[0].aval, eqn.params
        added = product(x, weight, params["dimension_numbers"], is_left, out, params["precision"])
        if added is None:
            return None
        (plain,) = self._alone(eqn, [weight.w, x] if is_left else [x, weight.w])
        return [plain + added]


def _with(x: Any, w: Any) -> Any:
    """Returns ``w``, with the adapter of ``x`` if it has one."""
    return LowRank(w, x.a, x.b, x.a_dims, x.b_dims, x.scale) if isinstance(x, LowRank) else w


def _is_name(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == GATHERED


def _live(jaxpr: Jaxpr, results: Sequence[Any]) -> list[tuple[JaxprEqn, list[bool]]]:
    """Returns the equations that the results need, in order, and which of their own results are needed."""
    needed = {atom for atom in results if isinstance(atom, Var)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        live = [var in needed for var in eqn.outvars]
        if any(live) or eqn.effects:
            found.append((eqn, live))
            needed |= {atom for atom in eqn.invars if isinstance(atom, Var)}
    return found[::-1]


def _scan(eqn: JaxprEqn, values: Sequence[Any], live: Sequence[bool]) -> list[Any]:
    """Returns the results of a scan: weights among its constants stay, those that it scans over are cut into layers."""
    body, params = eqn.params["jaxpr"], eqn.params
    consts, carries = scan_counts(eqn)
    fixed, carry, scanned = values[:consts], values[consts : consts + carries], values[consts + carries :]
    cut = [_cut(x) for x in scanned]
    needed = [i < carries or on for i, on in enumerate(live)]

    unchanged: dict[int, Any] = {}

    def step(carry: Any, arrays: Any) -> Any:
        rows = [row(x) for (_, row), x in zip(cut, arrays, strict=True)]
        results = LowRankRun(opened(body), getattr(body, "consts", ()), needed).run([*fixed, *carry, *rows])
        for i, x in enumerate(results):
            same = next((j for j, row in enumerate(rows) if row is x and isinstance(x, LowRank)), None)
            if i >= carries and same is not None:
                unchanged[i], results[i] = scanned[same], None
        return [_array(x) for x in results[:carries]], [_array(x) for x in results[carries:]]

    arrays = [xs for xs, _ in cut]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacks = jax.lax.scan(step, [_array(x) for x in carry], arrays, **options)
    return [unchanged.get(i, x) for i, x in enumerate([*last, *stacks])]


def _cut(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the arrays to scan over, and a function from their rows to a row of ``x``."""
    if not isinstance(x, LowRank):
        return x, lambda row: row
    over_a, over_b = 0 in x.a_dims, 0 in x.b_dims
    less = lambda dims: tuple(dim - 1 for dim in dims if dim)

    def row(arrays: tuple[Any, ...]) -> LowRank:
        w, *rest = arrays
        rows = iter(rest)
        a, b = next(rows) if over_a else x.a, next(rows) if over_b else x.b
        return LowRank(w, a, b, less(x.a_dims), less(x.b_dims), x.scale)

    return (x.w, *([x.a] if over_a else []), *([x.b] if over_b else [])), row
