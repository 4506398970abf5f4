"""Save and restore throughput of jaxpar checkpoints next to plain orbax, on the same state in one run.

    uv run python benchmarks/checkpoint.py [--mebibytes 256]

Plain orbax is ``StandardCheckpointer`` as its documentation shows it (OCDBT, zstd), which has no checksums. "orbax as
jaxpar asks it" is orbax with jaxpar's options but without jaxpar's checksums, so the difference to ``jp.save`` is their
cost. The kinds run in turn, so that other load on the machine affects all of them; figures are medians. Restored arrays
are compared bit for bit. The pause is the time for which an asynchronous save blocks the caller. The times do not apply
to an accelerator: a simulated device's memory is host memory.

Goals: 0.9 of orbax's throughput for saves and for restores, and bit-equal arrays. Exit status 1 otherwise.

``--memory`` saves the tensors of a 135M-parameter Llama with Adam's moments (fp32) from one process, and restores them
in 8 processes (``jax.distributed`` over loopback) with one device each. It prints the peak rise of each process's
resident memory (``VmHWM``, reset before the restore) next to its share of the bytes. Goal: at most 1.5 shares + 200 MB.
Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import Forked, load

import jaxpar as jp

DEVICES, ROWS = 8, 1024
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = [root / str(rank) for rank in range(DEVICES)]
    if Forked(save_model, root / "model", devices).wait():
        sys.exit("the process that saves FAILED")
    running = [Forked(restore_share, root / "model", rank, port, file) for rank, file in enumerate(told)]
    if any([process.wait() for process in running]):  # noqa: C419 (all of them)
        sys.exit("a process that restores FAILED")
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256, help="of the state")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: the system's temporary folder)"
    )
    parser.add_argument("--memory", action="store_true", help="of a process that restores its share, instead")
    asked = parser.parse_args()
    if asked.memory:
        return memory()
    jp.simulate_devices(DEVICES)
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from jaxpar.checkpoint.array_files import write_arrays
    from jaxpar.checkpoint.save import begin
    from jaxpar.checkpoint.snapshot import leaves_of

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data", mlp=None))
    columns = asked.mebibytes * 2**20 // (asked.tensors * ROWS * 4)
    dice = np.random.default_rng(0)
    state = {
        f"w{i}": jp.shard_array(layout, dice.normal(size=(ROWS, columns)).astype(np.float32), "embed", "mlp")
        for i in range(asked.tensors)
    }
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    orbax = ocp.StandardCheckpointer()

    def orbax_save(at: Path) -> None:
        orbax.save(at, state)
        orbax.wait_until_finished()

    def raw_save(at: Path) -> None:
        at.mkdir()
        write_arrays(at, leaves_of(state))()

    pauses: list[float] = []

    def copy_save(at: Path) -> None:
        began = time.perf_counter()
        saving = begin(at, state)
        pauses.append(time.perf_counter() - began)
        saving.wait()

    def orbax_pause(at: Path) -> None:
        began = time.perf_counter()
        orbax.save(at, state)
        others.append(time.perf_counter() - began)
        orbax.wait_until_finished()

    others: list[float] = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        root = Path(folder)
        kinds: dict[str, Callable[[Path], None]] = {
            "plain orbax, save": orbax_save,
            "orbax as jaxpar asks it": raw_save,
            "jp.save, read back": lambda at: jp.save(at, state),
            "jp.save(verify=False)": lambda at: jp.save(at, state, verify=False),
        }
        took = _timed(kinds, root, asked.rounds, fresh=True)
        orbax_save(root / "a")
        jp.save(root / "b", state)
        found: list[Any] = []
        loads: dict[str, Callable[[Path], None]] = {
            "plain orbax, restore": lambda _: _ready(found, orbax.restore(root / "a", like)),
            "jp.restore": lambda _: _ready(found, jp.restore(root / "b", like)),
        }
        took |= _timed(loads, root, asked.rounds, fresh=False)
        equal = all(
            np.array_equal(x, y)
            for got in found[-2:]
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)
        )
        for i in range(asked.rounds):
            copy_save(root / f"c{i}")
            orbax_pause(root / f"d{i}")
            shutil.rmtree(root / f"c{i}")
            shutil.rmtree(root / f"d{i}")
    size = sum(x.nbytes for x in state.values()) / 2**20
    print(f"{size:.0f} MiB in {asked.tensors} tensors over {DEVICES} devices; restored bit for bit: {equal}")
    for name, base in (
        ("plain orbax, save", ""),
        ("orbax as jaxpar asks it", "plain orbax, save"),
        ("jp.save, read back", "plain orbax, save"),
        ("jp.save(verify=False)", "plain orbax, save"),
        ("plain orbax, restore", ""),
        ("jp.restore", "plain orbax, restore"),
    ):
        ratio = f"  {took[base] / took[name]:.2f} of the throughput of {base.split(',')[0]}" if base else ""
        print(f"{name:26} {took[name]:6.2f} s {size / took[name]:7.0f} MiB/s{ratio}")
    for name, times in (("jaxpar", pauses), ("plain orbax", others)):
        print(
            f"pause of an asynchronous save, {name:12} {statistics.median(times) * 1e3:5.0f} ms "
            f"(longest {max(times) * 1e3:.0f})"
        )
    saves = took["plain orbax, save"] / took["jp.save, read back"]
    loads_ratio = took["plain orbax, restore"] / took["jp.restore"]
    return 0 if equal and saves >= 0.9 and loads_ratio >= 0.9 else 1


def _ready(found: list[Any], state: Any) -> None:
    import jax

    found[:] = [*found[-1:], jax.block_until_ready(state)]


def _timed(kinds: dict[str, Callable[[Path], None]], root: Path, rounds: int, *, fresh: bool) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, run in kinds.items():
            began = time.perf_counter()
            run(root / "x")
            if turn:  # the first round loads libraries
                times[name].append(time.perf_counter() - began)
            if fresh:
                shutil.rmtree(root / "x")
    return {name: statistics.median(some) for name, some in times.items()}


if __name__ == "__main__":
    sys.exit(main())
