"""Hand-written audits and collectives for the tests of the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective


def collective(kind: str, axes: tuple[str, ...], wire_bytes: float, **fields: Any) -> Collective:
    """A collective that sends ``wire_bytes`` from each device, exposed unless ``fields`` say otherwise."""
    plain: dict[str, Any] = {
        "form": "",
        "group": 2,
        "dtype": "bf16",
        "arrays": 1,
        "result_bytes": 0,
        "exposed_bytes": wire_bytes,
        "beside_flops": 0,
        "count": 1,
        "conditional": False,
        "certain": True,
        "source": "",
        "module": "",
        "tensor": "",
        "op_name": "",
    }
    return Collective(kind=kind, axes=axes, wire_bytes=wire_bytes, **{**plain, **fields})


def audited(mesh: Mapping[str, int], *collectives: Collective, **fields: Any) -> Audit:
    """The audit of a program with only these collectives, unless ``fields`` say otherwise."""
    plain: dict[str, Any] = {
        "matmul_flops": 0,
        "kernel_flops": 0,
        "hbm_bytes": 0,
        "other_arms": (),
        "unknown_loops": (),
        "silent_kernels": (),
        "memory": {},
    }
    return Audit(mesh=mesh, collectives=collectives, **{**plain, **fields})
