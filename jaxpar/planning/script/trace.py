"""The trace of a train step as its script has it, and the part of it that computes the loss."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpar.errors import JaxparError, ModelError
from jaxpar.parallel.unsharded import unsharded
from jaxpar.planning.names.constrain import MATMULS
from jaxpar.planning.script.arguments import CallStructure, ReturnStructure, take_apart, take_result_apart
from jaxpar.planning.script.carry import Continued, StatePart, parts_of, state_parts
from jaxpar.planning.script.evaluate import inlined_program
from jaxpar.planning.script.mapped import over_devices, over_one, size_of_means, trace_local
from jaxpar.planning.script.step_data import StepData, empty_state, frozen
from jaxpar.training.batch import check_batch
from jaxpar.utils.jaxprs import equations, inner_jaxprs, needed_equations, opened

_SLACK = 1.3
"""A scalar that needs this many times the matmuls of the cheapest one is computed from gradients."""


@dataclass(frozen=True)
class StepTrace:
    """A traced train step.

    Attributes:
      call: the structure of its arguments.
      shapes: of the arrays in them.
      jaxpr: its program, with the bodies of jitted functions inlined: from the arrays of the arguments to those of the
        changed NNX objects and of what the step returns.
      returned: the structure of what it returns.
      parts: the parts of the arguments that it returns changed, apart from NNX objects.
      empty: the names of the arguments without arrays that it returns.
      result_paths: the path of each result, and of NNX objects that of the argument; of equal results the first one's.
      loaded: the arrays that are on no device yet, such as a loader's.
      frozen: the arrays that are like the state but none, such as a teacher's.
      numbers: as for :func:`take_apart`.
    """

    call: CallStructure
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    jaxpr: ClosedJaxpr
    returned: ReturnStructure
    parts: tuple[StatePart, ...]
    empty: frozenset[str]
    result_paths: tuple[str, ...]
    loaded: frozenset[int]
    frozen: frozenset[int]
    numbers: bool

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        axis_name: str | None = None,
        state: Continued | None = None,
    ) -> StepTrace:
        """Trace a train step; Python numbers among its arguments are arrays, unless it needs their values.

        Args:
          step: the step.
          args, kwargs: its arguments.
          axis_name: of the axis over which the step averages, if it was made for ``pmap``; it has one element.
          state: the result that continues each argument, if it is known.

        Raises:
          ModelError: the step returns no state that it was passed, and changes no NNX object.
          ConfigError: ``state`` does not fit the step.
          DataError: an array has no numbers.
        """
        call, arrays = take_apart(step, args, kwargs, numbers=True)
        for path, x in zip(call.paths, arrays, strict=True):
            check_batch(x, path)
        try:
            return cls._trace(step, call, arrays, axis_name, state, numbers=True)
        except (TypeError, ValueError) as error:
            if isinstance(error, JaxparError):
                raise
            static, arrays = take_apart(step, args, kwargs, numbers=False)
            if static == call:
                raise
            try:
                return cls._trace(step, static, arrays, axis_name, state, numbers=False)
            except (TypeError, ValueError):
                raise error from None

    @classmethod
    def _trace(
        cls,
        step: Callable[..., Any],
        call: CallStructure,
        arrays: Sequence[Any],
        axis_name: str | None,
        state: Continued | None,
        *,
        numbers: bool,
    ) -> StepTrace:
        found: list[ReturnStructure] = []
        shapes = tuple(map(shape_of, arrays))

        def flat(*arrays: Any) -> list[Any]:
            arguments = call.arguments(arrays)
            result = call.call(step, arguments)
            returned, leaves = take_result_apart(result, arguments)
            found.append(returned)
            return [*call.arrays_of([arguments[place] for place in call.objects]), *leaves]

        with unsharded():
            size = 1 if axis_name is None else size_of_means(flat, shapes, axis_name)
            if axis_name is None:
                traced = inlined_program(flat, shapes)
            elif size is not None:
                traced = inlined_program(over_one(flat, axis_name, size), shapes)
            else:
                traced = trace_local(flat, shapes, axis_name, jax.device_count())
        loaded = frozenset(i for i, x in enumerate(arrays) if not isinstance(x, jax.Array))
        data = StepData(call, found[-1], traced, loaded)
        if state is not None:
            parts = parts_of(data, state)
        else:
            depends = _dependencies(opened(traced))
            on = [
                depends.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()
                for atom in traced.jaxpr.outvars
            ]
            parts = state_parts(data, on, is_key)
        if not call.objects and not any(part.placed for part in parts):
            raise ModelError(
                "train_step returns no state that it was passed, and changes no NNX object. Remedy: pass and return "
                "the state, as in state, metrics = train_step(state, batch), or pass the nnx.Module and its optimizer."
            )
        still = frozen(data, [part.path for part in parts])
        empty = empty_state(data) if state is None else frozenset(path.split("/")[0] for path in state)
        trace = cls(call, shapes, traced, found[-1], parts, empty, data.result_paths(), loaded, still, numbers)
        if size is not None or axis_name is None:
            return trace
        program = over_devices(flat, axis_name, trace.batch[0], trace.updates.values(), trace.result_paths)
        with unsharded():
            return replace(trace, jaxpr=inlined_program(program, shapes))

    def is_data(self, i: int) -> bool:
        """Whether an argument is an array beside the state, and no key."""
        state = i in self.updates or i in self.frozen
        return not state and bool(self.shapes[i].shape) and not is_key(self.shapes[i])

    @cached_property
    def batch(self) -> tuple[tuple[int, ...], int]:
        """The indices of the arrays of the batch, and its size: what most of a loader's arrays begin with.

        Without a loader's arrays, it is what most arrays beside the state begin with. Keys, scalars and
        arrays that begin otherwise, such as a table of class weights, are no part of it.
        """
        data = [i for i in range(len(self.shapes)) if self.is_data(i)]
        sizes = Counter(self.shapes[i].shape[0] for i in [i for i in data if i in self.loaded] or data)
        rows = max(sizes, key=lambda size: (sizes[size], size), default=1)
        return tuple(i for i in data if self.shapes[i].shape[0] in (rows, 1)), rows

    @cached_property
    def updates(self) -> dict[int, int]:
        """The index of an array that is placed as state → that of its next value among the results."""
        changed = {i: i for i in range(self.call.in_objects)}
        for part in self.parts:
            changed |= part.updates() if part.placed else {}
        return changed

    @cached_property
    def dependencies(self) -> dict[Any, frozenset[int]]:
        """The arrays of the arguments that each variable of the program depends on, by their index."""
        return _dependencies(opened(self.jaxpr))

    def forward(self, batch: Collection[int]) -> tuple[list[JaxprEqn], list[Any]]:
        """Returns the equations that compute the loss, and the scalars that they compute, the loss or metrics first.

        Where a step returns no scalar, a vector is taken: the losses of an ensemble.

        Args:
          batch: the indices of the arrays that hold the batch.

        Raises:
          ModelError: no scalar depends on the state and on the batch, or the step is a loop of steps.
        """
        jaxpr = opened(self.jaxpr)
        trained = {i for i in self.updates if _trainable(self.shapes[i])}
        changed = set(self.updates.values())
        results = [atom for i, atom in enumerate(jaxpr.outvars) if i not in changed]
        made = (var for eqn in jaxpr.eqns for var in eqn.outvars)
        batch = set(batch)

        def scalars(atoms: Any, rank: int = 0) -> list[Any]:
            return [
                atom
                for atom in dict.fromkeys(a for a in atoms if isinstance(a, Var))
                if _is_float(atom.aval, rank)
                and (on := self.dependencies.get(atom, frozenset())) & batch
                and on & trained
            ]

        losses = scalars(results) or scalars(results, rank=1)[:1]
        if not losses:
            inside = scalars(made)
            most = max((len(self.dependencies[a] & trained) for a in inside), default=0)
            losses = [a for a in inside if len(self.dependencies[a] & trained) == most][:1]
        if not losses:
            if not self.batch[0]:
                raise ModelError(
                    "train_step is passed no array beside its state, so there is no batch to divide over the devices. "
                    "Remedy: pass arrays with the batch's rows as their first dims, and np.asarray(x) of a list."
                )
            raise ModelError(
                "train_step computes no scalar from its state and its batch, so there is no loss to find the names of "
                "dims from. Remedy: return the loss."
            )
        needed = {atom: needed_equations(jaxpr, [atom], effects=False) for atom in losses}
        costs = {atom: _matmuls(eqns) for atom, eqns in needed.items()}
        least = min(costs.values())
        ends = (jaxpr.outvars[self.updates[i]] for i in trained)
        trained_to = {atom for atom in ends if isinstance(atom, Var)} - set(jaxpr.invars)
        loops = [eqn for eqns in needed.values() for eqn in eqns if eqn.primitive.name in ("scan", "while")]
        if trained_to and any(trained_to <= set(eqn.outvars) for eqn in loops):
            raise ModelError(
                "train_step takes several steps in a loop, whose batches are stacked, so its losses are no result of "
                "one batch. Remedy: pass the step of one batch, and call what parallelize returns in a Python loop."
            )
        losses = [atom for atom in losses if costs[atom] <= _SLACK * least]
        return needed_equations(jaxpr, losses, effects=False), losses


def _dependencies(jaxpr: Jaxpr) -> dict[Any, frozenset[int]]:
    found: dict[Any, frozenset[int]] = {var: frozenset((i,)) for i, var in enumerate(jaxpr.invars)}
    known: dict[frozenset[frozenset[int]], frozenset[int]] = {}
    for eqn in jaxpr.eqns:
        reads = frozenset(found[atom] for atom in eqn.invars if isinstance(atom, Var) and atom in found)
        if reads not in known:
            known[reads] = frozenset(itertools.chain.from_iterable(reads))
        found |= dict.fromkeys(eqn.outvars, known[reads])
    return found


def _is_float(aval: Any, rank: int) -> bool:
    return len(aval.shape) == rank and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that an array, a number or a type has in a traced program."""
    found = x if hasattr(x, "weak_type") and not hasattr(x, "sharding_impls") else jax.typeof(x)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=found.weak_type)


def _trainable(shape: jax.ShapeDtypeStruct) -> bool:
    return len(shape.shape) > 0 and bool(jnp.issubdtype(shape.dtype, jnp.inexact))


def is_key(shape: jax.ShapeDtypeStruct) -> bool:
    """Whether an array is a PRNG key, or several: typed, or two or four raw words."""
    return is_typed_key(shape) or (shape.dtype == jnp.uint32 and shape.shape in ((2,), (4,)))


def is_typed_key(x: Any) -> bool:
    """Whether an array has the dtype of a PRNG key."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _matmuls(eqns: Sequence[JaxprEqn]) -> int:
    inner = (one for eqn in eqns for body in inner_jaxprs(eqn) for one in equations(opened(body)))
    return sum(eqn.primitive.name in MATMULS for eqn in (*eqns, *inner))
