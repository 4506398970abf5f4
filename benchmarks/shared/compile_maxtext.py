"""MaxText's train step, compiled by MaxText's own code in its own environment."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.compiled_step import figures_of
from jaxpar.analysis.compile.ahead_of_time import AheadOfTime, cache_folder
from jaxpar.analysis.compile.compilers import COMPILERS, versions_of
from jaxpar.analysis.hlo.audit import audit
from jaxpar.sharding.hardware.topology import Topology

MAXTEXT = "0.2.5"
"""The version of MaxText."""
DRIVER = Path(__file__).with_name("maxtext_driver.py")
"""A file of its folder must not have the name of a package that MaxText imports."""
NAMES = ("maxtext", "jax", "libtpu")
"""The packages that decide about MaxText's program."""
QUIET = ["run_name=t", "base_output_directory=out", "dataset_type=synthetic", "enable_checkpointing=false"]
QUIET += ["log_config=false"]
"""Settings of MaxText for a compile without data, checkpoints and logs."""


def compile_maxtext(python: str, settings: Sequence[str]) -> dict[str, Any]:
    """Compile MaxText's train step and audit it as jaxpar's."""
    with tempfile.TemporaryDirectory() as folder:
        told = _compile(python, settings, Path(folder))
        report = audit((Path(folder) / "program.hlo").read_text(), mesh=told["mesh"])
    figures = figures_of(report, told["memory"], told["compile_cpu_seconds"], told["versions"])
    return figures | {"trace_cpu_seconds": told["trace_cpu_seconds"], "mesh": told["mesh"]}


def maxtext_program(python: str, settings: Sequence[str], topology: Topology) -> tuple[AheadOfTime, dict[str, int]]:
    """Return MaxText's train step for a topology, from jaxpar's cache if it holds it, and the axes of its mesh.

    The cache's lock keeps other compilations of this machine out.
    """
    key = json.dumps([MAXTEXT, versions_of_python(python), str(topology), list(settings), DRIVER.read_text()])
    entry = cache_folder() / f"maxtext-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    with (entry.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cached = (entry / "result.json").is_file()
        if not cached:
            with tempfile.TemporaryDirectory(dir=entry.parent) as folder:
                _compile(python, settings, Path(folder))
                entry.mkdir(exist_ok=True)
                for name in ("program.hlo", "result.json"):  # an entry with a result is complete
                    shutil.copy(Path(folder) / name, entry)
    told = json.loads((entry / "result.json").read_text())
    program = AheadOfTime(
        topology=str(topology),
        text=(entry / "program.hlo").read_text(),
        memory=told["memory"],
        compile_cpu_seconds=told["compile_cpu_seconds"],
        device_kind=topology.abstract_device.device_kind,
        versions=told["versions"],
        cached=cached,
    )
    return program, told["mesh"]


def _compile(python: str, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compile MaxText's train step into a folder; return what the driver reports, with the mesh axes above 1."""
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PYTHONPATH")}
    # MaxText caches programs in the home folder, so a second compile would take no time.
    own |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    own |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [python, str(DRIVER), str(folder), *settings]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    result = folder / "result.json"
    if done.returncode or not result.is_file():
        raise SystemExit(f"MaxText failed with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    told: dict[str, Any] = json.loads(result.read_text())
    told["mesh"] = {axis: size for axis, size in told["mesh"].items() if size > 1}
    result.write_text(json.dumps(told))
    return told


def maxtext_python(given: str | None) -> str:
    """Return an interpreter with MaxText: the given one, or one installed once next to jaxpar's cache."""
    if given:
        return given
    folder = cache_folder().parent / f"maxtext-{MAXTEXT}"
    python, whole = folder / "bin" / "python", folder / "whole"
    if not whole.is_file():
        print(f"installing MaxText {MAXTEXT} in {folder}", file=sys.stderr)
        subprocess.run([_uv(), "venv", "--quiet", "--clear", "--python", "3.12", str(folder)], check=True)
        _install(python, f"maxtext[tpu]=={MAXTEXT}")
        whole.touch()
    return str(python)


def maxtext_with_our_compiler(given: str | None) -> str:
    """Return :func:`maxtext_python` with jaxpar's versions of jax and libtpu.

    MaxText's own requirements choose a newer libtpu, whose programs differ.
    """
    python = maxtext_python(given)
    ours, found = versions_of(COMPILERS["tpu"]), versions_of_python(python)
    other = [f"{name}=={ours[name]}" for name in ("jax", "libtpu") if found[name] != ours[name]]
    if other and given:
        have = " and ".join(f"{name} {found[name]}" for name in ("jax", "libtpu"))
        raise SystemExit(f"{given} has {have}. Remedy: uv pip install --python {given} {' '.join(other)}")
    if other:
        print(f"installing {' and '.join(other)} for {python}", file=sys.stderr)
        _install(Path(python), *other)
    return python


def versions_of_python(python: str) -> dict[str, str]:
    """Return the versions of MaxText and of its compiler in an interpreter's environment."""
    code = f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {NAMES}}}))"
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def _install(python: Path, *requirements: str) -> None:
    command = [_uv(), "pip", "install", "--quiet", "--python", str(python), *requirements]
    subprocess.run(
        command, cwd=python.parents[1], check=True
    )  # in the project's folder uv would apply our version pins


def _uv() -> str:
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("installing MaxText needs uv. Remedy: pip install uv, or --maxtext-python.")
    return uv
