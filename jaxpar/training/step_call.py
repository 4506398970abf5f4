"""How a step is called: its trace knows how the batch is sharded, and avoids what the partitioner computes wrongly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.errors import StateError
from jaxpar.parallel.partitioner.repair import avoid_faults
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.training.state import TrainState, place
from jaxpar.utils.contexts import batch_specs


def partitioned[T](layout: Layout, run: Callable[[TrainState, Any], T], state: TrainState, batch: Any) -> T:
    """Returns ``run(state, batch)``, with other operations where the partitioner would compute wrong numbers.

    Args:
      layout: the ambient layout, by which the state is sharded.
      run: a step or evaluation, which jit is tracing.
      state, batch: its arguments.
    """
    leaves = jax.tree.leaves(batch)
    specs = batch_specs.value or (None,) * len(leaves)
    result: T = avoid_faults(run, [*(to_spec(leaf.resolved) for leaf in place(layout, state)), *specs])(state, batch)
    return result


class StepCall:
    """A jitted step or evaluation, traced with the shardings of the batch that it is called with.

    It names the mistake if its state was donated to an earlier call of a step. All attributes of the jitted function
    are those of this object too.

    Args:
      step: the jitted function of a state and a batch.
    """

    def __init__(self, step: Any):
        self._step = step
        functools.update_wrapper(self, step)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run it.

        Raises:
          StateError: an array of ``state`` was donated to an earlier call.
        """
        try:
            with _sharded_as(batch):
                return self._step(state, batch)
        except RuntimeError as error:
            gone = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.is_deleted()]
            if not gone:
                raise
            raise StateError(
                f"{self._step.__name__}: {len(gone)} arrays of the state are deleted, because the state was donated to "
                "an earlier call of the step. Remedy: continue with the state that this call returned: state, metrics "
                "= step(state, batch); or train_step(donate=False), which keeps both in memory."
            ) from error

    def lower(self, state: Any, batch: Any) -> Any:
        """Lowers it, like any jitted function."""
        with _sharded_as(batch):
            return self._step.lower(state, batch)

    def trace(self, state: Any, batch: Any) -> Any:
        """Traces it, like any jitted function."""
        with _sharded_as(batch):
            return self._step.trace(state, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def _sharded_as(batch: Any) -> Any:
    """The context of a call with this batch. Inside another trace the outer call knows."""
    return batch_specs(specs_of(batch) or batch_specs.value)


def specs_of(batch: Any) -> tuple[PartitionSpec | None, ...] | None:
    """Returns the specs of a batch's arrays, or ``None`` if all are sharded by their rows at most.

    >>> specs_of({"tokens": jax.numpy.zeros((8, 16))}) is None
    True
    """
    placed = (None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None) for x in jax.tree.leaves(batch))
    specs = tuple(getattr(sharding, "spec", None) for sharding in placed)
    return specs if any(any(spec[1:]) for spec in specs if spec) else None
