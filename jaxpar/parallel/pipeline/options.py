"""``Pipeline`` and ``Asynchronous``: how a step's layers go over the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS, AsyncSchedule
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import ActivationCheckpointing
from jaxpar.utils.checks import is_count


@dataclass(frozen=True)
class Pipeline:
    """How a step's layers go through a pipeline.

    Attributes:
      schedule: see :func:`jaxpar.schedule`.
      activation_checkpointing: ``full`` keeps what a stage is given and computes its layers again for the backward; ``none`` keeps what the layers'
        own policies of recomputation keep, for every microbatch on its way.
      grad_reduction: ``per_step`` sums a device's own gradients over all microbatches and scatters the sums, which lie whole in fp32 till then; ``per_microbatch``
        scatters a layer's gradients with every microbatch, which sends that many times as much, and its sums are split as the gradients are.
        ``per_chunk`` sums those of a chunk while a stage stays with it, and scatters them when all stages have gone on to the next: of
        ``interleaved`` once for each group of as many microbatches as there are stages, and two chunks' sums lie whole in the place of all.
      executor: ``lockstep`` makes all stages do in a tick what any of them does, beside whatever other axes; ``independent`` makes each do its own,
        for schedules whose stages do different things in a tick, on meshes that split nothing but batches beside stages.
      layers: how many layers each piece has, in the order of the model; empty for all alike.
      recompute: for each stage, how many of the first layers of each of its pieces keep their input alone and compute the rest again in the
        backward; the others keep their residuals. Buffers are as large as the stage with most needs. Empty: all keep theirs.
      embedding: ``per_step`` does what comes before the layers for the whole batch, outside of the ticks, and back again: what the first layer is given, and
        its cotangent, wait whole in one place, split over all devices. ``per_microbatch`` does it for one microbatch at a time (of sequences in virtual_stages: for
        one chunk), on all stages at once, so nothing of the batch waits; its weights are gathered for all of the ticks, and their gradients are
        summed there, in fp32. Less memory where a batch's activations are more than these weights. It sees one device's rows of a microbatch then.
    """

    schedule: Schedule
    activation_checkpointing: ActivationCheckpointing = "full"
    layers: tuple[int, ...] = ()
    grad_reduction: Literal["per_step", "per_chunk", "per_microbatch"] = "per_step"
    executor: Literal["lockstep", "independent"] = "lockstep"
    recompute: tuple[int, ...] = ()
    embedding: Literal["per_step", "per_microbatch"] = "per_step"

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("activation_checkpointing", self.activation_checkpointing, get_args(ActivationCheckpointing)),
            ("grad_reduction", self.grad_reduction, ("per_step", "per_chunk", "per_microbatch")),
            ("executor", self.executor, ("lockstep", "independent")),
            ("embedding", self.embedding, ("per_step", "per_microbatch")),
        )
        for name, value, known in checks:
            if value not in known:
                wanted = " or ".join((", ".join(map(repr, known[:-1])), repr(known[-1])))
                raise ConfigError(
                    f"pipeline: {name} is {value!r}, but {wanted} is wanted.{did_you_mean(str(value), known)}"
                )
        if self.executor == "independent" and self.grad_reduction != "per_step":
            raise ConfigError(
                f"pipeline: executor is 'independent', in which a stage's layers can hold no collective, but grad_reduction is {self.grad_reduction!r}, which scatters "
                "gradients layer by layer. Remedy: grad_reduction='per_step', or executor='lockstep'."
            )
        self._check_recompute()

    def _check_recompute(self) -> None:
        said, stages = f"pipeline: recompute is {list(self.recompute)}", self.schedule.stages
        if any(not is_count(n, 0) for n in self.recompute):
            raise ConfigError(f"{said}, but numbers of layers, 0 or more, are wanted.")
        if self.recompute and self.activation_checkpointing == "full":
            raise ConfigError(
                f"{said}, but activation_checkpointing is 'full', with which every layer is computed again. Remedy: activation_checkpointing='none', or leave recompute out."
            )
        if self.recompute and len(self.recompute) != stages:
            raise ConfigError(
                f"{said}, {len(self.recompute)} numbers, but the schedule has {stages} stages. Remedy: a number for each stage."
            )


@dataclass(frozen=True)
class Asynchronous:
    """How layers go through a pipeline that is never emptied between steps; for :class:`jaxpar.PipedreamStep`.

    Attributes:
      name: ``pipedream_2bw``: an update a batch, with a gradient of the version before: W(t+1) = W(t) - optimizer(gradient of batch t - 1 at W(t - 1)).
        ``pipedream``: an update a microbatch and stage, stage s of S with a gradient that is 2 (S - 1 - s) updates late.
      stages: devices along ``pipeline``.
      microbatches: pieces of a batch, 2 (stages - 1) or more.
      activation_checkpointing, layers, grad_reduction: as for :class:`Pipeline`.

    Raises:
      ConfigError: no such name, or nothing that can be kept or reduced so.
      ScheduleError: too few microbatches.
    """

    name: str
    stages: int
    microbatches: int
    activation_checkpointing: ActivationCheckpointing = "full"
    layers: tuple[int, ...] = ()
    grad_reduction: Literal["per_step", "per_chunk", "per_microbatch"] = "per_step"

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("name", self.name, ASYNCHRONOUS),
            ("activation_checkpointing", self.activation_checkpointing, get_args(ActivationCheckpointing)),
            ("grad_reduction", self.grad_reduction, ("per_step", "per_microbatch")),
        )
        for name, value, known in checks:
            if value not in known:
                wanted = " or ".join(map(repr, known))
                raise ConfigError(
                    f"asynchronous pipeline: {name} is {value!r}, but {wanted} is wanted.{did_you_mean(str(value), known)}"
                )
        for name, size in (("stages", self.stages), ("microbatches", self.microbatches)):
            if not is_count(size):
                raise ConfigError(f"asynchronous pipeline: {name} is {size!r}, but a number, 1 or more, is wanted.")
        self.schedule  # noqa: B018 (raises where there are too few microbatches)

    @property
    def schedule(self) -> AsyncSchedule:
        """What a call does, tick by tick."""
        return AsyncSchedule(self.name, self.stages, self.microbatches, self.microbatches)

    @property
    def executor(self) -> Literal["lockstep"]:
        """All stages do the same in every tick."""
        return "lockstep"
