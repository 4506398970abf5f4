"""Attention over a sharded sequence on 8 simulated devices: CPU time, temporary memory and errors.

    uv run python benchmarks/attention/cpu_time.py

Runs causal attention, forward and backward, with batch 1, 8 heads of 64 and fp32. Prints CPU seconds (medians over
several rounds; each round runs every implementation and the peer in turn), temporary memory and errors against fp64.
The peer is ``ringattention`` 0.1.2; it runs where ``JAXPAR_PEER_PYTHON`` is the Python of an environment that has it
(``uv pip install ringattention jax``).

Goals: the CPU time relative to the peer that ``GOALS`` states, no more temporary memory than the peer, and errors of at
most ``ERROR``. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxpar as jp

jp.simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.attention.options import Impl
from jaxpar.parallel.attention.split.token_order import Order, permutation

PEER = Path(__file__).with_name("ringattention_process.py")
RULES = jp.Rules(
    batch="data", seq=("context", "ulysses"), heads="model", kv_heads=jp.first_of("model", None), head_dim=None
)
MESHES: dict[Impl, dict[str, int]] = {
    "ring": {"context": 8},
    "ulysses": {"ulysses": 8},
    "gather": {"context": 8},
    "hybrid": {"context": 4, "ulysses": 2},
    "ring_self_attention": {"context": 8},
}
GOALS = {("ring", 4096): 0.70, ("ring", 8192): 0.65, ("ulysses", 4096): 0.55}
"""(Implementation, tokens) → largest CPU time relative to the peer."""
BLOCK = 256
"""Block size of the peer: the one with which it is fastest and takes the least memory."""
ERROR = 2e-6
"""Largest error against fp64, relative to the largest entry of each array."""


def exact(x: list[np.ndarray]) -> np.ndarray:
    """Return the output and the gradients in fp64."""
    with jax.enable_x64(True):

        def both(q: Any, k: Any, v: Any, g: Any) -> Any:
            o, back = jax.vjp(lambda *a: jp.attention(*a, impl="flash", block=512), q, k, v)
            return jnp.stack([o, *back(g)])

        with jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES):
            return np.asarray(jax.jit(both)(*(a.astype(np.float64) for a in x)))


class Ours:
    """One implementation of jaxpar, compiled and run once."""

    def __init__(self, impl: Impl, x: list[np.ndarray], want: np.ndarray) -> None:
        layout = jp.Layout(jp.MeshSpec(**MESHES[impl]).build(), RULES)
        ring = layout.sizes["context"]
        order: Order = "zigzag" if ring > 1 else "contiguous"
        at = permutation(order, x[0].shape[1], ring)
        place = layout.sharding(("batch", "seq", "heads", "head_dim"), x[0].shape)

        def both(q: Any, k: Any, v: Any, g: Any) -> Any:
            o, back = jax.vjp(lambda *a: jp.attention(*a, impl=impl, order=order), q, k, v)
            return (o, *back(g))

        self.given = [jax.device_put(a[:, at], place) for a in x]
        with layout:
            self.compiled = jax.jit(both).lower(*self.given).compile()
        found = jax.block_until_ready(self.compiled(*self.given))
        memory = self.compiled.memory_analysis()
        assert memory is not None
        self.temp = memory.temp_size_in_bytes
        self.errors = [
            float(np.abs(np.asarray(a) - b[:, at]).max() / np.abs(b).max()) for a, b in zip(found, want, strict=True)
        ]

    def seconds(self) -> float:
        """Run once more; return the CPU seconds."""
        start = time.process_time()
        jax.block_until_ready(self.compiled(*self.given))
        return time.process_time() - start


class Peer:
    """``ringattention`` in a separate process, which runs once for each line that it receives."""

    def __init__(self, python: str, x: list[np.ndarray], want: np.ndarray) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "given.npz"
            q, k, v, g = x
            np.savez(file, q=q, k=k, v=v, g=g, want=want)
            command = [python, str(PEER), str(file), str(BLOCK)]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            first = self._read()
        self.temp, self.errors = first["temp"], first["errors"]

    def seconds(self) -> float:
        """Run once more; return the CPU seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return float(self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"ringattention ended with exit status {self.process.wait()}; its error is printed above")

    def end(self) -> None:
        self.process.communicate()


def side_by_side(lengths: list[int], impls: Sequence[Impl], rounds: int) -> int:
    """Run each implementation and the peer, and print the table; return 1 if a goal is missed."""
    python, missed = os.environ.get("JAXPAR_PEER_PYTHON"), 0
    print("tokens  implementation       CPU s  ÷ peer   goal  temp MiB  ÷ peer  error of o, dq, dk, dv against fp64")
    for seq in lengths:
        rng = np.random.default_rng(0)
        x = [rng.standard_normal((1, seq, 8, 64)).astype(np.float32) for _ in range(4)]
        want = exact(x)
        other = Peer(python, x, want) if python else None
        runs: dict[str, Ours | Peer] = {"ringattention 0.1.2": other} if other else {}
        runs |= {impl: Ours(impl, x, want) for impl in impls if seq <= 4096 or impl != "ring_self_attention"}
        took = [{name: run.seconds() for name, run in runs.items()} for _ in range(rounds)]
        for name, run in runs.items():
            goal = GOALS.get((name, seq))
            seconds = statistics.median(each[name] for each in took)
            # The median of ratios within a round: other load on the machine slows both runs of a round.
            ratio = statistics.median(each[name] / each["ringattention 0.1.2"] for each in took) if other else math.nan
            more = run.temp / other.temp if other else math.nan
            bad = name in MESHES and max(run.errors) > ERROR
            missed += bool(goal and (ratio > goal or more > 1)) + bad
            errors = ", ".join(f"{e:.1e}" for e in run.errors)
            print(
                f"{seq:6}  {name:19}  {seconds:6.2f}  {ratio:6.2f}  {goal or '':>5}  {run.temp / 2**20:8.1f}  "
                f"{more:6.2f}  {errors}",
                flush=True,
            )
        if other:
            other.end()
    print(f"{missed} goals missed")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lengths", default="4096,8192", help="numbers of tokens, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument(
        "--impls", default=",".join(MESHES), help="implementations, separated by commas (default: %(default)s)"
    )
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",")]
    if unknown := sorted(set(options.impls.split(",")) - MESHES.keys()):
        parser.error(f"no implementation {', '.join(unknown)}; implementations are {', '.join(MESHES)}")
    return side_by_side(lengths, options.impls.split(","), options.repeats)


if __name__ == "__main__":
    sys.exit(main())
