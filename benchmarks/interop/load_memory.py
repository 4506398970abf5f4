"""Host memory, and bytes read, of processes that load a Hugging Face checkpoint.

    uv run python benchmarks/interop/load_memory.py

Writes random numbers as a 2 GB Llama in bf16, in files of 500 MB. Loads it on 8 simulated devices: in one process,
which has all of them, and in 4 processes with 2 each (``jax.distributed`` over loopback), fully sharded and sharded
over data × model. Prints the peak rise of the worst process's resident memory (``VmHWM``, reset before) next to the
bytes of its shards, and the bytes that all processes read next to those of the files. Linux only.

Goals: the process's shards, the largest parameter and 200 MB; 1.1 × the bytes of the files. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxpar as jp
from benchmarks.shared.forked import Forked, load
from jaxpar.app.launch.process_group import free_port

DEVICES, PROCESSES = 8, 4
LAYOUTS = ("fsdp", "fsdp_tp")
SIZES: dict[str, Any] = {"vocab": 32_000, "embed": 2048, "layers": 18, "heads": 16, "kv_heads": 8, "head_dim": 128}
SIZES |= {"mlp": 5632, "dtype": "bfloat16", "param_dtype": "bfloat16"}


def write_model(folder: Path) -> None:
    """Write ``config.json`` and random weights, a piece at a time."""
    from jaxpar.interop.families import to_fields
    from jaxpar.interop.safetensors import create_files, lay_out
    from jaxpar.interop.tensor_map import tensor_rules
    from jaxpar.models import LlamaConfig, make_decoder
    from jaxpar.training.model import build_shapes, leaves_with_paths, show

    config = LlamaConfig(**SIZES)
    shapes = {show(path): x.shape for path, x in leaves_with_paths(build_shapes(make_decoder(config)).params)}
    names = {n: ("BF16", r.shape(shapes[r.path])) for r in tensor_rules(config) for _, n in r.names(shapes[r.path])}
    folder.mkdir()
    stored = lay_out(folder, names, 500_000_000)
    create_files(stored.values())
    (folder / "config.json").write_text(json.dumps(to_fields(config)))
    dice = np.random.default_rng(0)
    for tensor in stored.values():
        with tensor.file.open("r+b") as f:
            f.seek(tensor.start)
            f.write(dice.bytes(tensor.size))


def load_share(folder: Path, layout_name: str, rank: int, processes: int, port: int, told: Path) -> None:
    """Load one process's share, and write the bytes that this took to ``told``."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, processes, rank, coordinator_bind_address=address)
    from jaxpar.interop import huggingface

    layout = jp.Layout.from_yaml(Path(__file__).parents[2] / "configs" / "layouts" / f"{layout_name}.yaml")
    jax.block_until_ready(jax.numpy.zeros(8))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    began = time.perf_counter()
    before, reports = _resident("VmRSS"), list[huggingface.LoadReport]()
    params = jax.block_until_ready(huggingface.load(layout, folder, report=reports.append))
    leaves = jax.tree.leaves(params)
    held = lambda x: sum(shard.data.nbytes for shard in x.addressable_shards)
    found = {"share": sum(map(held, leaves)), "largest": max(map(held, leaves)), "read": reports[0].bytes_read}
    found |= {"seconds": time.perf_counter() - began}
    told.write_text(json.dumps({**found, "peak": _resident("VmHWM") - before}))
    if processes > 1:
        jax.distributed.shutdown()


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def measure(root: Path, layout: str, processes: int) -> bool:
    """Load in ``processes`` processes; return whether memory and bytes stay within the limits."""
    port, told = free_port(), [root / f"{layout}{processes}-{rank}" for rank in range(processes)]
    running = [
        Forked(load_share, root / "model", layout, rank, processes, port, file) for rank, file in enumerate(told)
    ]
    if any([process.wait() for process in running]):  # noqa: C419 (all of them)
        sys.exit("a process that loads failed")
    found = [json.loads(file.read_text()) for file in told]
    worst, mb = max(found, key=lambda one: one["peak"]), 1e6
    allowed, read = worst["share"] + worst["largest"] + 200e6, sum(one["read"] for one in found)
    size = sum(file.stat().st_size for file in (root / "model").glob("*.safetensors"))
    print(
        f"{layout}, {processes} process(es): shards {worst['share'] / mb:.0f} MB, largest parameter "
        f"{worst['largest'] / mb:.0f} MB; resident memory rises by {worst['peak'] / mb:.0f} MB at most (allowed "
        f"{allowed / mb:.0f}); all read {read / mb:.0f} MB of {size / mb:.0f} MB ({read / size:.2f} x) in "
        f"{max(one['seconds'] for one in found):.1f} s",
        flush=True,
    )
    return worst["peak"] <= allowed and math.ceil(read) <= 1.1 * size


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if Forked(write_model, root / "model").wait():
            sys.exit("the process that writes failed")
        good = [measure(root, layout, processes) for layout in LAYOUTS for processes in (1, PROCESSES)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
