"""Compile MaxText's train step with MaxText's interpreter; ``compile_maxtext.py`` runs this file.

    python maxtext_driver.py FOLDER SETTINGS...

It runs MaxText's own ``train_compile``. It writes the optimized HLO to FOLDER as ``program.hlo``, and CPU seconds, the
compiler's memory analysis and the mesh as ``result.json``. It does not import jaxpar.
"""

from __future__ import annotations

import json
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import maxtext  # type: ignore[import-not-found, unused-ignore]
from maxtext.trainers.pre_train import train_compile  # type: ignore[import-not-found, unused-ignore]

MEMORY = ("argument_size", "output_size", "temp_size", "alias_size", "peak_memory")


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far, over all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def watched(folder: Path, compile_: Any, mesh: dict[str, int]) -> Any:
    """Wrap ``Lowered.compile`` so that it also writes the program, the compile seconds and the seconds before it."""
    began = cpu_seconds()

    def compile_and_tell(lowered: Any, *args: Any, **options: Any) -> Any:
        before = cpu_seconds()
        compiled = compile_(lowered, *args, **options)
        seconds = cpu_seconds() - before
        (folder / "program.hlo").write_text(compiled.as_text())
        stats = compiled.memory_analysis()
        facts = {
            "compile_cpu_seconds": seconds,
            "trace_cpu_seconds": before - began,
            "memory": {name.rsplit("_", 1)[0]: int(getattr(stats, f"{name}_in_bytes")) for name in MEMORY},
            "mesh": mesh,
            "versions": {name: version(name) for name in ("maxtext", "jax", "libtpu")},
        }
        (folder / "result.json").write_text(json.dumps(facts, indent=1))
        return compiled

    return compile_and_tell


def main(folder: Path, settings: list[str]) -> None:
    """Compile MaxText's step with these settings. The step is compiled last, so its facts overwrite all others."""
    mesh: dict[str, int] = {}
    make_mesh = train_compile.get_topology_mesh

    def mesh_and_tell(config: Any) -> Any:
        made = make_mesh(config)
        mesh.update({str(axis): int(size) for axis, size in made.shape.items()})
        return made

    train_compile.get_topology_mesh = mesh_and_tell
    jax.stages.Lowered.compile = watched(  # type: ignore[method-assign]
        folder, jax.stages.Lowered.compile, mesh
    )
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    train_compile.main([train_compile.__file__, str(base), *settings])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
