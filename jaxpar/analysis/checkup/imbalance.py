"""The step of the busiest device if the routing of tokens gives it more than the balanced load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.analysis.compile.ahead_of_time import AheadOfTime
from jaxpar.analysis.hlo.audit import Audit, audit
from jaxpar.analysis.roofline import roofline, show_time
from jaxpar.analysis.units import aligned, show_bytes
from jaxpar.errors import PlanError

COLUMNS = ("load", "matmul FLOPs", "on the wire", "step")


@dataclass(frozen=True)
class DeviceLoad:
    """One device in one step.

    Attributes:
      matmul_flops: FLOPs of its matmuls.
      wire_bytes: bytes that it sends or receives, whichever is more.
      step: seconds, by the roofline.
    """

    matmul_flops: int
    wire_bytes: float
    step: float


@dataclass(frozen=True)
class LoadImbalance:
    """One step under balanced, imbalanced and worst routing.

    Attributes:
      factor: the load of the busiest device divided by the balanced load.
      loads: the busiest device with the ``balanced`` load, the ``imbalanced`` load, and the ``worst`` load that its
        buffers allow; empty if the program has no ragged operations.
    """

    factor: float
    loads: Mapping[str, DeviceLoad]

    def rows(self) -> list[tuple[str, ...]]:
        """Returns table cells: the load, its matmul FLOPs, its bytes on the wire and its step, each with a ratio."""
        names = {"balanced": "balanced", "imbalanced": f"{self.factor:g} × balanced", "worst": "full buffers"}
        rows: list[tuple[str, ...]] = []
        for key, load in self.loads.items():
            ratio = load.step / self.loads["balanced"].step if self.loads["balanced"].step else 1.0
            step = show_time(load.step) + (f" ({ratio:.2f} ×)" if key != "balanced" else "")
            rows.append((names[key], f"{load.matmul_flops:.4g}", show_bytes(round(load.wire_bytes)), step))
        return rows

    def headline(self) -> str:
        """Returns one line: what the figures are of, or why there are none."""
        if not self.loads:
            return (
                f"load imbalance {self.factor:g}: the program has no ragged operations, so the routing of tokens does "
                f"not change its work"
            )
        return f"load imbalance {self.factor:g}: the busiest device, by the roofline (a model, not a measurement)"

    def __str__(self) -> str:
        return "\n".join([self.headline(), *(f"  {line}" for line in aligned([COLUMNS, *self.rows()]) if self.loads)])


def load_imbalance(step: AheadOfTime, mesh: Mapping[str, int], factor: float) -> LoadImbalance:
    """Returns what a step costs its busiest device.

    Args:
      step: the compiled step.
      mesh: mesh axis → size.
      factor: the load of the busiest device divided by the balanced load.

    Raises:
      PlanError: ``factor`` is not a finite number of at least 1.
    """
    check_factor(factor)
    balanced = audit(step, mesh=mesh)
    if not balanced.ragged:
        return LoadImbalance(factor, {})
    imbalances = {"imbalanced": factor, "worst": math.inf}
    reports = {"balanced": balanced} | {key: audit(step, mesh=mesh, imbalance=f) for key, f in imbalances.items()}
    return LoadImbalance(factor, {key: _load(report, step) for key, report in reports.items()})


def check_factor(factor: float) -> None:
    """Raise unless a load imbalance is a finite number of at least 1.

    >>> check_factor(1.5)
    """
    if not 1 <= factor < math.inf:
        raise PlanError(
            f"imbalance must be a finite number of at least 1, got {factor:g}. Remedy: give the load of the busiest "
            f"device divided by the mean load, such as 1.5."
        )


def _load(report: Audit, step: AheadOfTime) -> DeviceLoad:
    line = roofline(report, step.topology, rings=step.rings)
    return DeviceLoad(report.matmul_flops, report.wire_bytes(), line.step)
