"""A train step for batches of one shape, with the place of everything that it reads, compiled for a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.analysis.units import shard_count
from jaxpar.errors import LayoutError
from jaxpar.parallel.partitioner.repair import Repaired, avoid_faults, noting_repairs
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.script.naming import BATCH, NamedStep
from jaxpar.planning.script.placed_array import PlacedArray
from jaxpar.planning.script.share import warn_of_uneven_share
from jaxpar.planning.script.trace import is_typed_key
from jaxpar.sharding.arrays import shard_array
from jaxpar.sharding.layout import Layout, to_spec, tracing_under
from jaxpar.sharding.names import Names
from jaxpar.training.weight_changes import sampled_arrays
from jaxpar.utils.arrays import itemsize
from jaxpar.utils.jaxprs import opened


class PlacedStep:
    """A train step for batches of one shape, on the devices of a layout.

    Args:
      step: the step, with names.
      layout: the layout.
      donate: whether the step may overwrite the state that it is passed.

    Raises:
      LayoutError: the rules cannot place some arrays, or the batch does not divide over the devices.
    """

    def __init__(self, step: NamedStep, layout: Layout, *, donate: bool):
        self.step, self.layout = step, layout
        self.repaired: tuple[Repaired, ...] = ()  # known after the first call
        self._check_rows()
        program = step.program()
        names = step.names_of(program)
        self.placed = tuple(self._place(i, names[i]) for i in range(len(names)))
        if problems := list(dict.fromkeys(text for array in self.placed for text in array.resolved.problems)):
            raise LayoutError(problems)
        self.shardings = tuple(NamedSharding(layout.mesh, to_spec(array.resolved)) for array in self.placed)
        self._updates = updates = step.trace.updates
        outputs: list[Any] = [None] * len(step.trace.jaxpr.out_avals)
        for i, j in updates.items():
            outputs[j] = self.shardings[i]
        self._jitted = jax.jit(
            self._flat(program), out_shardings=(outputs, None), donate_argnums=tuple(updates) * donate
        )
        self._compiled: Any = None

    def run(self, arrays: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Mapping[str, jax.Array]]:
        """Returns the step's results for arrays on their devices, and its metrics; the first call compiles it."""
        if self._compiled is None:
            self._compiled = self._jitted.lower(*arrays).compile()
            program = opened(self.step.trace.jaxpr)
            warn_of_uneven_share(self._compiled, program, self.placed, self.layout.mesh.size)
        results: tuple[Sequence[jax.Array], Mapping[str, jax.Array]] = self._compiled(*arrays)
        return results

    def _flat(self, program: NamedProgram) -> Callable[..., Any]:
        compute = lambda *arrays: program.run_constrained(self.step.parts(arrays), with_gradients=True)
        correct = avoid_faults(compute, [sharding.spec for sharding in self.shardings])

        weights = [i for i in self._updates if i in self.step.params]

        def train_step(*arrays: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
            with tracing_under(self.layout), noting_repairs() as repaired:
                specs = [self.shardings[i].spec for i in weights]
                values, sample = sampled_arrays(self.layout, [arrays[i] for i in weights], specs)
                passed = dict(enumerate(arrays)) | dict(zip(weights, values, strict=True))
                made: Sequence[Any] = correct(*passed.values())
                metrics = sample.metric([made[self._updates[i]] for i in weights])
            self.repaired = tuple(repaired)
            return list(made), metrics

        return train_step

    def put(self, i: int, x: Any) -> jax.Array:
        """Returns an array of the arguments on its devices; a process gives its own part of a NumPy array."""
        sharding, placed = self.shardings[i], self.placed[i]
        if isinstance(x, jax.Array):
            if x.sharding == sharding:
                return x
            if x.is_fully_addressable and {d.platform for d in x.devices()} == {"cpu"} and not is_typed_key(x):
                # device_put would compile a program for each slice. A copy, because the step overwrites its state.
                return jax.device_put(np.array(x), sharding)
            return jax.device_put(x, sharding, may_alias=False)
        if placed.role == "activations" and jax.process_count() > 1 and np.ndim(x):
            return shard_array(self.layout, x, *placed.names, path=placed.path)
        return jax.device_put(x, sharding)

    def _place(self, i: int, names: Names) -> PlacedArray:
        trace = self.step.trace
        shape, path = trace.shapes[i], trace.call.paths[i]
        (rows,) = self.layout.resolve((BATCH,)).dims
        if i in self.step.batch and shape.shape[0] != self.step.rows and shape.shape[0] % _count(rows, self.layout):
            names = (None, *names[1:])  # such as the nodes of a graph, which have no rows
        role = "activations" if i not in trace.updates else "params" if i in self.step.params else "optimizer"
        resolved = self.layout.resolve(names, shape.shape, role=role, dtype=shape.dtype, path=path)
        return PlacedArray(path, role, shape.shape, names, resolved, itemsize(shape.dtype))

    def _check_rows(self) -> None:
        (dim,) = self.layout.resolve((BATCH,)).dims
        axes = [axis for axis in dim.axes if self.layout.sizes[axis] > 1]
        count, rows = _count(dim, self.layout), self.step.rows
        if rows % count and BATCH not in self.layout.rules.indivisible:
            paths = [self.step.trace.call.paths[i] for i in self.step.batch]
            raise LayoutError(
                f"{paths[0]}: a batch of {rows} rows does not divide over the {count} devices of {' × '.join(axes)}. "
                f"Remedy: pass batches of a multiple of {count} rows: drop a last batch that is smaller "
                "(drop_remainder=True), or pad it and mask the padding out of the loss."
            )


def _count(dim: Any, layout: Layout) -> int:
    return shard_count(dim.axes, layout.sizes)
