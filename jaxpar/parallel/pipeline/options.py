"""``Pipeline`` and ``Asynchronous``: how a step runs the layers of a model over pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS, AsyncSchedule
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import ActivationCheckpointing
from jaxpar.utils.checks import is_count

_CHECKPOINTING: tuple[str, ...] = get_args(ActivationCheckpointing)


def _check_choice(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ConfigError(f"{what} must be {choices}, got {value!r}.{did_you_mean(str(value), known)}")


@dataclass(frozen=True)
class Pipeline:
    """How a step runs the layers of a model over pipeline stages.

    Attributes:
      schedule: the order of the stages' work; see :func:`jaxpar.pipeline.schedule`.
      activation_checkpointing: ``full`` stores the input of a stage's layers and recomputes their forward in the
        backward. ``none`` stores the residuals that the layers' own checkpoint policies save, for every microbatch in
        flight.
      layers_per_stage: the number of layers in each piece, in model order. Empty: all pieces are equal.
      grad_reduction: when gradients are reduced over devices. ``per_step``: each device sums its gradients over all
        microbatches, and one reduction follows. Until then the sums are unsharded, in fp32. ``per_microbatch``: the
        gradients of each layer are reduce-scattered for every microbatch. The sums are then sharded as the gradients
        are, but the traffic is multiplied by the number of microbatches. ``per_chunk``: a stage sums the gradients of
        one chunk until it changes to the next chunk. When the last stage has changed, all stages reduce-scatter the
        sums, beside their next backward. With ``interleaved`` this happens once per group of ``stages`` microbatches,
        and the sums of two chunks are unsharded instead of those of all chunks.
      executor: ``lockstep``: in a tick, all stages execute every kind of operation that any stage has in it. Works with
        any other mesh axes. ``independent``: each stage executes only its own operations. Use it for schedules whose
        stages do different things in a tick, on meshes in which only ``pipeline`` and the batch's axes are larger than
        1.
      recompute: one number per stage: how many of the first layers of each of its pieces store only their input and
        recompute their residuals in the backward. The other layers store their residuals. Every stage allocates buffers
        of the size that the largest stage needs. Empty: no layer recomputes.
      embedding: ``per_step``: ``PipelineLoss.embed`` and its backward run once for the full batch, before and after the
        ticks. The input of the first layer is stored for the full batch, sharded over all devices; its cotangent
        overwrites it. ``per_microbatch``: they run in the ticks, on all stages in parallel, for one microbatch (or
        sequence chunk) at a time, so nothing is stored for the full batch. The weights that ``embed`` reads are
        gathered for all ticks, and their gradients are summed in fp32. This needs less memory where the batch's
        activations are larger than those weights. ``embed`` then receives one device's rows of a microbatch.
      head_grad_reduction: when gradients outside the layers are reduced over devices. ``per_step``: each device sums
        its own over all microbatches, in fp32, unsharded over the axes of the batch, and one reduction follows.
        ``per_microbatch``: they are reduce-scattered for every microbatch. The sums are then sharded as the gradients
        are, but the traffic is multiplied by the number of microbatches.

    Raises:
      ConfigError: a value is unknown, or two values contradict each other.

    >>> import jaxpar as jp
    >>> one = jp.pipeline.schedule("1f1b", stages=4, microbatches=8)
    >>> Pipeline(one, activation_checkpointing="none", recompute=(2, 1, 0, 0)).grad_reduction
    'per_step'
    """

    schedule: Schedule
    activation_checkpointing: ActivationCheckpointing = "full"
    layers_per_stage: tuple[int, ...] = ()
    grad_reduction: Literal["per_step", "per_chunk", "per_microbatch"] = "per_step"
    executor: Literal["lockstep", "independent"] = "lockstep"
    recompute: tuple[int, ...] = ()
    embedding: Literal["per_step", "per_microbatch"] = "per_step"
    head_grad_reduction: Literal["per_step", "per_microbatch"] = "per_step"

    def __post_init__(self) -> None:
        _check_choice("pipeline: activation_checkpointing", self.activation_checkpointing, _CHECKPOINTING)
        _check_choice("pipeline: grad_reduction", self.grad_reduction, ("per_step", "per_chunk", "per_microbatch"))
        _check_choice("pipeline: executor", self.executor, ("lockstep", "independent"))
        _check_choice("pipeline: embedding", self.embedding, ("per_step", "per_microbatch"))
        _check_choice("pipeline: head_grad_reduction", self.head_grad_reduction, ("per_step", "per_microbatch"))
        if self.executor == "independent" and self.grad_reduction != "per_step":
            raise ConfigError(
                "pipeline: executor is 'independent', which allows no collectives in a stage's layers, but "
                f"grad_reduction is {self.grad_reduction!r}, which scatters gradients layer by layer. Remedy: set "
                "grad_reduction='per_step' or executor='lockstep'."
            )
        start, stages = f"pipeline: recompute is {list(self.recompute)}", self.schedule.stages
        if any(not is_count(n, 0) for n in self.recompute):
            raise ConfigError(
                f"pipeline: recompute must be a list of non-negative integers, got {list(self.recompute)}."
            )
        if self.recompute and self.activation_checkpointing == "full":
            raise ConfigError(
                f"{start}, but activation_checkpointing is 'full', which recomputes every layer. Remedy: set "
                "activation_checkpointing='none', or leave recompute out."
            )
        if self.recompute and len(self.recompute) != stages:
            raise ConfigError(
                f"{start}, which has {len(self.recompute)} numbers, but the schedule has {stages} stages. Remedy: give "
                "one number per stage."
            )


@dataclass(frozen=True)
class Asynchronous:
    """How a step runs layers over a pipeline that is never drained between steps; see
    :func:`jaxpar.pipeline.pipedream_train_step`.

    Attributes:
      name: ``pipedream_2bw``: one update per batch, with the gradient of the previous version: W(t+1) = W(t) -
        optimizer(gradient of batch t - 1 at W(t - 1)). ``pipedream``: one update per microbatch and stage; stage s of S
        uses a gradient that is 2 (S - 1 - s) updates old.
      stages: the number of devices along ``pipeline``.
      microbatches: the number of microbatches in a batch, at least 2 (stages - 1).
      activation_checkpointing, layers_per_stage, grad_reduction: as for :class:`Pipeline`, without ``per_chunk``.

    Raises:
      ConfigError: a value is unknown, or a size is not a positive integer.
      ScheduleError: there are too few microbatches.

    The two variants are PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503) and PipeDream (Narayanan et al. 2019,
    SOSP).

    >>> two = Asynchronous("pipedream_2bw", stages=4, microbatches=8)
    >>> two.schedule.stages, two.executor
    (4, 'lockstep')
    """

    name: str
    stages: int
    microbatches: int
    activation_checkpointing: ActivationCheckpointing = "full"
    layers_per_stage: tuple[int, ...] = ()
    grad_reduction: Literal["per_step", "per_microbatch"] = "per_step"

    def __post_init__(self) -> None:
        start = "asynchronous pipeline: "
        _check_choice(f"{start}name", self.name, ASYNCHRONOUS)
        _check_choice(f"{start}activation_checkpointing", self.activation_checkpointing, _CHECKPOINTING)
        _check_choice(f"{start}grad_reduction", self.grad_reduction, ("per_step", "per_microbatch"))
        for name, size in (("stages", self.stages), ("microbatches", self.microbatches)):
            if not is_count(size):
                raise ConfigError(f"{start}{name} must be a positive integer, got {size!r}.")
        self.schedule  # noqa: B018 (raises if there are too few microbatches)

    @property
    def schedule(self) -> AsyncSchedule:
        """The ticks of one call."""
        return AsyncSchedule(self.name, self.stages, self.microbatches, self.microbatches)

    @property
    def executor(self) -> Literal["lockstep"]:
        """Always ``lockstep``."""
        return "lockstep"


def pipeline_options(pipeline: object) -> Pipeline | None:
    """Returns the options of a pipeline, from options or a schedule; ``None`` stays ``None``.

    Raises:
      ConfigError: ``pipeline`` is something else, such as the name of a schedule.

    >>> from jaxpar.parallel.pipeline.schedules.registry import schedule
    >>> pipeline_options(schedule("1f1b", stages=4, microbatches=8)).activation_checkpointing
    'full'
    """
    if pipeline is None or isinstance(pipeline, Pipeline):
        return pipeline
    if isinstance(pipeline, Schedule):
        return Pipeline(pipeline)
    name = pipeline if isinstance(pipeline, str) else "1f1b"
    raise ConfigError(
        f"pipeline must be a jp.Pipeline or a schedule, got {type(pipeline).__name__}. Remedy: "
        f"pipeline=jp.pipeline.schedule({name!r}, stages=4, microbatches=8)."
    )
