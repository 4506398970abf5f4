"""Save and restore throughput of jaxpar checkpoints next to plain orbax, on the same state in one run.

    uv run python benchmarks/checkpoint/throughput.py [--mebibytes 256]

Plain orbax is ``StandardCheckpointer`` as its documentation shows it (OCDBT, zstd), which has no checksums. "orbax
with jaxpar's options" has none either, so its difference to ``jp.save`` is the cost of jaxpar's checksums. The kinds
run in turn, so that other load on the machine affects all of them; figures are medians. Restored arrays are compared
bit for bit. The pause is the time for which an asynchronous save blocks the caller. The times do not apply to an
accelerator: a simulated device's memory is host memory.

Goals: 0.9 of orbax's throughput for saves and for restores, and bit-equal arrays. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxpar as jp

DEVICES, ROWS = 8, 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="MiB of the state (default: %(default)s)")
    parser.add_argument("--tensors", type=int, default=16, help="tensors of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints (default: the temporary folder)")
    options = parser.parse_args()
    jp.simulate_devices(DEVICES)
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from jaxpar.checkpoint.array_files import write_arrays
    from jaxpar.checkpoint.save import begin
    from jaxpar.checkpoint.snapshot import leaves_of

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data", mlp=None))
    columns = options.mebibytes * 2**20 // (options.tensors * ROWS * 4)
    dice = np.random.default_rng(0)
    state = {
        f"w{i}": jp.shard_array(layout, dice.normal(size=(ROWS, columns)).astype(np.float32), "embed", "mlp")
        for i in range(options.tensors)
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
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        kinds: dict[str, Callable[[Path], None]] = {
            "plain orbax, save": orbax_save,
            "orbax with jaxpar's options": raw_save,
            "jp.save, read back": lambda at: jp.save(at, state),
            "jp.save(verify=False)": lambda at: jp.save(at, state, verify=False),
        }
        took = _timed(kinds, root, options.rounds, fresh=True)
        orbax_save(root / "a")
        jp.save(root / "b", state)
        found: list[Any] = []
        loads: dict[str, Callable[[Path], None]] = {
            "plain orbax, restore": lambda _: _ready(found, orbax.restore(root / "a", like)),
            "jp.restore": lambda _: _ready(found, jp.restore(root / "b", like)),
        }
        took |= _timed(loads, root, options.rounds, fresh=False)
        equal = all(
            np.array_equal(x, y)
            for got in found[-2:]
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True)
        )
        for i in range(options.rounds):
            copy_save(root / f"c{i}")
            orbax_pause(root / f"d{i}")
            shutil.rmtree(root / f"c{i}")
            shutil.rmtree(root / f"d{i}")
    size = sum(x.nbytes for x in state.values()) / 2**20
    print(f"{size:.0f} MiB in {options.tensors} tensors over {DEVICES} devices; restored bit for bit: {equal}")
    for name, base in (
        ("plain orbax, save", ""),
        ("orbax with jaxpar's options", "plain orbax, save"),
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
