"""``compile_plan``: the figures of a plan's step, from the compiler of a topology that is not present."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import optax

from jaxpar.analysis.checkup.checkup import Checkup, check_up
from jaxpar.analysis.checkup.findings import WRONG_IN_XLA, About
from jaxpar.analysis.compile.ahead_of_time import CompilerOptions, aim
from jaxpar.analysis.layout.explain import explain
from jaxpar.analysis.roofline import Transfers
from jaxpar.errors import PlanError
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel


@dataclass(frozen=True)
class PlannedRun:
    """What a plan runs, as :func:`jaxpar.analysis.check_up` takes it.

    Attributes:
      layout: on an abstract mesh.
      make_model, tx, loss_fn, batch: as for :func:`jaxpar.analysis.compile_for`.
      options: keyword arguments of :func:`jaxpar.train_step`.
      compiler_options: platform, such as ``tpu`` → the options of XLA.
      about: facts about the model.
    """

    layout: Layout
    make_model: MakeModel
    tx: optax.GradientTransformation
    loss_fn: LossFn
    batch: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    compiler_options: Mapping[str, CompilerOptions] = field(default_factory=dict)
    about: About | None = None


@dataclass(frozen=True)
class CompiledPlan:
    """A compiled step, by the roofline of its program.

    Attributes:
      fits: whether it fits into the memory of a device.
      step, compute, hbm, exposed: seconds.
      transfers: the time on the links, by mesh axes.
      wire_bytes, exposed_bytes: bytes that one device sends, and those that overlap with no compute.
      peak_bytes: bytes on one device at the peak.
      mfu: useful FLOPs divided by those that the devices could do; ``None`` if unknown.
      tokens_per_second: over all devices; ``None`` if unknown.
      repaired: what XLA would compute wrongly, and the step does otherwise, a sentence each.
    """

    fits: bool
    step: float
    compute: float
    hbm: float
    exposed: float
    transfers: tuple[Transfers, ...]
    wire_bytes: float
    exposed_bytes: float
    peak_bytes: float
    mfu: float | None = None
    tokens_per_second: float | None = None
    repaired: tuple[str, ...] = ()

    @property
    def network_bytes(self) -> float:
        """Bytes that one device sends to other slices or hosts."""
        return sum(t.network_bytes for t in self.transfers)

    @property
    def network_seconds(self) -> float:
        """Seconds of the network between slices or hosts, hidden or not."""
        return sum(t.network_seconds for t in self.transfers)

    @classmethod
    def of(cls, found: Checkup) -> Self:
        """Returns the figures of a checkup. Of a program that the compiler rejected, only its bytes are known."""
        line, memory, report = found.roofline, found.memory, found.audit
        if line is None or memory is None or report is None:
            (too_large,) = found.findings
            needed = too_large.bytes * too_large.share / (too_large.share - 1.0)
            return cls(False, math.inf, 0.0, 0.0, 0.0, (), 0.0, 0.0, needed)
        return cls(
            fits=memory.fits,
            step=line.step,
            compute=line.compute,
            hbm=line.hbm,
            exposed=line.exposed,
            transfers=line.transfers,
            wire_bytes=sum(c.total_wire_bytes for c in report.collectives),
            exposed_bytes=sum(c.exposed_bytes * c.count for c in report.collectives),
            peak_bytes=memory.total,
            mfu=line.mfu,
            tokens_per_second=line.tokens_per_second,
            repaired=tuple(f"{f.text}: {f.where}" for f in found.findings if f.kind == WRONG_IN_XLA),
        )


def traced_bytes(run: PlannedRun, topology: Topology) -> int | None:
    """Returns the bytes at the peak, estimated from the trace of a step; ``None`` if it has no estimate."""
    aimed = aim(run.layout, topology)
    report = explain(aimed, run.make_model, run.tx, batch=run.batch, loss_fn=run.loss_fn, step=dict(run.options))
    return None if report.memory is None else report.memory.total


def compile_plan(run: PlannedRun, topology: Topology) -> CompiledPlan:
    """Returns the figures of a plan's step, compiled for a topology.

    Raises:
      MissingExtraError: there is no compiler for the topology's devices.
      PlanError: jax cannot lower the program.
      JaxparError: the step cannot be traced with this layout.
    """
    try:
        found = check_up(
            topology, run.layout, run.make_model, run.tx, run.loss_fn, run.batch,
            about=run.about, compiler_options=run.compiler_options.get(topology.platform), **run.options,
        )  # fmt: skip
    except NotImplementedError as error:  # jax cannot lower the program, such as a kernel on axes that are not manual
        raise PlanError(f"jax cannot lower the step: {error}") from error
    return CompiledPlan.of(found)
