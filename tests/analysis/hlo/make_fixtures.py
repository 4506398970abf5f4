"""Compiles the auditor's fixtures ahead of time, where a compiler for TPU or GPU is installed; it needs no
accelerator.

    python tests/analysis/hlo/make_fixtures.py tpu     # with jax[tpu]: 16 v5e chips
    python tests/analysis/hlo/make_fixtures.py gpu     # with jax[cuda13]: 8 H100s

Names of fixtures after the platform select those to compile. Each fixture writes ``fixtures/NAME.hlo.gz``, the
compiled text without the folders of its source files, and an entry in ``fixtures/index.json``: its mesh, versions,
and the known work and communication of the program.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
ENVIRONMENT = {
    "tpu": {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    "gpu": {"JAX_PLATFORMS": "cpu"},
}
COMPILERS = {"tpu": ("jax", "libtpu"), "gpu": ("jax", "jax-cuda13-pjrt")}
# The properties of an H100 SXM that XLA's compiler for NVIDIA GPUs reads, in the units of its device description.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass
class Fixture:
    """A program to compile. The tests compare its audit with ``facts``."""

    name: str
    lowered: Any
    mesh: dict[str, int]
    facts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


EXPERTS = {"tokens": 256, "buffer": 512, "stated": 192, "embed": 256, "mlp": 384, "experts": 8, "layers": 3}


def llama(name: str, layout: Any, model: str = "Llama", **changes: Any) -> Fixture:
    """A train step of a small Llama, wide enough for the compiler to treat it like a large one."""
    import audit_programs as programs

    from jaxpar.models.llama import LlamaConfig

    sizes = {"layers": 3, "embed": 512, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp": 1536, "vocab": 2048}
    config = LlamaConfig(**{**sizes, "dtype": "bfloat16", **changes})
    batch, seq = 32, 256
    lowered = programs.llama_step(layout, config, batch, seq, getattr(programs, model))
    facts = {"config": asdict(config), "batch": batch, "seq": seq}
    return Fixture(name, lowered, dict(layout.mesh.shape), facts)


def tpu() -> Iterator[Fixture]:
    import audit_programs as programs
    from jax.experimental import topologies

    import jaxpar as jp

    devices = topologies.get_topology_desc("v5e:4x4", platform="tpu").devices
    yield llama("tpu_fsdp", programs.layout_on("fsdp", devices, data=16), remat="full")
    wide = {"embed": 2048, "mlp": 8192}  # otherwise the compiler keeps them in vector memory
    yield llama(
        "tpu_kept", programs.layout_on("fsdp", devices, data=16), remat="full", reshard_after_forward=False, **wide
    )
    yield llama("tpu_fsdp_tp", programs.layout_on("fsdp_tp", devices, data=4, model=4), remat="full")
    yield llama("tpu_tp_sp", programs.layout_on("tp_sp", devices, data=4, model=4), remat="full")
    yield llama("tpu_unrolled", programs.layout_on("tp", devices, data=4, model=4), "UnrolledLlama", layers=2)
    mesh = jp.MeshSpec(data=4, model=4).build(devices)
    sizes = dict(mesh.shape)
    yield Fixture("tpu_every_collective", programs.every_collective(mesh), sizes)
    yield Fixture("tpu_permute", programs.permute_beside_a_matmul(mesh), sizes)
    yield Fixture("tpu_branches", programs.branches(mesh), sizes)
    yield Fixture("tpu_nested", programs.nested_loops(mesh, 3, 5), sizes, {"outer": 3, "inner": 5})
    yield Fixture("tpu_unknown_loop", programs.until_it_converges(mesh), sizes)
    yield Fixture("tpu_kernel", programs.kernel_in_a_loop(mesh, 5, 12_345), sizes, {"flops": 12_345, "length": 5})
    whole = jp.MeshSpec(data=16).build(devices)
    facts = {"tokens": 16 * 1024, "embed": 1024, "mlp": 4096, "layers": 3}
    yield Fixture("tpu_gathered_by_hand", programs.gathered_by_hand(whole, **facts), dict(whole.shape), facts)
    several = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=4).devices
    mesh = jp.MeshSpec(replica=2, data=4, model=2).build(several)
    yield Fixture("tpu_slices_every_collective", programs.every_collective(mesh), dict(mesh.shape))
    several = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    yield llama("tpu_slices_fsdp", programs.layout_on("fsdp", several, data=8), remat="full")
    mesh = jp.MeshSpec(data=4, model=4).build(devices)
    yield Fixture("tpu_silent_kernel", programs.kernel_in_a_loop(mesh, 5, None), sizes)
    yield Fixture("tpu_experts", programs.expert_layers(mesh, **EXPERTS), sizes, EXPERTS)


def gpu() -> Iterator[Fixture]:
    import audit_programs as programs
    from jax.experimental import topologies

    import jaxpar as jp

    devices = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices
    yield llama("gpu_fsdp", programs.layout_on("fsdp", devices, data=8), remat="full")
    yield llama("gpu_tp_sp", programs.layout_on("tp_sp", devices, data=4, model=2), layers=2)
    mesh = jp.MeshSpec(data=4, model=2).build(devices)
    sizes = dict(mesh.shape)
    facts = {"size": 512, "layers": 3}
    options = {"xla_gpu_enable_triton_gemm": False}
    yield Fixture("gpu_library_matmuls", programs.two_matmuls(mesh, 512, 3), sizes, facts, options)
    yield Fixture("gpu_every_collective", programs.every_collective(mesh), sizes)
    yield Fixture("gpu_branches", programs.branches(mesh), sizes)
    yield Fixture("gpu_experts", programs.expert_layers(mesh, **EXPERTS), sizes, EXPERTS)


def scrub(text: str) -> str:
    """The text without the folders of this machine: each source path starts at site-packages or in the project."""
    root = str(HERE.parents[2])

    def short(match: re.Match[str]) -> str:
        path = match[2].removeprefix(root).lstrip("/")
        return match[1] + path[path.rfind("site-packages/") if "site-packages/" in path else 0 :]

    text = re.sub(r'(?m)^(\d+ ")(/[^"]*)', short, text)
    return re.sub(r'(source_file=")(/[^"]*)', short, text)


def main(target: str, *names: str) -> None:
    index = FIXTURES / "index.json"
    known = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
    versions = {package: version(package) for package in COMPILERS[target]}
    FIXTURES.mkdir(exist_ok=True)
    for fixture in {"tpu": tpu, "gpu": gpu}[target]():
        if names and fixture.name not in names:
            continue
        text = scrub(fixture.lowered.compile(fixture.options).as_text())
        data = gzip.compress(text.encode(), 9, mtime=0)
        (FIXTURES / f"{fixture.name}.hlo.gz").write_bytes(data)
        known[fixture.name] = {"mesh": fixture.mesh, "compiled_with": versions, **fixture.facts}
        index.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
        print(f"{fixture.name}: {len(data) / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT[sys.argv[1]]
    sys.path.insert(0, str(HERE))
    main(*sys.argv[1:])
