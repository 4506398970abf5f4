"""The compiling half of :mod:`jaxpar.plan.aot`: ``python -m jaxpar.plan.worker FOLDER`` in a process of its own.

It reads ``program.export`` and ``request.json`` in FOLDER, compiles for the topology asked for, and writes ``program.hlo`` and
``result.json``. A process of its own, because the compiler wants an environment that would disturb the caller's jax.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any


def main(folder: str) -> None:
    """Compile what lies in ``folder``; a failure of the compiler is written as a result, not raised."""
    here = Path(folder)
    request = json.loads((here / "request.json").read_text())
    result: dict[str, Any]
    try:
        result = _compile(here, request)
    except Exception as error:  # noqa: BLE001 (whatever the compiler says goes back to the caller, in its own words)
        result = {"error": str(error), "kind": type(error).__name__}
    (here / "result.json").write_text(json.dumps(result))


def _compile(here: Path, request: dict[str, Any]) -> dict[str, Any]:
    import jax
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from jaxpar.devices import arrange

    options: dict[str, Any] = {"num_slices": request["slices"]} if request["slices"] > 1 else {}
    if request["topology"].startswith("v4:"):
        options["chip_config_name"] = "megacore"  # else libtpu takes the two cores of a chip for two devices
    description = topologies.get_topology_desc(request["topology"], platform="tpu", **options)
    devices = arrange(list(description.devices), request["mesh"])
    mesh = Mesh(devices, tuple(request["mesh"]), axis_types=(AxisType.Auto,) * len(request["mesh"]))
    program = export.deserialize(bytearray((here / "program.export").read_bytes()))
    specs = [PartitionSpec(*(tuple(axes) or None for axes in spec)) for spec in request["specs"]]
    inputs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))
        for aval, spec in zip(program.in_avals, specs, strict=True)
    ]
    jitted = jax.jit(program.call, donate_argnums=tuple(request["donated"]))
    before = resource.getrusage(resource.RUSAGE_SELF)
    compiled = jitted.lower(*inputs).compile(compiler_options=request["compiler_options"])
    after = resource.getrusage(resource.RUSAGE_SELF)
    (here / "program.hlo").write_text(compiled.as_text() or "")
    stats = compiled.memory_analysis()
    names = (
        "argument_size",
        "output_size",
        "temp_size",
        "alias_size",
        "peak_memory",
        "host_argument_size",
        "host_temp_size",
    )
    return {
        "memory": {name: int(getattr(stats, f"{name}_in_bytes", 0)) for name in names},
        "compile_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "device_kind": str(getattr(description.devices[0], "device_kind", "")),
        "versions": {"jax": jax.__version__, "libtpu": _libtpu()},
    }


def _libtpu() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("libtpu")
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(sys.argv[1])
