"""Walks a traced program and finds which dims of its values must be sharded alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.planning.names.dim_classes import DimClasses, Use
from jaxpar.planning.names.primitive_rules import RULES, Operation, TracedValue
from jaxpar.sharding.names import Names
from jaxpar.utils.jaxprs import opened, scan_counts

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr"}
_CALLS |= {"checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_CALLS |= {"eval_jaxpr": "call_jaxpr"}
_NO_DIMS = frozenset((
    "random_seed", "random_bits", "random_wrap", "random_unwrap", "random_fold_in", "random_split",
    "random_clone", "threefry2x32", "full", "empty", "empty2", "axis_index", "rng_bit_generator", "rng_uniform",
))  # fmt: skip
_CHOICES = frozenset(("argmax", "argmin", "top_k", "approx_top_k", "sort", "cumsum"))
"""Primitives whose results are other numbers than those of the batch."""

NamesOfValue = Callable[[TracedValue], Names]
"""The names of a value's dims, ``None`` for those that are not known."""


@dataclass(eq=False, slots=True)
class Visited:
    """An equation with the values that it reads and makes, and those inside the jaxprs that it calls.

    ``inner`` has a list for each jaxpr, after the name of its parameter and its index there, if that is a tuple. The
    same jaxpr may be called twice, with other dims.
    """

    eqn: JaxprEqn
    reads: list[TracedValue]
    makes: list[TracedValue]
    inner: list[tuple[str, int | None, list[Visited]]] = field(default_factory=list)


@dataclass
class Propagation:
    """The dims of a program's values.

    Attributes:
      classes: the union-find of dims.
      values: every value that the program makes.
      unknown: how often each primitive occurs through which no dims are followed.
      activations: the places in ``values`` of those that depend on no data, and yet are activations.
    """

    activations: frozenset[int] = frozenset()
    classes: DimClasses = field(default_factory=DimClasses)
    values: list[TracedValue] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)

    def of_each_row(self, rows: Collection[int]) -> frozenset[int]:
        """Returns the places of values that are made of weights for each row of the batch, as repeated queries are.

        Args:
          rows: the classes of the batch's rows.
        """
        has_rows = lambda x: any(atom in rows for dim in x.dims for atom in self.classes.flat(dim))
        return frozenset(place for place, x in enumerate(self.values) if x.weight and has_rows(x))

    def value(self, aval: Any, *, data: bool = False, weight: bool = False) -> TracedValue:
        """Returns a value that nothing is known of."""
        shape = _shape(aval)
        return TracedValue([self.classes.new(size) for size in shape], shape, data, weight)

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[TracedValue]) -> tuple[list[TracedValue], list[Visited]]:
        """Follow the dims through a jaxpr. Returns its results and its equations in order."""
        jaxpr, visited = opened(jaxpr), []
        known = dict(zip(jaxpr.invars, args, strict=True))
        known |= {var: self.value(var.aval) for var in jaxpr.constvars}
        get = lambda atom: self.value(atom.aval) if isinstance(atom, Literal) else known[atom]
        for eqn in jaxpr.eqns:
            step = self._equation(eqn, [get(atom) for atom in eqn.invars])
            known |= zip(eqn.outvars, step.makes, strict=True)
            self.values += step.makes
            visited.append(step)
        return [get(atom) for atom in jaxpr.outvars], visited

    def _equation(self, eqn: JaxprEqn, reads: list[TracedValue]) -> Visited:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            makes, visited = self.run(params[_CALLS[name]], reads)
            return Visited(eqn, reads, makes, [(_CALLS[name], None, visited)])
        if name == "scan":
            return self._scan(eqn, reads)
        if name == "while":
            return self._while(eqn, reads)
        if name == "cond":
            return self._cond(eqn, reads)
        data, weight = any(x.data for x in reads), any(x.weight for x in reads)
        numbers = data and all(x.numbers for x in reads if x.data) and name not in _CHOICES
        makes = [self.value(var.aval, data=data, weight=weight and not data) for var in eqn.outvars]
        for place, out in enumerate(makes, len(self.values)):
            out.numbers = numbers
            if place in self.activations:
                out.data, out.weight = True, False
        if name in RULES:
            RULES[name](Operation(self.classes, name, params, reads, makes))
        elif name not in _NO_DIMS:
            self.unknown[name] += 1
        return Visited(eqn, reads, makes)

    def _scan(self, eqn: JaxprEqn, reads: list[TracedValue]) -> Visited:
        length = eqn.params["length"]
        steps = self.classes.new(length)
        self.classes.mark(steps, Use.SCANNED)
        consts, carries = scan_counts(eqn)
        data = any(x.data for x in reads)
        args = []
        for i, x in enumerate(reads):
            over = i >= consts + carries
            if over:
                self.classes.unite(x.dims[0], steps)
            carried = consts <= i and not over
            depends = x.data or (carried and data)
            args.append(TracedValue(x.dims[over:], x.shape[over:], depends, x.weight and not depends, x.numbers))
        outs, visited = self.run(eqn.params["jaxpr"], args)
        self._unite_all(args[consts : consts + carries], outs[:carries])
        makes = outs[:carries] + [
            TracedValue([steps, *y.dims], (length, *y.shape), y.data, y.weight) for y in outs[carries:]
        ]
        return Visited(eqn, reads, makes, [("jaxpr", None, visited)])

    def _while(self, eqn: JaxprEqn, reads: list[TracedValue]) -> Visited:
        first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        outs, visited = self.run(eqn.params["body_jaxpr"], reads[first:])
        self._unite_all(reads[first + consts :], outs)
        return Visited(eqn, reads, outs, [("body_jaxpr", None, visited)])

    def _cond(self, eqn: JaxprEqn, reads: list[TracedValue]) -> Visited:
        step = Visited(eqn, reads, [])
        for i, branch in enumerate(eqn.params["branches"]):
            outs, visited = self.run(branch, reads[1:])
            step.inner.append(("branches", i, visited))
            self._unite_all(step.makes, outs[: len(step.makes)])
            step.makes = step.makes or outs
        return step

    def _unite_all(self, left: Sequence[TracedValue], right: Sequence[TracedValue]) -> None:
        for x, y in zip(left, right, strict=True):
            Operation(self.classes, "", {}, [], []).same(x.dims, y.dims)


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))
