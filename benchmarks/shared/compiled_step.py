"""A train step compiled for a topology and audited, and sizes from which benchmarks compute figures by hand."""

from __future__ import annotations

import json
import os
import tempfile
import time
from typing import Any

from jaxpar.analysis.compile.ahead_of_time import compile_for
from jaxpar.analysis.hlo.audit import Audit, audit
from jaxpar.app.job import Job
from jaxpar.models.llama import LlamaConfig
from jaxpar.sharding.hardware.topology import Topology

DEVICES = 16
"""Devices of ``v5e:4x4``, for which most benchmarks compile."""
BF16, FP32 = 2, 4
"""Bytes of a value."""


def matrices(model: LlamaConfig) -> float:
    """Return the number of parameters of the layers' matrices."""
    return float(model.matmul_params - model.embed * model.vocab)


def figures_of(report: Audit, memory: dict[str, int], seconds: float, versions: dict[str, str]) -> dict[str, Any]:
    """Return the figures of a compiled step: bytes sent, FLOPs, memory, compile time and versions."""
    told = json.loads(report.to_json())
    kept = ("exposed_bytes", "matmul_flops", "kernel_flops", "certain")
    figures = {name: told[name] for name in kept} | {"wire_bytes": report.wire_bytes(), "wire": told["wire_bytes"]}
    figures["worst_wire_bytes"] = report.worst_wire_bytes()
    for name in ("dtype", "group"):
        totals: dict[Any, float] = {}
        for c in report.collectives:
            totals[getattr(c, name)] = totals.get(getattr(c, name), 0) + c.total_wire_bytes
        figures[f"wire_by_{name}"] = totals
    return figures | {"memory": memory, "compile_cpu_seconds": seconds, "versions": versions}


def compile_step(job: Job, topology: Topology, keep: bool, *, other_arms: bool = False) -> dict[str, Any]:
    """Compile and audit jaxpar's step, as ``jaxpar check --topology`` does.

    With ``keep`` a step that jaxpar's cache holds is not compiled. Of each conditional the audit counts the arm that
    sends most, or with ``other_arms`` the other arms.
    """
    layout = job.layout(topology.devices)
    options = job.step_options() | {"compiler_options": job.compiler_options(topology.platform)}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if not keep:
            os.environ["JAXPAR_CACHE"] = folder  # an empty cache, so that the step is compiled
        step = compile_for(topology, layout, job.make_model, job.tx, job.loss_fn, job.batch_spec(), **options)
    traced = time.process_time() - began
    report = audit(step, mesh=layout.mesh)
    report = report.through_other_arms() if other_arms else report
    figures = figures_of(report, step.memory, step.compile_cpu_seconds, step.versions)
    return figures | {"trace_cpu_seconds": traced, "cached": step.cached}
