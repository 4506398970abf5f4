"""``compile_for`` runs the real compiler for a topology, on a machine without its accelerators.

This process lowers the program for abstract devices and exports it. A second process, with its own environment,
compiles it with libtpu or with XLA's compiler for NVIDIA GPUs. The model's code therefore runs only in this process,
and the compiler's environment does not affect it. Results are cached on disk by program, topology and versions.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import jax
import optax
from jax.sharding import AbstractMesh

from jaxpar.analysis.compile.compilers import COMPILERS, Compiler, description_of, environment_of, versions_of
from jaxpar.analysis.units import axes_of_dims
from jaxpar.errors import CompileError, MeshError
from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.offload.placement import KIND
from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout
from jaxpar.training.asynchronous.step import pipedream_train_step
from jaxpar.training.disk_step import gradient_step
from jaxpar.training.model import MakeModel, Tagged
from jaxpar.training.offload.disk_state import disk_of
from jaxpar.training.state import TrainState, abstract_state
from jaxpar.training.step import train_step
from jaxpar.training.step_call import specs_of
from jaxpar.utils.contexts import batch_specs
from jaxpar.utils.extras import import_extra

CRASHED = "the compiler crashed"
"""The beginning of an error of a compiler that a signal ended."""
_FATAL = re.compile(
    r"^F\d{4} [\d:.]+ +\d+ (?P<prefixed>.*)|(?P<text>Check failed.*|LLVM ERROR.*|(?i:fatal (python )?error).*)"
)
"""A fatal line of a log: XLA's, whose beginning has the time and the thread, or that of a library under it."""
CompilerOptions = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class AheadOfTime:
    """A program compiled for a topology that is not present: it can be read, but not run.

    Attributes:
      topology: the name of the topology.
      text: the optimized HLO.
      memory: bytes on one device: ``argument``, ``output``, ``temp``, ``alias``, ``peak``, ``host``; ``peak`` excludes
        ``host``. Figures that the compiler does not report are missing.
      compile_cpu_seconds: CPU time of the compilation.
      device_kind: jax's name of a device, such as ``TPU v5 lite``.
      versions: of jax, of the compiler, and of the other packages that affect the result.
      cached: whether the result comes from the disk cache.
      warnings: the compiler's warnings of involuntary full rematerialization, verbatim.
      rings: the mesh axes whose devices form closed rings.
    """

    topology: str
    text: str
    memory: dict[str, int]
    compile_cpu_seconds: float
    device_kind: str
    versions: dict[str, str]
    cached: bool
    warnings: tuple[str, ...] = ()
    rings: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Returns the optimized HLO, like ``jax.stages.Compiled.as_text``."""
        return self.text


def compile_for(
    topology: str | Topology,
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    compiler_options: CompilerOptions | None = None,
    **options: Any,
) -> AheadOfTime:
    """Returns the train step of a run, compiled for a topology.

    With the optimizer state on disk, only the program that computes the gradients is compiled.

    Args:
      topology: chips of a slice, as ``"v5e:4x4"``. ``"v5e:4x4*2"`` is two slices, ``"h100:4x8"`` four hosts of 8 GPUs.
      layout: a layout on a mesh with the topology's number of devices, abstract or not. The step is traced under
        ``aim(layout, topology)``, so that the model can find out which accelerator it is compiled for.
      make_model, tx: as for :func:`jaxpar.init`.
      loss_fn: as for :func:`jaxpar.train_step`.
      batch: a pytree of ``jp.tag(jax.ShapeDtypeStruct(...), *dims)``, with global shapes.
      compiler_options: XLA's options, such as ``{"xla_tpu_scoped_vmem_limit_kib": 65536}``, as in
        ``jax.stages.Lowered.compile``. Flags in the environment (``XLA_FLAGS``, ``LIBTPU_INIT_ARGS``) do not reach the
        compiler.
      options: keyword arguments of :func:`jaxpar.train_step`, or of :func:`jaxpar.pipeline.pipedream_train_step` if
        ``pipeline`` is asynchronous.

    Returns:
      The compiled program.

    Raises:
      MeshError: unknown topology, a mesh of another size or for another accelerator, or devices that form no closed
        ring (``layout.rings``).
      LayoutError: the layout does not fit the model or the batch.
      ModelError, AnnotationError, ConfigError: as for :func:`jaxpar.init` and the step.
      MissingExtraError: there is no compiler for the topology's devices.
      CompileError: the compiler does not match this jax, or it rejects the program. The message quotes the compiler,
        for example that the program exceeds the memory of a TPU. The compiler for GPUs does not check memory.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4).on("v5e:2x2"), jp.Rules(batch="data", embed=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 16)), "embed", "embed")}
    >>> loss_fn = lambda model, batch: ((batch["x"] @ model["w"]) ** 2).mean()
    >>> batch = {"x": jp.tag(jax.ShapeDtypeStruct((8, 16), jnp.float32), "batch", "embed")}
    >>> run = ("v5e:2x2", layout, make_model, optax.sgd(0.1), loss_fn, batch)
    >>> compile_for(*run).device_kind  # doctest: +SKIP
    'TPU v5 lite'
    """
    parsed = Topology.parse(str(topology))
    layout = aim(layout, parsed)
    step, state, inputs = step_for(layout, make_model, tx, loss_fn, batch, **options)
    donated = 0 if disk_of(state) is not None else len(jax.tree.leaves(state))
    fusion = options.get("fusion") or CollectiveFusion()
    compiler_options = fusion.compiler_options(layout) | dict(compiler_options or {})
    return compile_program(parsed, layout, step, (state, inputs), donated=donated, compiler_options=compiler_options)


def step_for(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: Any,
    **options: Any,
) -> tuple[Callable[..., Any], TrainState, Any]:
    """Returns the step that :func:`compile_for` compiles, and the placed shapes of its state and batch.

    Arguments are those of :func:`compile_for`.
    """
    state = abstract_state(layout, make_model, tx, options.get("precision"))
    inputs = placed(layout, batch)
    if isinstance(options.get("pipeline"), Asynchronous):
        pipelined = pipedream_train_step(layout, loss_fn, **options)
        return pipelined, pipelined.abstract(state, inputs), inputs
    step = (gradient_step if disk_of(state) is not None else train_step)(layout, loss_fn, **options)

    def call(state: Any, batch: Any) -> Any:
        with batch_specs(specs_of(inputs)):  # the arrays that compile_program passes do not say
            return step(state, batch)

    return call, state, inputs


def aim(layout: Layout, topology: Topology) -> Layout:
    """Returns ``layout`` on an abstract mesh that carries the topology's device.

    Code that is traced under the result finds its target in ``jax.sharding.get_abstract_mesh().abstract_device``, or
    with :func:`jaxpar.sharding.hardware.topology.platform_of`. The result does not compare equal to ``layout``: create
    a step and its inputs with the same layout.

    Raises:
      MeshError: the mesh has another size, or carries another accelerator.

    >>> import jaxpar as jp
    >>> from jaxpar.sharding.hardware.topology import Topology, platform_of
    >>> layout = jp.Layout(jp.MeshSpec(data=16).abstract(), jp.Rules(batch="data"))
    >>> platform_of(aim(layout, Topology.parse("v5e:4x4")).mesh)
    'tpu'
    """
    target = topology.abstract_device
    if layout.mesh.size != topology.devices:
        raise MeshError(
            f"the mesh has {layout.mesh.size} devices ({layout.sizes}), but {topology} has {topology.devices}. Remedy: "
            f"MeshSpec(...).on('{topology}')."
        )
    if not isinstance(layout.mesh, AbstractMesh):
        return replace(layout, mesh=layout.mesh.abstract_mesh.update(abstract_device=target))
    own = layout.mesh.abstract_device
    if own is None:
        return replace(layout, mesh=layout.mesh.update(abstract_device=target))
    if (own.platform, own.device_kind) != (target.platform, target.device_kind):
        raise MeshError(
            f"the mesh is for {own.device_kind!r}, but {topology} has {target.device_kind!r}. Remedy: "
            f"MeshSpec(...).on('{topology}'), or MeshSpec(...).abstract({topology.devices}), which is not bound to "
            "a device kind."
        )
    return layout


def placed(layout: Layout, batch: Any) -> Any:
    """Returns the tagged shapes of the batch with their shardings."""
    return jax.tree.map(lambda leaf: _placed(layout, leaf), batch, is_leaf=lambda x: isinstance(x, Tagged))


def _placed(layout: Layout, leaf: Tagged) -> jax.ShapeDtypeStruct:
    x = leaf.value
    sharding = layout.sharding(leaf.dims, x.shape, dtype=x.dtype, path="batch")
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compile_program(
    topology: Topology,
    layout: Layout,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    donated: int = 0,
    compiler_options: CompilerOptions | None = None,
) -> AheadOfTime:
    """Compile ``function(*inputs)`` for a topology.

    Args:
      topology: the target.
      layout: the layout that ``function`` and ``inputs`` were created with. Use one from :func:`aim` if the code needs
        to know its target.
      function: traced once, in this process.
      inputs: pytrees of ``jax.ShapeDtypeStruct`` with shardings.
      donated: the number of leaves of ``inputs`` to donate, from the first.
      compiler_options: as in :func:`compile_for`.

    Returns:
      The compiled program.

    Raises:
      MissingExtraError: there is no compiler for the topology's devices, or flatbuffers is not installed.
      CompileError: as for :func:`compile_for`.
      MeshError: the devices of the topology cannot form the mesh.
    """
    compiler = COMPILERS[topology.platform]
    leaves, treedef = jax.tree.flatten(tuple(inputs))

    def flat(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(treedef, arrays)))

    import_extra("flatbuffers", compiler.extra, "compiling ahead of time")  # jax.export serializes with it
    versions = versions_of(compiler)
    # jax.export rejects kernels because their form may change between jax versions. Here the same version compiles them
    # immediately.
    checks = [jax.export.DisabledSafetyCheck.custom_call(kernel) for kernel in compiler.kernels]
    with warnings.catch_warnings():
        # The model has already selected its kernel; the deprecation of jax's Triton backend is no news to the user.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        program = jax.export.export(jax.jit(flat), platforms=[compiler.lowering], disabled_checks=checks)(*leaves)
    request = {
        "name": str(topology),
        "topology": description_of(topology, versions),
        "versions": versions,
        "mesh": layout.sizes,
        "specs": [axes_of_dims(leaf.sharding.spec, len(leaf.shape)) for leaf in leaves],
        "donated": list(range(donated)),
        "compiler_options": dict(compiler_options or {}),
        "kept": "text, memory, warnings",  # recompiles cached results that lack one of these
    }
    kinds = [leaf.sharding.memory_kind for leaf in leaves]
    if layout.rings and topology.accelerator.torus:
        Links.of(topology, layout.sizes, layout.rings)  # before the compiler is started
        request["rings"] = list(layout.rings)
    if KIND in kinds:
        request["kinds"] = kinds  # only if present, so that the cache keys of other programs do not change
        if topology.platform == "gpu":
            text = "offload: ahead of time, the compiler for GPUs counts host memory as device memory."
            warnings.warn(text, stacklevel=2)
    return _run(compiler, program, request)


def _run(compiler: Compiler, program: jax.export.Exported, request: dict[str, Any]) -> AheadOfTime:
    # The key includes source locations, because audits report them: a program with moved lines is compiled again.
    request_text = json.dumps([program.mlir_module(), request], sort_keys=True)
    key = hashlib.sha256(request_text.encode()).hexdigest()[:24]
    cache_entry = cache_folder() / key
    # Lock out other processes of this machine: a compilation takes a core and a gigabyte of memory.
    with (cache_entry.parent / "lock").open("w") as lock:
        _wait_for(lock)
        cached = (cache_entry / "result.json").is_file()
        if not cached:
            _compile(compiler, bytes(program.serialize()), request, cache_entry)
    result = json.loads((cache_entry / "result.json").read_text())
    return AheadOfTime(
        topology=request["name"],
        text=(cache_entry / "program.hlo").read_text(),
        memory=_memory(result["memory"]),
        compile_cpu_seconds=result["compile_cpu_seconds"],
        device_kind=result["device_kind"],
        versions=request["versions"],
        cached=cached,
        warnings=tuple(result.get("warnings", ())),
        rings=tuple(request.get("rings", ())),
    )


def _wait_for(lock: TextIO) -> None:
    """Locks the file, and says so on standard error if that has to wait for another process."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another compilation on this machine ({lock.name})", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _memory(given: dict[str, int]) -> dict[str, int]:
    """Returns the figures that the compiler reports, under jaxpar's names."""
    names: dict[str, tuple[str, ...]] = {name: (f"{name}_size",) for name in ("argument", "output", "temp", "alias")}
    names |= {"peak": ("peak_memory",), "host": ("host_argument_size", "host_temp_size")}
    found = {name: sum(given[part] for part in parts) for name, parts in names.items() if given.keys() >= set(parts)}
    if "host" in found:  # a donated array in host memory is updated in place and counts once
        found["host"] += max(0, given.get("host_output_size", 0) - given.get("host_alias_size", 0))
    if "peak" in found:
        found["peak"] -= min(found.get("host", 0), found["peak"])  # the compiler counts both memories as one
    return found


def _compile(compiler: Compiler, program: bytes, request: dict[str, Any], cache_entry: Path) -> None:
    """Compile in a temporary folder, and copy it to ``cache_entry`` only when it is complete."""
    for left in cache_entry.parent.glob("tmp*"):  # by a process that was killed: this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache_entry.parent) as folder:
        build = Path(folder)
        (build / "program.export").write_bytes(program)
        (build / "request.json").write_text(json.dumps(request))
        command = [compiler.python, "-P", "-m", "jaxpar.analysis.compile.worker", folder]
        run = subprocess.run(command, env=environment_of(compiler), capture_output=True, text=True, check=False)
        if not (build / "result.json").is_file():
            raise CompileError(failure_in(run.stderr, run.returncode))
        result = json.loads((build / "result.json").read_text())
        if result.get("kind") == MeshError.__name__:  # the devices cannot form this mesh
            raise MeshError(result["error"])
        if "error" in result:  # not cached: the compiler also fails while another process holds the library
            raise CompileError(f"the compiler rejected the program for {request['name']}: {result['error']}")
        result["warnings"] = warnings_in(run.stderr)
        (build / "result.json").write_text(json.dumps(result))
        (build / "program.export").unlink()
        shutil.copytree(build, cache_entry, dirs_exist_ok=True)


def failure_in(log: str, status: int) -> str:
    """Returns why a compiler ended without a result: the first fatal line of its log, which a dump of memory follows.

    Args:
      log: its standard error.
      status: its exit status; ``-6`` if the signal 6 ended it.

    >>> log = "F1128 16:20:11.1 7 a.cc:12] Check failed: x == y\\nF1128 16:20:11.2 7 b.cc:9] 7fce-7fcf r-xp\\n"
    >>> failure_in(log, -6)
    'the compiler crashed (SIGABRT): a.cc:12] Check failed: x == y'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    match = next(filter(None, map(_FATAL.search, lines)), None)
    if match is not None:
        why = match["prefixed"] or match["text"]
    else:
        why = next((line for line in lines if line.startswith("***")), lines[-1] if lines else "it wrote no message")
    names = {number.value: number.name for number in signal.Signals}
    signalled = f"{CRASHED} ({names.get(-status, -status)})"
    return f"{signalled if status < 0 else f'the compiler failed with status {status}'}: {why:.1000}"


def warnings_in(log: str) -> list[str]:
    """Returns the warnings of involuntary rematerialization in a compiler's log, without duplicates.

    >>> warnings_in(
    ...     "W1121 17:27:36.4 2173 spmd_partitioner.cc:666] "
    ...     "[SPMD] Involuntary full rematerialization. The …\\n\\nmore"
    ... )
    ['[SPMD] Involuntary full rematerialization. The …']
    """
    # Some versions print "[spmd]" and other words after it. Equal warnings differ in the log's time and thread id.
    found = re.findall(r"(?im)^.*?(\[spmd\] involuntary full rematerialization.*)$", log)
    return list(dict.fromkeys(found))


def cache_folder() -> Path:
    """Returns the folder of compiled programs, which only this user can read.

    It is ``$JAXPAR_CACHE/compiled``, or ``~/.cache/jaxpar/compiled`` if the variable is unset.
    """
    folder = Path(os.environ.get("JAXPAR_CACHE", Path.home() / ".cache" / "jaxpar")) / "compiled"
    for one in (folder.parent, folder):  # `parents=True` creates parents with the default mode
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_mode & 0o077 and found.st_uid == os.getuid():
        folder.chmod(0o700)  # created by an older jaxpar, or by hand
    return folder
