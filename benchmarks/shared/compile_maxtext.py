"""MaxText's train step, compiled by MaxText's own code in its own environment."""

from __future__ import annotations

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
from jaxpar.analysis.compile.ahead_of_time import cache_folder
from jaxpar.analysis.hlo.audit import audit

MAXTEXT = "0.2.5"
"""The version of MaxText."""
DRIVER = Path(__file__).with_name("maxtext_driver.py")
"""A file of its folder must not have the name of a package that MaxText imports."""
QUIET = ["run_name=t", "base_output_directory=out", "dataset_type=synthetic", "enable_checkpointing=false"]
QUIET += ["log_config=false"]
"""Settings of MaxText for a compile without data, checkpoints and logs."""


def compile_maxtext(python: str, settings: Sequence[str]) -> dict[str, Any]:
    """Compile MaxText's train step and audit it as jaxpar's."""
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PYTHONPATH")}
    # MaxText caches programs in the home folder, so a second compile would take no time.
    own |= {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    own |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(DRIVER), folder, *settings]
        done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
        if done.returncode or not (Path(folder) / "result.json").is_file():
            raise SystemExit(f"MaxText failed with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        told = json.loads((Path(folder) / "result.json").read_text())
        mesh = {axis: size for axis, size in told["mesh"].items() if size > 1}
        report = audit((Path(folder) / "program.hlo").read_text(), mesh=mesh)
    figures = figures_of(report, told["memory"], told["compile_cpu_seconds"], told["versions"])
    return figures | {"trace_cpu_seconds": told["trace_cpu_seconds"], "mesh": mesh}


def maxtext_python(given: str | None) -> str:
    """Return an interpreter with MaxText: the given one, or one installed once next to jaxpar's cache."""
    if given:
        return given
    folder = cache_folder().parent / f"maxtext-{MAXTEXT}"
    python, whole = folder / "bin" / "python", folder / "whole"
    if not whole.is_file():
        uv = shutil.which("uv")
        if uv is None:
            raise SystemExit("installing MaxText needs uv. Remedy: pip install uv, or --maxtext-python.")
        print(f"installing MaxText {MAXTEXT} in {folder}", file=sys.stderr)
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", "3.12", str(folder)], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(python), f"maxtext[tpu]=={MAXTEXT}"]
        subprocess.run(install, cwd=folder, check=True)  # in the project's folder uv would apply our version pins
        whole.touch()
    return str(python)
