"""A traced loss with a name for every dim: what ``annotate`` reports and what a step runs with constraints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from jaxpar.parallel.experts.options import dims_of_name
from jaxpar.planning.names.annotation import NamedArray
from jaxpar.planning.names.attention_sites import AttentionSite, all_sites, known_constants
from jaxpar.planning.names.constrain import constrained
from jaxpar.planning.names.dim_classes import DimClasses
from jaxpar.planning.names.fold import fold
from jaxpar.planning.names.given import Given, by_class
from jaxpar.planning.names.primitive_rules import TracedValue
from jaxpar.planning.names.propagate import Propagation, Visited
from jaxpar.planning.names.roles import SPACE, ClassNames, DimName, ProgramArrays, WeightProduct, name_classes
from jaxpar.sharding.names import Names
from jaxpar.training.loss import LossProgram
from jaxpar.training.model import leaves_with_paths, part_of, show
from jaxpar.utils.jaxprs import opened, with_inlined

_IN_MODEL = {"seq": "positions", **dict.fromkeys(SPACE, "features")}
"""Dims of the batch that a parameter has too: a row for each position, and the pixels of a patch."""


@dataclass
class NamedProgram:
    """A traced loss, its values and the names of their dims.

    Attributes:
      jaxpr: the trace, closed.
      out_tree: the structure of its results.
      visited: its equations with their values.
      inputs: the model's arrays, those of the batch, and the key, by path.
      outputs: its results.
      names: the names of all classes of dims.
      given: names that the user gave, by path.
      unknown: how often each primitive occurs through which no dims are followed.
      notes: classes that have several given names.
      hinted: the names that the model's hints use.
    """

    jaxpr: Any
    out_tree: Any
    visited: list[Visited]
    inputs: dict[str, TracedValue]
    outputs: list[TracedValue]
    names: ClassNames
    given: Given
    unknown: Counter[str]
    notes: tuple[str, ...]
    hinted: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: LossProgram, args: Sequence[Any], given: Given) -> Self:
        """Trace ``run(params, variables, batch, extra)`` and name its dims.

        Args:
          run: the loss as a function of arrays.
          args: its arguments; only their shapes are used.
          given: the names of some arrays, and where they come from, by path.
        """
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        traced = with_inlined(traced)
        parts = dict(zip(("params", "variables", "batch", "extra"), args, strict=True))
        order = [show(path) for part in parts for path, _ in leaves_with_paths({part: parts[part]})]
        numbers = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer) for leaf in jax.tree.leaves(args)]
        propagation = Propagation()
        inputs, outputs, visited = _followed(propagation, traced, order, numbers)
        of_each_row = propagation.of_each_row(_rows(propagation.classes, _of_batch(inputs)))
        if of_each_row:
            propagation = Propagation(of_each_row)
            inputs, outputs, visited = _followed(propagation, traced, order, numbers)
        params = {path: value for path, value in inputs.items() if part_of(path) == "params"}
        propagation.classes.unite_equal_sums()
        classes = fold(propagation.classes, {path: value.dims for path, value in params.items()})
        batch = _of_batch(inputs)
        dims = {path: value.dims for path, value in inputs.items()}
        for number, (value, own) in enumerate(_operands_of_experts(visited)):
            dims[f"experts/{number}"] = value.dims
            given = {**given, f"experts/{number}": (own, "named in the call of jp.experts")}
        single, several, notes = by_class(classes, dims, {path: own for path, own in given.items() if path in dims})
        names = name_classes(
            classes, ProgramArrays(params, batch, tuple(propagation.values), tuple(_products(visited))), single
        )
        names.by_dim |= several
        if any(path.startswith("experts/") for path in given):
            names.without_choices(single)
        out_tree = jax.tree.structure(shapes)
        return cls(traced, out_tree, visited, inputs, outputs, names, given, propagation.unknown, tuple(notes))

    def arrays(self) -> tuple[NamedArray, ...]:
        """Returns the arrays of the model and the batch with their names."""
        return tuple(self._named(path, value) for path, value in self.inputs.items() if part_of(path) != "extra")

    def _named(self, path: str, value: TracedValue) -> NamedArray:
        if path in self.given:
            names, origin = self.given[path]
            return NamedArray(path, value.shape, tuple(DimName(name, origin) for name in names))
        dims, repeated = _once(self.names, value)
        if part_of(path) != "batch":
            theirs = {name for names, _ in self.given.values() for name in names}
            rename = {name: own for name, own in _IN_MODEL.items() if name not in theirs}
            dims = tuple(DimName(rename.get(dim.name or "", dim.name), dim.reason) for dim in dims)
        return NamedArray(path, value.shape, dims, repeated)

    def other_rows(self, rows: Collection[str]) -> list[str]:
        """Returns the arrays of the batch whose first dim is data too, as the nodes and the edges of a graph.

        It is that of the batch's rows, or a dim of arrays that have none. A dim of a parameter, as that of a table of
        class weights, is none, nor is a dim beside the rows, as that of a table of positions or of a frozen model.

        Args:
          rows: the paths of the arrays that have the batch's rows.
        """
        flat = self.names.classes.flat
        atoms = lambda dims: {atom for dim in dims for atom in flat(dim)}
        params = atoms(dim for path, value in self.inputs.items() if part_of(path) == "params" for dim in value.dims)
        main = atoms(dim for path in rows for dim in self.inputs[path].dims[:1])
        values = [atoms(value.dims) for value in (*self.inputs.values(), *_made(self.visited)) if len(value.shape) > 1]
        beside = set().union(*(value for value in values if value & main)) - main
        along = set().union(*values)
        first = {path: atoms(value.dims[:1]) for path, value in self.inputs.items() if part_of(path) == "batch"}
        return [
            path
            for path, dim in first.items()
            if dim and (dim <= main or (dim <= along and not dim & (params | beside)))
        ]

    def attention_sites(self) -> tuple[AttentionSite, ...]:
        """Returns the attention of the program, that which is not recognised included."""
        return tuple(all_sites(opened(self.jaxpr), self.visited, _NamesOf(self.names), known_constants(self.jaxpr)))

    def run_constrained(self, args: Sequence[Any], *, with_gradients: bool = False) -> Any:
        """Compute the program for ``args``, with constraints on the weights and results of matmuls.

        Args:
          args: as for :meth:`of`.
          with_gradients: whether the program computes gradients too. Those of weights have no batch dim, and are
            sharded by the rules of gradients.
        """
        known = known_constants(self.jaxpr)
        jaxpr = constrained(self.jaxpr.jaxpr, self.visited, _NamesOf(self.names, with_gradients), known)
        closed = jaxpr if isinstance(self.jaxpr, Jaxpr) else self.jaxpr.replace(jaxpr=jaxpr)
        return jax.tree.unflatten(self.out_tree, jaxpr_as_fun(closed)(*jax.tree.leaves(args)))


def _followed(
    propagation: Propagation, traced: Any, paths: Sequence[str], numbers: Sequence[bool]
) -> tuple[dict[str, TracedValue], list[TracedValue], list[Visited]]:
    """The arguments of a program by path, its results, and its equations, after its dims were followed."""
    values = [
        propagation.value(var.aval, data=part_of(path) == "batch", weight=part_of(path) == "params")
        for var, path in zip(traced.jaxpr.invars, paths, strict=True)
    ]
    for value, integers in zip(values, numbers, strict=True):
        value.numbers = value.data and integers
    outputs, visited = propagation.run(traced.jaxpr, values)
    return dict(zip(paths, values, strict=True)), outputs, visited


def _of_batch(inputs: Mapping[str, TracedValue]) -> dict[str, TracedValue]:
    return {path: value for path, value in inputs.items() if part_of(path) == "batch"}


def _rows(classes: DimClasses, batch: Mapping[str, TracedValue]) -> set[int]:
    """The classes of the first dims of the batch's arrays."""
    return {atom for value in batch.values() if value.dims for atom in classes.flat(value.dims[0])}


def _products(visited: Sequence[Visited]) -> Iterator[WeightProduct]:
    """The products of activations with weights."""
    for step in visited:
        if step.eqn.primitive.name == "dot_general" and step.reads[0].data != step.reads[1].data:
            side = 0 if step.reads[0].data else 1
            contracted, batch = (dims[side] for dims in step.eqn.params["dimension_numbers"])
            dims = step.reads[side].dims
            kept = [dim for i, dim in enumerate(dims) if i not in (*contracted, *batch)]
            yield WeightProduct([dims[i] for i in contracted], kept, [dims[i] for i in batch])
        for _, _, inner in step.inner:
            yield from _products(inner)


def _made(visited: Sequence[Visited]) -> Iterator[TracedValue]:
    for step in visited:
        yield from step.makes
        for _, _, inner in step.inner:
            yield from _made(inner)


def _operands_of_experts(visited: Sequence[Visited]) -> Iterator[tuple[TracedValue, Names]]:
    """The operands of the calls of ``jaxpar.experts``, and the names that the calls give to their dims."""
    for step in visited:
        if step.eqn.primitive.name == "name" and (own := dims_of_name(step.eqn.params["name"])) is not None:
            yield step.reads[0], own
        for _, _, inner in step.inner:
            yield from _operands_of_experts(inner)


def _once(names: ClassNames, value: TracedValue) -> tuple[tuple[DimName, ...], tuple[str, ...]]:
    """The names of a value's dims, each at most once, and those that were left out because they occur before."""
    found: list[DimName] = []
    repeated: list[str] = []
    for dim in value.dims:
        name = names.of(dim)
        if name.name is not None and any(name.name == before.name for before in found):
            repeated.append(name.name)
            name = DimName(None, f"a second {name.name}")
        found.append(name)
    return tuple(found), tuple(repeated)


@dataclass(frozen=True)
class _NamesOf:
    """The names of the program's values, each at most once in a value."""

    names: ClassNames
    with_gradients: bool = False

    def __call__(self, value: TracedValue) -> Names:
        return tuple(dim.name for dim in _once(self.names, value)[0])

    def role(self, value: TracedValue) -> str:
        """The role whose rules shard a result: without a batch dim it is the gradient of a weight."""
        return "gradients" if self.with_gradients and value.data and "batch" not in self(value) else "activations"

    def is_residual(self, value: TracedValue) -> bool:
        return any(atom in self.names.embed for dim in value.dims for atom in self.names.classes.flat(dim))
