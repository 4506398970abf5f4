"""A run's compiled programs: the step, of whatever kind it is, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

import jaxpar as jp
from jaxpar.app.job import BATCH_DIMS, Job
from jaxpar.sharding.hardware.topology import platform_of


class StepPrograms:
    """Step and evaluation of a job on a layout; a context, as a step may hold a folder on disk.

    ``like`` is what a checkpoint is restored as, where that is not what layout, model and optimizer say alone: the state of a pipeline that is
    not emptied between steps.
    """

    def __init__(self, job: Job, layout: jp.Layout):
        self._job, self._layout, self._opened = job, layout, ExitStack()
        self._flight: jp.PipedreamStep | None = None
        self._first: Any = None
        self.like: Any = None
        self.late = 0
        """After how many steps more a batch may still turn out to be bad, as it is on its way."""
        self.step: Callable[..., Any]
        if isinstance(job.pipeline, jp.Asynchronous):
            self.late, self._flight = 1, jp.PipedreamStep(layout, job.loss_fn, **job.step_options())
            self._first = self._initial()
            abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            self.like = jax.tree.map(abstract, self._first)

    def first_state(self, restored: Any = None) -> Any:
        """What was restored, or the initial state."""
        first, self._first = self._first, None
        if restored is not None:
            return restored
        return self._initial() if first is None else first

    def compile(self, state: Any, batch: Any, heldout: Any, disk: Path | None) -> None:
        """Compile both; ``disk`` has the files of an optimizer on disk, where the state was restored."""
        self.step = self._opened.enter_context(
            step_of(self._job, self._layout, state, batch, flight=self._flight, restore=disk)
        )
        evaluation = jp.eval_step(self._layout, self._job.loss_fn, **self._job.eval_options())
        self._evaluation = evaluation.lower(state, heldout).compile()

    def evaluate(self, state: Any, heldout: Sequence[Any]) -> float:
        """The mean loss over batches, in nats per token."""
        return float(np.mean([float(self._evaluation(state, batch)["loss"]) for batch in heldout]))

    def flush(self, state: Any) -> Any:
        """The state when all that is on its way between steps has come in."""
        return state if self._flight is None else self._flight.flush(state)[0]

    def rewind(self, state: Any, disk: Path | None) -> None:
        """Be ready to go on with a state that was restored; arguments as of :meth:`compile`."""
        if isinstance(self.step, jp.DiskOffloadedStep) and disk is not None:
            self.step.rewind(state, disk)

    def _initial(self) -> Any:
        job = self._job
        state = jp.init(self._layout, job.make_model, job.tx, seed=job.config.train.seed, precision=job.precision)
        return state if self._flight is None else self._flight.start(state, put(self._layout, _nothing(job)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def put(layout: jp.Layout, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """A batch on the layout's devices."""
    return {name: jp.shard_array(layout, x, *BATCH_DIMS, path=f"batch/{name}") for name, x in batch.items()}


def _nothing(job: Job) -> dict[str, np.ndarray]:
    """A batch as this process will have them, of zeros."""
    data = job.config.data
    return {name: np.zeros((data.batch // jax.process_count(), data.seq), np.int32) for name in job.batch_names()}


@contextmanager
def step_of(
    job: Job,
    layout: jp.Layout,
    state: Any,
    batch: Any,
    *,
    flight: jp.PipedreamStep | None = None,
    restore: Path | None = None,
) -> Iterator[Callable[..., Any]]:
    """The compiled step, which may hold a folder on disk for as long as the run lasts, restored from another one."""
    options = job.compiler_options(platform_of(layout.mesh))
    if job.config.parallel.offload.optimizer == "disk":
        with jp.DiskOffloadedStep(layout, job.loss_fn, state, restore=restore, **job.step_options()) as step:
            step.compile(state, batch, options)
            yield step
    elif flight is not None:
        yield flight.lower(state, batch).compile(options)
    else:
        yield jp.train_step(layout, job.loss_fn, **job.step_options()).lower(state, batch).compile(options)
