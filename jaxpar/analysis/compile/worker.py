"""The compiling process of ``compile_for``: ``python -m jaxpar.analysis.compile.worker FOLDER``.

It reads ``program.export`` and ``request.json`` in FOLDER, compiles for the requested topology, and writes
``program.hlo`` and ``result.json``. It is a separate process because the compiler needs an environment that would
disturb the jax of the caller. The caller is :mod:`jaxpar.analysis.compile.ahead_of_time`.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_SIZES = ("argument_size", "output_size", "temp_size", "alias_size")
MEMORY = (*_SIZES, *(f"host_{size}" for size in _SIZES), "peak_memory")
"""The attributes to read from the compiler's memory analysis, in bytes on one device."""


def main(folder: str) -> None:
    """Compile the program in ``folder``. A failure is written as a result, not raised."""
    root = Path(folder)
    request = json.loads((root / "request.json").read_text())
    result: dict[str, Any]
    try:
        result = _compile(root, request)
    except Exception as error:  # noqa: BLE001 (the caller gets every error of the compiler, verbatim)
        result = {"error": str(error), "kind": type(error).__name__}
    (root / "result.json").write_text(json.dumps(result))


def _compile(root: Path, request: dict[str, Any]) -> dict[str, Any]:
    import jax
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    options = dict(request["topology"])
    description = topologies.get_topology_desc(options.pop("topology_name"), **options)
    devices = _arranged(description.devices, request["mesh"], request.get("rings", ()))
    mesh = Mesh(devices, tuple(request["mesh"]), axis_types=(AxisType.Auto,) * len(request["mesh"]))
    program = export.deserialize(bytearray((root / "program.export").read_bytes()))
    specs = [PartitionSpec(*(tuple(axes) or None for axes in spec)) for spec in request["specs"]]
    kinds = request.get("kinds") or [None] * len(specs)
    inputs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))
        for aval, spec, kind in zip(program.in_avals, specs, kinds, strict=True)
    ]
    jitted = jax.jit(program.call, donate_argnums=tuple(request["donated"]))
    lowered = jitted.lower(*inputs)
    before = resource.getrusage(resource.RUSAGE_SELF)
    compiled = lowered.compile(compiler_options=request["compiler_options"])
    after = resource.getrusage(resource.RUSAGE_SELF)
    (root / "program.hlo").write_text(compiled.as_text() or "")
    stats = compiled.memory_analysis()
    given = {name: getattr(stats, f"{name}_in_bytes", None) for name in MEMORY}
    return {
        "memory": {name: int(size) for name, size in given.items() if size is not None},
        "compile_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "device_kind": str(getattr(description.devices[0], "device_kind", "")),
    }


def _arranged(devices: Sequence[Any], sizes: Mapping[str, int], rings: Sequence[str] = ()) -> Any:
    """Returns the devices as an array of the mesh's shape, with the slow links outermost.

    Ahead of time, all GPUs report slice 0, although NVLink joins only those of one host. Each host is therefore treated
    as a slice.
    """
    from jaxpar.sharding.hardware.device_order import arrange

    if devices[0].platform != "gpu":
        return arrange(list(devices), sizes, rings)
    hosts_as_slices = [
        SimpleNamespace(slice_index=d.process_index, id=d.id, platform=d.platform, device_kind=d.device_kind)
        for d in devices
    ]
    places: Any = arrange(hosts_as_slices, sizes)
    by_id = {device.id: device for device in devices}
    for place in np.ndindex(places.shape):
        places[place] = by_id[places[place].id]
    return places


if __name__ == "__main__":
    main(sys.argv[1])
