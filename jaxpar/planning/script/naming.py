"""The names of the dims of everything that a train step reads: parameters, optimizer state, batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxpar.planning.names.annotate import annotate, trace_loss
from jaxpar.planning.names.annotation import Annotation
from jaxpar.planning.names.given import Given, Patterns
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.script.evaluate import evaluate
from jaxpar.planning.script.trace import StepTrace, is_typed_key
from jaxpar.planning.search.fsdp import StoredArray
from jaxpar.sharding.names import Names
from jaxpar.training.model import NamedModel

BATCH = "batch"


@dataclass(frozen=True)
class _Loss:
    """The loss of a step as a function of its parameters and of its batch, each by path.

    Attributes:
      trace: the step.
      params, batch: indices of these arrays.
      eqns, losses: what computes the loss.
    """

    trace: StepTrace
    params: tuple[int, ...]
    batch: tuple[int, ...]
    eqns: Sequence[JaxprEqn]
    losses: Sequence[Any]

    @classmethod
    def of(cls, trace: StepTrace, batch: tuple[int, ...]) -> Self:
        """Returns the loss of a step that depends on these arrays."""
        eqns, losses = trace.forward(batch)
        on = frozenset[int]().union(*(trace.dependencies[loss] for loss in losses))
        floats = {i for i, s in enumerate(trace.shapes) if s.shape and jnp.issubdtype(s.dtype, jnp.inexact)}
        return cls(trace, tuple(sorted(on & trace.updates.keys() & floats)), batch, eqns, losses)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the batch."""
        return {self.trace.call.paths[i]: self.trace.shapes[i] for i in self.batch}

    def make_model(self, key: Any) -> Any:
        """Returns parameters of zeros, with the names that the model's annotations give to their dims."""
        shapes, paths = self.trace.shapes, self.trace.call.paths
        arrays = {paths[i]: jnp.zeros(shapes[i].shape, shapes[i].dtype) for i in self.params}
        dims = tuple((("params", path), names) for path, names in self.trace.call.dims if path in arrays)
        return NamedModel({"params": arrays}, dims)

    def __call__(self, model: Any, inputs: Any) -> Any:
        """Returns the loss, and other scalars."""
        trace, paths = self.trace, self.trace.call.paths
        arrays = {**{i: model["params"][paths[i]] for i in self.params}, **{i: inputs[paths[i]] for i in self.batch}}
        args = [arrays[i] if i in arrays else _nothing(shape) for i, shape in enumerate(trace.shapes)]
        loss, *others = evaluate(trace.jaxpr, args, eqns=self.eqns, results=self.losses)
        if loss.shape:
            return loss.sum(), {}
        return loss, {f"metric {i}": x for i, x in enumerate(others)}


@dataclass(frozen=True)
class NamedStep:
    """A traced train step and the names of the dims of its arrays.

    Attributes:
      trace: the step.
      params: indices of the arrays that the loss depends on and the step changes: the parameters.
      batch: indices of the arrays of the batch.
      rows: the size of the batch.
      annotation: the names that were found in the loss.
      names: those that the user gave.
    """

    trace: StepTrace
    params: tuple[int, ...]
    batch: tuple[int, ...]
    rows: int
    annotation: Annotation
    names: Patterns | None = None

    @classmethod
    def of(cls, trace: StepTrace, names: Patterns | None = None) -> Self:
        """Find the names of a step's dims.

        Args:
          trace: the step.
          names: as for :func:`jaxpar.annotate`.

        Raises:
          ModelError: the step computes no loss.
          AnnotationError: as for :func:`jaxpar.annotate`.
        """
        batch, rows = trace.batch
        free = [i for i, s in enumerate(trace.shapes) if s.shape and s.shape[0] > 1 and trace.is_data(i)]
        fed = [i for i in batch if i in trace.loaded and trace.shapes[i].shape[0] == rows] or batch
        others = [i for i in free if i not in fed]
        loss = _Loss.of(trace, tuple(dict.fromkeys((*batch, *others))))
        if others:
            program = trace_loss(loss.make_model, loss, loss.shapes)
            paths = {f"batch/{trace.call.paths[i]}": i for i in others}
            first = {f"batch/{trace.call.paths[i]}" for i in fed if i in loss.batch}
            ones = [i for i in batch if i not in fed and i not in others]
            batch = (*fed, *ones, *sorted(paths[path] for path in program.other_rows(first) if path in paths))
            loss = _Loss.of(trace, batch)
        annotation = annotate(loss.make_model, loss, loss.shapes, names=names)
        return cls(trace, loss.params, batch, rows, annotation, names)

    @cached_property
    def loss_names(self) -> dict[int, Names]:
        """The names of the dims of parameters and the batch, by index."""
        known = {array.path: array.names for array in self.annotation.arrays}
        found = {i: known[f"params/{self.trace.call.paths[i]}"] for i in self.params}
        for i in self.batch:
            dims = known[f"batch/{self.trace.call.paths[i]}"]
            found[i] = (BATCH if self.trace.shapes[i].shape[0] > 1 else None, *dims[1:])
        return found

    @property
    def stored(self) -> tuple[StoredArray, ...]:
        """The parameters by their dims."""
        shapes, paths, names = self.trace.shapes, self.trace.call.paths, self.loss_names
        dims = {i: tuple(zip(names[i], shapes[i].shape, strict=True)) for i in self.params}
        return tuple(StoredArray(paths[i], dims[i], shapes[i].dtype.itemsize) for i in self.params)

    def program(self) -> NamedProgram:
        """Returns the whole step with names for the dims of all its values."""
        trace, paths = self.trace, self.trace.call.paths

        def run(params: Any, variables: Any, batch: Any, extra: Any) -> Any:
            values = {**params, **variables, **batch}
            return evaluate(trace.jaxpr, [values[path] for path in paths])

        given: Given = {
            f"{'params' if i in self.params else 'batch'}/{paths[i]}": (names, "found in the loss")
            for i, names in self.loss_names.items()
        }
        return NamedProgram.of(run, self.parts(trace.shapes), given)

    def parts(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns arrays, or what stands for them, as arguments of :meth:`program`."""
        named = dict(enumerate(zip(self.trace.call.paths, arrays, strict=True)))
        others = [i for i in named if i not in self.params and i not in self.batch]
        params, variables, batch = (dict(named[i] for i in part) for part in (self.params, others, self.batch))
        return params, variables, batch, {}

    def names_of(self, program: NamedProgram) -> dict[int, Names]:
        """Returns the names of the dims of all arrays.

        Those of optimizer state are the names of the parameter that its path ends with, if it has its shape, else those
        that the program tells.
        """
        trace, found = self.trace, dict(self.loss_names)
        known = {name for i in self.params for name in found[i] if name is not None}
        by_end = self._by_end()
        told = {array.path: array.names for array in program.arrays()}
        for i, path in enumerate(trace.call.paths):
            if i in found:
                continue
            parts = tuple(path.split("/"))
            ends = (by_end.get((parts[k:], trace.shapes[i].shape)) for k in range(len(parts)))
            param = next((p for p in ends if p is not None), None)
            if param is not None:
                found[i] = found[param]
            elif i in trace.updates:
                names = told[f"variables/{path}"]
                found[i] = tuple(name if name in known else None for name in names)
            else:
                found[i] = (None,) * len(trace.shapes[i].shape)
        return found

    def _by_end(self) -> dict[tuple[tuple[str, ...], tuple[int, ...]], int]:
        """The parameters by their path below what is common to all parameters of an argument, and their shape."""
        groups: dict[str, list[tuple[int, tuple[str, ...]]]] = {}
        for i in self.params:
            first, *rest = self.trace.call.paths[i].split("/")
            groups.setdefault(first, []).append((i, tuple(rest)))
        found: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
        for members in groups.values():
            common = 0
            while len({path[common] for _, path in members if len(path) > common + 1}) == 1 and all(
                len(path) > common + 1 for _, path in members
            ):
                common += 1
            for i, path in members:
                found.setdefault((path[common:], self.trace.shapes[i].shape), i)
        return found


def _nothing(shape: jax.ShapeDtypeStruct) -> Any:
    if is_typed_key(shape):
        return jnp.broadcast_to(jax.random.key(0), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)
