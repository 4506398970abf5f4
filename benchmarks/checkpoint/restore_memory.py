"""Host memory of a process that restores its share of a checkpoint.

    uv run python benchmarks/checkpoint/restore_memory.py

Saves the tensors of a 135M-parameter Llama with Adam's moments (fp32) from one process, sharded over 8 devices and then
on one. Restores them in 8 processes (``jax.distributed`` over loopback) with one device each. Prints the peak rise of
the worst process's resident memory (``VmHWM``, reset before the restore) next to its share of the bytes. Linux only.

Goal: at most 1.5 shares + 200 MB. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jaxpar as jp
from benchmarks.shared.forked import Forked, load
from jaxpar.app.launch.process_group import free_port

DEVICES = 8
LAYERS, EMBED, HEADS, MLP, VOCAB = 30, 576, 9, 1536, 49152
WEIGHTS = {
    "embed": (VOCAB, EMBED),
    "q": (LAYERS, EMBED, HEADS * 64),
    "k": (LAYERS, EMBED, HEADS // 3 * 64),
    "v": (LAYERS, EMBED, HEADS // 3 * 64),
    "out": (LAYERS, HEADS * 64, EMBED),
    "gate": (LAYERS, EMBED, MLP),
    "up": (LAYERS, EMBED, MLP),
    "down": (LAYERS, MLP, EMBED),
    "norms": (LAYERS, 2, EMBED),
}
"""Shapes of the 135M model with stacked layers. The embedding table is also the output head."""


def shapes(devices: int) -> dict[str, Any]:
    """Return the shapes of weights and both moments. All but the norms are sharded in their second last dim."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jp.MeshSpec(data=-1).build(jax.devices()[:devices])

    def one(name: str, shape: tuple[int, ...]) -> Any:
        spec = PartitionSpec(*(None,) * (len(shape) - 2), None if name == "norms" else "data")
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))

    return {kind: {n: one(n, shape) for n, shape in WEIGHTS.items()} for kind in ("params", "mu", "nu")}


def save_model(folder: Path, devices: int) -> None:
    """Save random values of the model, sharded over ``devices`` devices."""
    jp.simulate_devices(devices)
    import jax
    import numpy as np

    dice = np.random.default_rng(0)
    put = lambda x: jax.device_put(dice.random(x.shape, np.float32), x.sharding)
    jp.save(folder, jax.tree.map(put, shapes(devices)))


def restore_share(folder: Path, rank: int, port: int, told: Path) -> None:
    """Restore one process's share, and write the bytes that this took to ``told``."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, DEVICES, rank, coordinator_bind_address=address)
    like = shapes(DEVICES)
    share = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(like))
    jax.block_until_ready(jax.numpy.zeros(8))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _resident("VmRSS")
    found = jax.block_until_ready(jp.restore(folder, like))
    held = sum(s.data.nbytes for x in jax.tree.leaves(found) for s in x.addressable_shards)
    assert held == share, (held, share)
    rise = {"share": share, "peak": _resident("VmHWM") - before, "after": _resident("VmRSS") - before}
    told.write_text(json.dumps(rise))
    jax.distributed.shutdown()


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def memory() -> int:
    """Measure the memory of a restore for each saved layout; return 1 if the worst process exceeds the limit."""
    load()
    good = True
    for devices in (DEVICES, 1):
        with tempfile.TemporaryDirectory() as root:
            good &= _shares(Path(root), devices)
    return 0 if good else 1


def _shares(root: Path, devices: int) -> bool:
    """Save over ``devices`` devices and restore in 8 processes; return whether memory stays within the limit."""
    port = free_port()
    told = [root / str(rank) for rank in range(DEVICES)]
    if Forked(save_model, root / "model", devices).wait():
        sys.exit("the process that saves failed")
    running = [Forked(restore_share, root / "model", rank, port, file) for rank, file in enumerate(told)]
    if any([process.wait() for process in running]):  # noqa: C419 (all of them)
        sys.exit("a process that restores failed")
    worst, mb = max((json.loads(file.read_text()) for file in told), key=lambda rise: rise["peak"]), 1e6
    allowed = 1.5 * worst["share"] + 200e6
    print(
        f"saved over {devices} devices, restored on one of {DEVICES}: share {worst['share'] / mb:.0f} MB; resident "
        f"memory rises by {worst['peak'] / mb:.0f} MB at most (allowed {allowed / mb:.0f}), by "
        f"{worst['after'] / mb:.0f} MB when all is there",
        flush=True,
    )
    return bool(worst["peak"] <= allowed)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    return memory()


if __name__ == "__main__":
    sys.exit(main())
