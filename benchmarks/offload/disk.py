"""Step time with the optimizer state on disk, relative to the optimizer state in memory.

    uv run python benchmarks/offload/disk.py

Runs a small residual MLP on simulated devices, which compute on the host's processor. The ratios to the jitted step
therefore show what the disk, the copies and the host's part of the step add to the compute; no time applies to an
accelerator. ``cold`` drops the files from the operating system's page cache before each step, as if the moments
exceeded the host memory; ``warm`` keeps them. The kinds of steps run in turn, so that other load on the machine affects
all of them.

Goal: weights within 1e-5 of those of the step in memory. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jaxpar as jp

RULES = {"batch": "data", "layers": None, "embed": None, "mlp": None}


def drop(folder: Path) -> None:
    """Drop the files from the operating system's page cache."""
    for file in folder.rglob("*.[ab]"):
        f = os.open(file, os.O_RDONLY)
        os.fsync(f)
        os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(f)


def timed(step: Any, state: Any, x: Any) -> tuple[Any, float]:
    import jax

    began = time.perf_counter()
    state, _ = step(state, x)
    jax.block_until_ready(state)
    return state, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers (default: %(default)s)")
    parser.add_argument("--embed", type=int, default=512, help="size of embed (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=512, help="rows of the batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="simulated devices (default: %(default)s)")
    parser.add_argument("--path", type=Path, help="folder on the measured disk (default: the temporary folder)")
    options = parser.parse_args()
    jp.simulate_devices(options.devices)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    layers, embed = options.layers, options.embed

    def make(key: jax.Array) -> dict[str, Any]:
        up, down = jax.random.split(key)
        shape = (layers, embed, 4 * embed)
        return {
            "up": jp.tag(jax.random.normal(up, shape) / embed, "layers", "embed", "mlp"),
            "down": jp.tag(jax.random.normal(down, (layers, 4 * embed, embed)) / embed, "layers", "mlp", "embed"),
        }

    def loss(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)
        return jnp.mean(jax.lax.scan(layer, x, (model["up"], model["down"]))[0] ** 2)

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Zero(stage=3).rules(jp.Rules(**RULES)))
    x = np.random.default_rng(0).normal(size=(options.rows, embed)).astype(np.float32)
    tx = optax.adam(1e-4)
    with tempfile.TemporaryDirectory(dir=options.path) as folder, ExitStack() as stack:
        runs: dict[str, tuple[Any, Any, Path | None]] = {
            "in memory": (jp.train_step(layout, loss), jp.init(layout, make, tx), None)
        }
        for name, ahead in (
            ("warm, read ahead", 2),
            ("warm, one by one", 0),
            ("cold, read ahead", 2),
            ("cold, one by one", 0),
        ):
            at = Path(folder) / name.replace(", ", "-").replace(" ", "-")
            state = jp.init(layout, make, jp.offload.to_disk(tx, path=at))
            runs[name] = (
                stack.enter_context(jp.offload.disk_offloaded_train_step(layout, loss, state, ahead=ahead)),
                state,
                at,
            )
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(options.steps + 1):
            for name, (step, state, path) in runs.items():
                if path is not None and name.startswith("cold"):
                    drop(path)
                state, seconds = timed(step, state, x)
                runs[name] = (step, state, path)
                if number:  # the first step compiles
                    times[name].append(seconds)
        first = statistics.median(times["in memory"])
        print(
            f"{8 * layers * embed * embed:,} parameters, {options.rows} rows, {options.devices} devices, "
            f"{options.steps} steps"
        )
        print("step                median s   ratio   read MiB  written MiB  staged MiB  on disk MiB")
        for name, (step, state, path) in runs.items():
            middle = statistics.median(times[name])
            line = f"{name:18}  {middle:8.3f}  {middle / first:6.2f}"
            if path is not None:
                moved = [n / (options.steps + 1) / 2**20 for n in step.traffic]
                line += (
                    f"  {moved[0]:9.1f}  {moved[1]:11.1f}  {step.peak_staged / 2**20:10.1f}  "
                    f"{2 * step.bytes_on_disk / 2**20:11.1f}"
                )
            print(line, flush=True)
        kept = jax.tree.leaves(runs["in memory"][1].params)
        gaps = [
            max(
                float(jnp.abs(a - b).max() / jnp.abs(a).max())
                for a, b in zip(kept, jax.tree.leaves(s.params), strict=True)
            )
            for _, s, _ in runs.values()
        ]
        print(
            f"{'pass' if max(gaps) < 1e-5 else 'FAIL'}  largest relative difference of a weight from the step in "
            f"memory {max(gaps):.1e} (goal 1e-5)"
        )
    return 0 if max(gaps) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
