"""Ahead-of-time compilation for TPUs and GPUs that are not attached, with the real compilers in separate
environments."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from error_texts import raises
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar as jp
from jaxpar.analysis.compile import ahead_of_time
from jaxpar.analysis.compile.ahead_of_time import aim, compile_for
from jaxpar.analysis.compile.compilers import COMPILERS
from jaxpar.analysis.compile.warnings import rematerialised
from jaxpar.analysis.hlo.audit import audit
from jaxpar.analysis.hlo.parser import parse
from jaxpar.app.cli import main
from jaxpar.errors import CompileError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.sharding.hardware.topology import Topology, platform_of

PYTHON, GPU_PYTHON = (COMPILERS[platform].variable for platform in ("tpu", "gpu"))
ROOT = Path(__file__).parents[3]
FSDP = ROOT / "configs" / "layouts" / "fsdp.yaml"
GOLDEN = ROOT / "tests" / "golden" / "program_quickstart_v5e.json"
MODEL = LlamaConfig(vocab=512, embed=256, layers=2, heads=2, kv_heads=2, head_dim=128, mlp=512)
SHAPE = (8, 128)


def batch(rows: int = SHAPE[0]) -> dict[str, object]:
    return {k: jp.tag(jax.ShapeDtypeStruct((rows, SHAPE[1]), "int32"), "batch", "seq") for k in ("tokens", "targets")}


def compiled(topology: str, layout: jp.Layout, model: LlamaConfig = MODEL, **options: object) -> object:
    return compile_for(topology, layout, make_llama(model), optax.adamw(1e-3), next_token_loss, batch(), **options)


def pretend(request: dict[str, object], kept: Path) -> dict[str, object]:
    """Write the files that a compile leaves behind, and return the request."""
    names = ("argument", "output", "temp", "alias", "host_argument", "host_temp")
    memory = {f"{name}_size": 0 for name in names} | {"peak_memory": 0}
    facts = {"memory": memory, "compile_cpu_seconds": 0.0, "device_kind": "", "versions": {}}
    kept.mkdir()
    (kept / "program.hlo").write_text("HloModule pretended")
    (kept / "result.json").write_text(json.dumps(facts))
    return request


def test_who_waits_for_another_compilation_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        ahead_of_time._wait_for(first)
        assert capsys.readouterr().err == ""
        release = threading.Timer(0.2, fcntl.flock, (first, fcntl.LOCK_UN))
        release.start()
        ahead_of_time._wait_for(second)
        release.join()
    assert capsys.readouterr().err == f"waiting for another compilation on this machine ({path})\n"


def test_what_killed_compilations_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "false")
    (tmp_path / "tmpkilled").mkdir()
    with raises(CompileError, "status 1"):
        ahead_of_time._compile(COMPILERS["tpu"], b"", {}, tmp_path / "key")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled programs."""
    monkeypatch.setenv("JAXPAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tpu_python(folder: Path) -> str:
    """Install ``jax[tpu]`` in a new environment and return its interpreter. The suite itself runs without it, because
    with it a plain import of jax looks for a TPU."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv is not None, "the suite runs under uv"
    python = str(folder / "bin" / "python")
    # The libtpu of the golden file: even a patch release may compile differently.
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))["versions"]["libtpu"]
    requirements = (f"jax[tpu]=={jax.__version__}", f"libtpu=={kept}", "flatbuffers")
    for command in (
        ("venv", "--python", sys.executable, str(folder)),
        ("pip", "install", "--python", python, *requirements),
    ):
        subprocess.run([uv, "-q", *command], check=True)
    return python


@pytest.mark.slow
def test_a_step_is_compiled_for_a_tpu_that_is_not_here(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    monkeypatch.setenv(PYTHON, tpu_python(tmp_path / "tpu"))
    # The compiler's process imports nothing from the current folder.
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    layout = jp.Layout.from_yaml(FSDP, devices=8)
    first, again = (compiled("v5e:2x4", layout) for _ in range(2))
    assert not first.cached and again.cached and again.text == first.text  # type: ignore[attr-defined]
    report = audit(first, mesh=layout.mesh)
    total = jp.explain(layout, make_llama(MODEL), optax.adamw(1e-3), batch=batch()).total(
        "params", "opt_state", "variables", "batch", "other"
    )
    # Arrays are tiled on a TPU, so small ones take slightly more memory than their elements.
    assert first.memory["argument"] == pytest.approx(total.device_bytes, rel=0.02)  # type: ignore[attr-defined]
    assert report.certain and report.wire_bytes(axis="data") == report.wire_bytes() > 0
    _too_large(layout)
    _warned()
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.unlink()
    _from_the_command_line(tmp_path, capsys)


def _too_large(layout: jp.Layout) -> None:
    huge = LlamaConfig(vocab=512, embed=16_384, layers=48, heads=128, kv_heads=128, head_dim=128, mlp=65_536)
    with pytest.raises(jp.errors.CompileError, match=r"v5e:2x4: (?s:.*)(hbm|memory)"):
        compiled("v5e:2x4", layout, huge)


def _warned() -> None:
    """The compiler's warning is stored with the compiled program, and returned with it from the cache."""
    layout = aim(jp.Layout(jp.MeshSpec(replica=2, data=2, model=2).abstract(), jp.Rules()), Topology.parse("v5e:2x4"))

    def at(*spec: object) -> NamedSharding:
        return NamedSharding(layout.mesh, PartitionSpec(*spec))

    def moved(x: jax.Array) -> jax.Array:
        y = jax.lax.with_sharding_constraint(jnp.sin(x), at("replica"))
        return jax.lax.with_sharding_constraint(jnp.cos(y), at(None, ("data", "replica")))

    x = jax.ShapeDtypeStruct((512, 512), "float32", sharding=at("replica", None))
    for _ in range(2):
        program = ahead_of_time.compile_program(Topology.parse("v5e:2x4"), layout, moved, (x,))
        (warning,) = program.warnings
        found = rematerialised(warning, parse(program.text))
        assert found is not None and (found.tensor, found.bytes) == ("f32[512,512]", 2**20)
        assert (found.before, found.after) == ("replica, ·", "·, data+replica")
        assert found.source.startswith("_warned.<locals>.moved (test_ahead_of_time.py:")


def _from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: folder / f"check.{name}" for name in ("json", "html", "hlo")}
    options = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    options += ["--golden", str(GOLDEN)]
    assert main(["check", str(ROOT / "configs" / "quickstart.yaml"), "--topology", "v5e:2x4", *options]) == 0
    screen = capsys.readouterr().out
    assert "no problem" in screen and "compiled for v5e:2x4 (TPU v5 lite)" in screen and "all-gather" in screen
    assert f"golden file {GOLDEN}: " in screen and "fits v5e:2x4" in screen
    facts = json.loads(files["json"].read_text())
    assert facts["matmul_flops"] > 0 and facts["memory"]["argument"] > 0 and facts["wire_bytes"]["total"] > 0
    assert files["hlo"].read_text().startswith("HloModule") and files["html"].read_text().count("<table>") > 5


@pytest.mark.skipif(GPU_PYTHON not in os.environ, reason=f"{GPU_PYTHON} names no interpreter: jax[cuda13] is gigabytes")
def test_a_step_is_compiled_for_gpus_that_are_not_here(cache: Path) -> None:
    base = jp.Layout.from_yaml(FSDP, devices=8)
    layout = jp.Layout(jp.MeshSpec(data=-1).on("h100:8"), base.rules)
    first, again = (compiled("h100:8", layout) for _ in range(2))
    assert not first.cached and again.cached and again.text == first.text  # type: ignore[attr-defined]
    assert first.device_kind == "NVIDIA H100 80GB HBM3"  # type: ignore[attr-defined]
    report = audit(first, mesh=layout.mesh)
    total = jp.explain(layout, make_llama(MODEL), optax.adamw(1e-3), batch=batch()).total(
        "params", "opt_state", "variables", "batch", "other"
    )
    assert first.memory["argument"] == pytest.approx(total.device_bytes, rel=0.02)  # type: ignore[attr-defined]
    assert report.certain and report.wire_bytes(axis="data") == report.wire_bytes() > 0
    torn = jp.Layout(jp.MeshSpec(data=4, model=6).on("h100:3x8"), base.rules)
    narrow = LlamaConfig(vocab=528, embed=192, layers=1, heads=2, kv_heads=2, head_dim=96, mlp=384)
    with pytest.raises(jp.errors.MeshError, match="8 devices: model=6"):
        compiled("h100:3x8", torn, narrow)


def test_a_mesh_of_another_size_is_refused() -> None:
    with raises(jp.errors.MeshError, "pipeline", "v5e:4x4"):
        compiled("v5e:4x4", jp.Layout.from_yaml(FSDP, devices=8))


NO_LIBTPU = f"""#!{sys.executable}
import sys
from importlib import metadata

installed = metadata.version

def version(name):
    if name == "libtpu":
        raise metadata.PackageNotFoundError(name)
    return installed(name)

metadata.version = version
exec(sys.argv[sys.argv.index("-c") + 1])
"""
"""An interpreter without libtpu, whatever this one has."""


def test_without_libtpu_the_extra_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(NO_LIBTPU)
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    with raises(jp.errors.MissingExtraError, "TPU"):
        compiled("v5e:2x4", jp.Layout.from_yaml(FSDP, devices=8))


def test_an_interpreter_that_does_not_run_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    with raises(jp.errors.CompileError, "/no/such/python"):
        compiled("v5e:2x4", jp.Layout.from_yaml(FSDP, devices=8))


@pytest.mark.slow
def test_the_compilers_options_are_part_of_what_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda *_: {"jax": jax.__version__})
    monkeypatch.setattr(
        ahead_of_time, "_compile", lambda compiler, program, request, kept: asked.append(pretend(request, kept))
    )
    layout = jp.Layout.from_yaml(FSDP, devices=8)
    for options in (None, {}, {"xla_tpu_scoped_vmem_limit_kib": 65536}, {"xla_tpu_scoped_vmem_limit_kib": "65536"}):
        compiled("v5e:2x4", layout, compiler_options=options)
    assert [request["compiler_options"] for request in asked] == [
        {},
        {"xla_tpu_scoped_vmem_limit_kib": 65536},
        {"xla_tpu_scoped_vmem_limit_kib": "65536"},
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_sizes_of_collectives_and_the_hosts_memory_reach_the_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda *_: {"jax": jax.__version__})
    monkeypatch.setattr(
        ahead_of_time, "_compile", lambda compiler, program, request, kept: asked.append(pretend(request, kept))
    )
    layout, own = jp.Layout.from_yaml(FSDP, devices=8), {"xla_tpu_scoped_vmem_limit_kib": 65536}
    compiled("v5e:2x4", layout, fusion=jp.overlap.CollectiveFusion(reduce=0), compiler_options=own)
    assert asked[0]["compiler_options"] == own | {
        "xla_jf_crs_combiner_threshold_in_bytes": 0,
        "xla_jf_crs_combiner_threshold_count": 2**30,
    }
    assert "kinds" not in asked[0]
    tx = jp.offload.to_host(optax.adamw(1e-3))
    compile_for("v5e:2x4", layout, make_llama(MODEL), tx, next_token_loss, batch())
    state = jp.abstract_state(aim(layout, Topology.parse("v5e:2x4")), make_llama(MODEL), tx)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
    found = asked[1]["kinds"]
    assert isinstance(found, list) and found[: len(kinds)] == kinds and kinds.count("pinned_host") == 2 * 9
    with pytest.warns(UserWarning, match="compiler for GPUs"):
        compile_for("h100:8", layout, make_llama(MODEL), tx, next_token_loss, batch())


def test_the_peak_is_the_devices_alone() -> None:
    given = {
        "peak_memory": 100,
        "host_argument_size": 30,
        "host_temp_size": 5,
        "host_output_size": 40,
        "host_alias_size": 30,
    }
    assert ahead_of_time._memory(given) == {"peak": 55, "host": 45}
    assert ahead_of_time._memory({"peak_memory": 100, "host_argument_size": 0, "host_temp_size": 0}) == {
        "peak": 100,
        "host": 0,
    }
    assert ahead_of_time._memory({"peak_memory": 100}) == {"peak": 100}


def test_a_model_sees_what_it_is_compiled_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def loss_fn(model: object, batch: object) -> jax.Array:
        device = jax.sharding.get_abstract_mesh().abstract_device
        seen.append(f"{platform_of(jp.current_layout().mesh)}: {device.device_kind}, {device.num_cores} cores")
        return next_token_loss(model, batch)

    monkeypatch.setattr(ahead_of_time, "versions_of", lambda *_: {"jax": jax.__version__})
    monkeypatch.setattr(ahead_of_time, "_compile", lambda compiler, program, request, kept: pretend(request, kept))
    for layout in (jp.Layout.from_yaml(FSDP, devices=8), jp.Layout.from_yaml(FSDP, devices=jax.devices()[:8])):
        compile_for("v5p:2x2x2", layout, make_llama(MODEL), optax.adamw(1e-3), loss_fn, batch())
    assert set(seen) == {"tpu: TPU v5, 2 cores"}


def test_a_mesh_for_another_accelerator_is_refused() -> None:
    layout = aim(jp.Layout.from_yaml(FSDP, devices=8), Topology.parse("v5p:2x2x2"))
    with raises(jp.errors.MeshError, "TPU v5"):
        compiled("v5e:2x4", layout)


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref: object, y_ref: object) -> None:
        y_ref[...] = 2 * x_ref[...]  # type: ignore[index]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_kernels_reach_the_compiler(topology: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda *_: {"jax": jax.__version__})
    monkeypatch.setattr(
        ahead_of_time, "_compile", lambda _, program, request, kept: sent.append(program) or pretend(request, kept)
    )
    layout = aim(jp.Layout.from_yaml(FSDP, devices=8), Topology.parse(topology))
    x = jax.ShapeDtypeStruct((64, 128), "float32", sharding=layout.sharding(("batch", None)))
    spec = x.sharding.spec
    function = jax.shard_map(double, mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    ahead_of_time.compile_program(Topology.parse(topology), layout, function, (x,))
    kernels = {"v5e:2x4": b"tpu_custom_call", "h100:8": b"triton"}
    assert kernels[topology] in sent[0]
