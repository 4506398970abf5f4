"""``operator_graph``: the operators of a traced loss, and the arrays between them.

Matmuls, convolutions and lookups are operators, and so are elementwise operations of several operators' results, such
as residual connections. Everything else that follows one operator is a part of it: norms, activations, softmax,
reshapes. An array of the batch is an operator without operands, and so is a parameter that several operators read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxpar.planning.names.dim_classes import Dim
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.names.propagate import Visited
from jaxpar.planning.operators.graph import DimArray, Edge, Operand, Operator, OperatorGraph
from jaxpar.training.model import part_of
from jaxpar.utils.jaxprs import opened, scan_counts

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def operator_graph(program: NamedProgram, keep: Iterable[str] = ()) -> OperatorGraph:
    """Returns the operators of a traced loss.

    Args:
      program: the loss.
      keep: paths of parameters that are operators of the graph even if only one operator reads them.
    """
    trace = _Trace(program)
    known = {
        var: _Source(trace.input(path, value, aval))
        for var, (path, value), aval in zip(
            program.jaxpr.jaxpr.invars, program.inputs.items(), program.jaxpr.in_avals, strict=True
        )
        if part_of(path) in ("params", "batch")
    }
    trace.walk(program.jaxpr.jaxpr, program.visited, known, 1)
    return trace.graph(frozenset(keep))


@dataclass(eq=False)
class _Source:
    """The operator that makes a value.

    Attributes:
      of: its place.
      times: how often the value is made in a step.
      uses: places of the edges that read the value.
    """

    of: int
    times: int = 1
    uses: list[int] = field(default_factory=list)


type _Known = dict[Any, _Source]


@dataclass
class _Trace:
    """The graph while the program is read."""

    program: NamedProgram
    operators: list[Operator] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def input(self, path: str, value: TracedValue, aval: Any) -> int:
        """Add a parameter or an array of the batch."""
        array = self._array(value, _itemsize(aval))
        self.operators.append(Operator(path, _sizes(array), (), array, path=path))
        return len(self.operators) - 1

    def walk(self, jaxpr: Jaxpr, visited: Sequence[Visited], known: _Known, times: int) -> None:
        """Read the equations of a jaxpr; ``known`` has the sources of its variables and takes those of its results."""
        for step in visited:
            if step.inner:
                self._inside(step, known, times)
            else:
                sources = [known.get(x) if not isinstance(x, Literal) else None for x in step.eqn.invars]
                made = self._read(step, sources, times)
                if made is not None:
                    known |= dict.fromkeys(step.eqn.outvars, made)

    def _inside(self, step: Visited, known: _Known, times: int) -> None:
        """Read the jaxprs that an equation calls, loops over or chooses from."""
        params, name = step.eqn.params, step.eqn.primitive.name
        outer = [known.get(x) if not isinstance(x, Literal) else None for x in step.eqn.invars]
        skip = params["cond_nconsts"] if name == "while" else 1 if name == "cond" else 0
        for key, index, visited in step.inner:
            inner = opened(params[key] if index is None else params[key][index])
            given = outer[skip:]
            loop = _Loop(params["length"], *scan_counts(step.eqn)) if name == "scan" else None
            if loop is not None:
                given = [loop.inside(i, source) for i, source in enumerate(given)]
            own = {var: s for var, s in zip(inner.invars, given, strict=True) if s is not None}
            self.walk(inner, visited, own, times * (loop.length if loop else 1))
            results = [own.get(x) if not isinstance(x, Literal) else None for x in inner.outvars]
            for i, (var, source) in enumerate(zip(step.eqn.outvars, results, strict=False)):
                if source is None:
                    continue
                if loop is not None and i < loop.carries:
                    before = given[loop.consts + i]
                    self._again(before, source, times * (loop.length - 1))
                    source = _Source(source.of, times)
                known.setdefault(var, source)

    def _again(self, before: _Source | None, after: _Source, times: int) -> None:
        """Hand a loop's result to what reads it in the next run."""
        if before is None or before.of == after.of or times < 1:
            return
        for place in before.uses:
            edge = self.edges[place]
            self.edges.append(replace(edge, source=after.of, times=times))

    def _read(self, step: Visited, sources: Sequence[_Source | None], times: int) -> _Source | None:
        """Read an equation. Returns the source of its results."""
        made = {s.of: s for s in sources if s is not None}
        name = step.eqn.primitive.name
        product = name in _PRODUCTS or (name == "gather" and step.reads[0].weight and step.makes[0].data)
        if product and made:
            return self._operator(step, sources, times)
        results = [s for i, s in made.items() if not self.operators[i].path]
        arrays = [s for i, s in made.items() if part_of(self.operators[i].path) == "batch"]
        joined = [*results, *(s for s in arrays if not results or not self._whole_numbers(s))]
        if len(joined) > 1:
            return self._operator(step, sources, times)
        return joined[0] if joined else next(iter(made.values()), None)

    def _whole_numbers(self, source: _Source) -> bool:
        return self.program.inputs[self.operators[source.of].path].numbers

    def _operator(self, step: Visited, sources: Sequence[_Source | None], times: int) -> _Source:
        avals: list[Any] = [x.aval for x in step.eqn.invars]
        result = self._array(step.makes[0], _itemsize(step.eqn.outvars[0].aval))
        matmul = step.eqn.primitive.name in ("dot_general", "ragged_dot_general")
        repeated = _repeated(step, self._names) if matmul else ()
        place, operands, title = len(self.operators), list[Operand](), step.eqn.primitive.name
        for k, (value, source, aval) in enumerate(zip(step.reads, sources, avals, strict=True)):
            if source is None:
                continue
            path = self.operators[source.of].path
            title = path if part_of(path) == "params" else title
            gradient = np.issubdtype(aval.dtype, np.inexact) and part_of(path) != "batch"
            array = self._array(value, _itemsize(aval), repeated[k] if k < len(repeated) else frozenset())
            operands.append(Operand(array.names, array.sizes, array.itemsize, differentiable=gradient))
            source.uses.append(len(self.edges))
            self.edges.append(Edge(source.of, place, operands[-1], min(source.times, times), gradient))
        sizes = _sizes(result, *operands)
        self.operators.append(Operator(title, sizes, tuple(operands), result, _flops(step), times))
        return _Source(place, times)

    def _names(self, dim: Dim) -> set[str]:
        flat = self.program.names.classes.flat(dim)
        return {name for atom in flat if (name := self.program.names.of((atom,)).name) is not None}

    def graph(self, keep: frozenset[str]) -> OperatorGraph:
        """The graph without parameters that one operator reads, and with the sharers of activations."""
        readers: dict[int, set[int]] = {i: set() for i in range(len(self.operators))}
        for edge in self.edges:
            readers[edge.source].add(edge.target)
        operators = self._with_sharers()
        enough = {i: 1 if part_of(o.path) == "batch" else 2 if o.path else 0 for i, o in enumerate(operators)}
        left = [i for i, o in enumerate(operators) if o.path in keep or len(readers[i]) >= enough[i]]
        place = {i: k for k, i in enumerate(left)}
        edges = [replace(e, source=place[e.source], target=place[e.target]) for e in self.edges if e.source in place]
        return OperatorGraph(tuple(operators[i] for i in left), tuple(edges))

    def _with_sharers(self) -> list[Operator]:
        """The operators; of each activation that is multiplied with weights, how many of them read it."""
        weights = {i for i, o in enumerate(self.operators) if part_of(o.path) == "params"}
        weighted = {e.target for e in self.edges if e.source in weights}
        runs = [o.times for o in self.operators]  # what reads a loop's result after it does not share with its body
        read = [(e.source, e.array, runs[e.target]) for e in self.edges]
        sharers = Counter(
            key for key, e in zip(read, self.edges, strict=True) if e.target in weighted and e.source not in weights
        )
        found = list(self.operators)
        for key, e in zip(read, self.edges, strict=True):
            count = sharers[key]
            if e.target in weighted and count > 1:
                o = found[e.target]
                same = tuple(replace(x, sharers=count) if x is e.array else x for x in o.operands)
                found[e.target] = replace(o, operands=same)
        return found

    def _array(self, value: TracedValue, itemsize: int, repeated: frozenset[int] = frozenset()) -> DimArray:
        """An array by its named factors, each name at most once; dims that are ``repeated`` have no name."""
        names, sizes = list[str | None](), list[int]()
        for i, dim in enumerate(value.dims):
            for atom in self.program.names.classes.flat(dim):
                name, size = self.program.names.of((atom,)).name, self.program.names.classes.sizes[atom]
                names.append(None if i in repeated or name in names else name)
                sizes.append(size)
        return DimArray(tuple(names), tuple(sizes), itemsize)


@dataclass(frozen=True)
class _Loop:
    """How a scan hands values to its body.

    Attributes:
      length: its runs.
      consts, carries: how many of its operands are the same in every run, and how many results are handed on.
    """

    length: int
    consts: int
    carries: int

    def inside(self, i: int, source: _Source | None) -> _Source | None:
        """The source of the body's operand ``i``."""
        if source is None:
            return None
        stacked = i >= self.consts + self.carries
        return _Source(source.of, source.times * (self.length if stacked else 1))


def _itemsize(aval: Any) -> int:
    return int(aval.dtype.itemsize)


def _repeated(step: Visited, names_of: Callable[[Dim], set[str]]) -> tuple[frozenset[int], frozenset[int]]:
    """The dims of a matmul's operands whose names other dims have before them, as the sequence of keys has.

    In scores ``[queries, keys]`` both dims may have the name ``seq``; only that of the queries is sharded.
    """
    left, right = step.reads[:2]
    numbers = step.eqn.params.get("dimension_numbers") or step.eqn.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = getattr(numbers, "dot_dimension_numbers", numbers)
    roles: list[list[tuple[int | None, int | None]]] = [
        list(zip(left_batch, right_batch, strict=True)),
        [(i, None) for i in range(len(left.dims)) if i not in (*left_sum, *left_batch)],
        [(None, j) for j in range(len(right.dims)) if j not in (*right_sum, *right_batch)],
        list(zip(left_sum, right_sum, strict=True)),
    ]
    seen: set[str] = set()
    lost: tuple[set[int], set[int]] = (set(), set())
    for role in roles:
        added: set[str] = set()
        for i, j in role:
            names = names_of(left.dims[i] if i is not None else right.dims[j or 0])
            if names & seen:
                lost[0].update(() if i is None else (i,))
                lost[1].update(() if j is None else (j,))
            added |= names
        seen |= added
    return frozenset(lost[0]), frozenset(lost[1])


def _sizes(*arrays: DimArray) -> dict[str, int]:
    """The dims of arrays, each with the largest number that divides all its sizes."""
    found: dict[str, int] = {}
    for array in arrays:
        for name, size in zip(array.names, array.sizes, strict=True):
            if name is not None:
                found[name] = math.gcd(found.get(name, size), size)
    return {name: size for name, size in found.items() if size > 1}


def _flops(step: Visited) -> float:
    name, params = step.eqn.primitive.name, step.eqn.params
    if name not in _PRODUCTS:
        return 0.0
    left, right, made = step.reads[0].shape, step.reads[1].shape, math.prod(step.makes[0].shape)
    if name == "conv_general_dilated":
        return 2.0 * made * math.prod(right) / right[params["dimension_numbers"].rhs_spec[0]]
    numbers = params.get("dimension_numbers") or params["ragged_dot_dimension_numbers"]
    summed = getattr(numbers, "dot_dimension_numbers", numbers)[0][0]
    return 2.0 * made * math.prod(left[i] for i in summed)
