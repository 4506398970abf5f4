"""A run's compiled programs: the training step of any kind, and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpar as jp
from jaxpar.app.adapted import DIGEST, first_adapted_state, frozen_weights
from jaxpar.app.job import Job
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.training.asynchronous.step import PipedreamStep
from jaxpar.training.batch import row_share, shard_batch
from jaxpar.training.disk_step import DiskOffloadedStep
from jaxpar.training.from_params import state_from_params
from jaxpar.utils.multihost import settled


class StepPrograms(AbstractContextManager["StepPrograms"]):
    """Training step and evaluation of a job on a layout; a context manager, because a step may hold a folder on disk.

    Attributes:
      like: the abstract state to restore a checkpoint as, if it differs from that of :func:`jaxpar.abstract_state`: for
        a pipeline that is not drained between steps.
      step: the compiled step.
    """

    def __init__(self, job: Job, layout: jp.Layout):
        self._job, self._layout, self._exit_stack = job, layout, ExitStack()
        self._pipedream: PipedreamStep | None = None
        self._first: Any = None
        self.metadata: dict[str, str] = {}
        """What a checkpoint says about the frozen weights of a run with adapters; known with the first state."""
        self.like: Any = None
        self.late = 0
        """How many steps later a bad batch may show, because it is still in the pipeline."""
        self.step: Callable[..., Any]
        if isinstance(job.pipeline, jp.pipeline.Asynchronous):
            self.late, self._pipedream = 1, jp.pipeline.pipedream_train_step(layout, job.loss_fn, **job.step_options())
            self._first = self._initial()
            abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            self.like = jax.tree.map(abstract, self._first)

    def first_state(self, restored: Any = None) -> Any:
        """Returns the restored state, or else the initial state."""
        first, self._first = self._first, None
        if restored is not None:
            state = self.with_frozen(restored, None)
        else:
            state = self._initial() if first is None else first
        if self._job.lora is not None:
            self.metadata = {DIGEST: jp.lora.digest_of(jp.lora.frozen_params(state))}
        return state

    def with_frozen(self, restored: Any, frozen: Any) -> Any:
        """Returns a restored state with the frozen weights of a run with adapters, given or read."""
        if self._job.lora is None:
            return restored
        frozen = frozen_weights(self._job, self._layout) if frozen is None else frozen
        return jp.lora.with_frozen(restored, frozen)

    def compile(self, state: Any, batch: Any, heldout: Any, disk: Path | None) -> None:
        """Compile both programs; without ``heldout``, a batch for evaluation, only the step.

        ``disk`` is the folder with the restored disk-offloaded optimizer state, if any.
        """
        self.step = self._exit_stack.enter_context(
            step_of(self._job, self._layout, state, batch, pipedream=self._pipedream, restore=disk)
        )
        if heldout is not None:
            evaluation = jp.eval_step(self._layout, self._job.eval_loss_fn, **self._job.eval_options())
            self._evaluation = evaluation.lower(state, heldout).compile()

    def evaluate(self, state: Any, heldout: Sequence[Any]) -> float:
        """Returns the mean loss over batches, weighted by their metric ``weight`` where the loss has one."""
        found = [self._evaluation(state, batch) for batch in heldout]
        weights = [float(metrics.get("weight", 1)) for metrics in found]
        return float(np.average([float(metrics["loss"]) for metrics in found], weights=weights))

    def flush(self, state: Any) -> Any:
        """Returns the state after draining the pipeline."""
        return state if self._pipedream is None else self._pipedream.flush(state)[0]

    def rewind(self, state: Any, disk: Path | None) -> None:
        """Prepare to continue from a restored state; arguments as for :meth:`compile`."""
        if isinstance(self.step, DiskOffloadedStep) and disk is not None:
            self.step.rewind(state, disk)

    def _initial(self) -> Any:
        job = self._job
        state = _first_state(job, self._layout)
        if self._pipedream is None:
            return state
        dims = job.batch_dims()
        share = row_share(self._layout, dims)
        return self._pipedream.start(state, shard_batch(self._layout, _zero_batch(job, share.count), dims, share))

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()


def _first_state(job: Job, layout: jp.Layout) -> Any:
    """Returns the state at step 0: of random parameters, or of those of ``train.init_from``."""
    if job.lora is not None:
        return first_adapted_state(job, layout)
    options: dict[str, Any] = {"seed": job.config.train.seed, "precision": job.precision}
    folder = job.config.train.init_from
    if folder is None:
        return jp.init(layout, job.make_model, job.tx, **options)
    like = jp.abstract_state(layout, job.make_model, job.tx, job.precision).params
    params = settled(lambda: jp.restore(folder, {"params": like}, only=["params"], cast=True)["params"])
    return state_from_params(layout, job.make_model, job.tx, params, **options)


def _zero_batch(job: Job, shares: int) -> dict[str, np.ndarray]:
    """A batch of zeros with the shapes of a process's share."""
    data = job.config.data
    return {name: np.zeros((data.batch // shares, data.seq), np.int32) for name in job.batch_names()}


@contextmanager
def step_of(
    job: Job,
    layout: jp.Layout,
    state: Any,
    batch: Any,
    *,
    pipedream: PipedreamStep | None = None,
    restore: Path | None = None,
) -> Iterator[Callable[..., Any]]:
    """The compiled step; it may hold a folder on disk for as long as the context is open.

    Args:
      pipedream: the step of a pipeline that is not drained between steps.
      restore: the folder to restore the disk-offloaded optimizer state from.
    """
    options = job.compiler_options(platform_of(layout.mesh))
    if job.config.parallel.offload.optimizer == "disk":
        options_of_step = {"restore": restore, **job.step_options()}
        with jp.offload.disk_offloaded_train_step(layout, job.loss_fn, state, **options_of_step) as step:
            step.compile(state, batch, options)
            yield step
    elif pipedream is not None:
        yield pipedream.lower(state, batch).compile(options)
    else:
        yield jp.train_step(layout, job.loss_fn, **job.step_options()).lower(state, batch).compile(options)
