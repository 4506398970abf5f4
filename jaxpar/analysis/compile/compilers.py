"""The compilers that :mod:`jaxpar.analysis.compile.ahead_of_time` uses: their interpreters, versions and arguments.

A compiler may be installed in another Python interpreter, which an environment variable names. That interpreter must
have the same jax and the plugin of the platform.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jax
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jaxpar.errors import CompileError, MissingExtraError
from jaxpar.parallel.attention.kernels import cudnn_calls
from jaxpar.sharding.hardware.topology import Topology

_RAGGED_EXCHANGE = "ragged_all_to_all"


@dataclass(frozen=True)
class Compiler:
    """The compiler for one platform.

    Attributes:
      variable: the environment variable that names its interpreter. If unset, the running interpreter is used.
      device: what it compiles for, in words.
      plugin: the package that contains it.
      jax_extra: the extra of jax that installs it.
      extra: the extra of jaxpar that installs it.
      lowering: the name of the platform in ``jax.export``.
      environment: variables that are set in its process.
      others: further packages whose versions affect the compiled program.
      kernels: custom calls for which ``jax.export`` must disable its safety check.
    """

    variable: str
    device: str
    plugin: str
    jax_extra: str
    extra: str
    lowering: str
    environment: tuple[tuple[str, str], ...]
    others: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """The path of its interpreter."""
        return os.environ.get(self.variable, sys.executable)

    @property
    def install(self) -> str:
        """The requirement that installs it into an interpreter."""
        return f"'jax[{self.jax_extra}]=={jax.__version__}'"


COMPILERS = {
    "tpu": Compiler(
        variable="JAXPAR_TPU_PYTHON",
        device="a TPU",
        plugin="libtpu",
        jax_extra="tpu",
        extra="tpu",
        lowering="tpu",
        kernels=(_RAGGED_EXCHANGE,),
        # With libtpu installed, importing jax looks for a TPU and queries the cloud's metadata server for its kind.
        environment=(("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")),
    ),
    "gpu": Compiler(
        variable="JAXPAR_GPU_PYTHON",
        device="an NVIDIA GPU",
        plugin="jax-cuda13-plugin",
        jax_extra="cuda13",
        extra="gpu",
        others=("jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13"),
        lowering="cuda",
        kernels=("__gpu$xla.gpu.triton", *cudnn_calls.NAMES.values(), _RAGGED_EXCHANGE),
        # A machine with a GPU must compile the same program as a machine without one.
        environment=(("CUDA_VISIBLE_DEVICES", ""),),
    ),
}
"""Platform → its compiler."""


def versions_of(compiler: Compiler) -> dict[str, str]:
    """Returns the versions of jax and of all packages that affect the compiled program, in the compiler's interpreter.

    Raises:
      MissingExtraError: that interpreter has no compiler.
      CompileError: it has another jax or a compiler for another jax, or the interpreter does not run.
    """
    python, names = compiler.python, ("jax", compiler.plugin, *compiler.others)
    code = (
        "import json\nfrom importlib.metadata import version, PackageNotFoundError\n"
        "def v(n):\n    try: return version(n)\n    except PackageNotFoundError: return None\n"
        f"print(json.dumps({{n: v(n) for n in {names!r}}}))"
    )
    try:
        found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        text = f"the interpreter {python!r} failed to run ({error}). Remedy: correct {compiler.variable}."
        raise CompileError(text) from error
    versions: dict[str, str | None] = json.loads(found)
    plugin = versions[compiler.plugin]
    if plugin is None:
        raise MissingExtraError(
            f"compiling for {compiler.device} requires {compiler.plugin}, which is not installed in {python}. "
            f"Remedy: pip install 'jaxpar[{compiler.extra}]', or set {compiler.variable} to an interpreter with "
            f"{compiler.install}."
        )
    if versions["jax"] != jax.__version__:
        raise CompileError(
            f"{python} has jax {versions['jax']}, but this process has jax {jax.__version__}. The same version "
            f"must lower and compile a program. Remedy: pip install {compiler.install} in that environment."
        )
    required = _required_versions(compiler, requires("jax") or [])
    if not SpecifierSet(required).contains(plugin, prereleases=True):
        raise CompileError(
            f"{python} has {compiler.plugin} {plugin}, but jax {jax.__version__} requires "
            f"{compiler.plugin}{required}. Remedy: pip install {compiler.install} in that environment."
        )
    return {name: version for name, version in versions.items() if version is not None}


def _required_versions(compiler: Compiler, requirements: list[str]) -> str:
    """Returns the compiler versions that jax's metadata requires, as ``==0.0.50.*``; empty if it requires none."""
    pattern = rf"{re.escape(compiler.plugin)}(?:\[[^]]*\])?\s*([^;\s]*)\s*;\s*extra == ['\"]{compiler.jax_extra}['\"]"
    return next((found[1] for found in map(re.compile(pattern).fullmatch, requirements) if found), "")


def description_of(topology: Topology, versions: dict[str, str]) -> dict[str, Any]:
    """Returns the keyword arguments of ``jax.experimental.topologies.get_topology_desc`` for a topology.

    Args:
      topology: the target.
      versions: as from :func:`versions_of`, for the version of cuDNN.
    """
    if topology.platform == "gpu":
        cudnn = Version(versions.get("nvidia-cudnn-cu13", "9")).release
        named = zip(("major", "minor", "patch"), cudnn, strict=False)
        library = f"dnn_version_info {{ {' '.join(f'{name}: {number}' for name, number in named)} }}\n"
        target = Path(__file__).with_name(f"{topology.kind}.textproto").read_text(encoding="utf-8")
        # The numbers are groups joined by NVLink, hosts in a group, and GPUs of a host. Each H100 host is its own
        # group: in one group, XLA would choose kernels between hosts that only NVLink can run.
        shape = f"{topology.slices}x1x{topology.shape[0]}"
        return {"platform": "cuda", "topology_name": "", "target_config": target + library, "topology": shape}
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.kind == "v4":
        options["chip_config_name"] = "megacore"  # otherwise libtpu reports the two cores of a chip as two devices
    return {"platform": "tpu", "topology_name": topology.slice_name, **options}


def environment_of(compiler: Compiler) -> dict[str, str]:
    """Returns the environment of a compiling process.

    It is that of this process, without the flags that would silently change the program.
    """
    flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_NUM_CPU_DEVICES")
    own = {name: value for name, value in os.environ.items() if name not in flags}
    root = str(Path(__file__).parents[3])  # of the package
    # The caller reads warnings from stderr: XLA's, and those that libtpu would otherwise write to a file.
    log = {"TF_CPP_MIN_LOG_LEVEL": "1", "TPU_STDERR_LOG_LEVEL": "1"}
    return {**own, **log, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root, **dict(compiler.environment)}
