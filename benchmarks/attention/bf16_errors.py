"""Whether attention in bfloat16 loses precision where the sequence is sharded.

    uv run python benchmarks/attention/bf16_errors.py

Prints relative RMS errors of the output and of the gradients of queries, keys and values against fp64, as ratios to the
errors of ``flash`` in bfloat16 on one device. Runs causal attention with batch 1, 32 query and 8 key heads on 8 and
then 32 simulated devices, each number in a separate process.

Goal: no ratio above 1.05. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import jaxpar as jp
from jaxpar.parallel.attention.options import Impl

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 32
GOAL = 1.05
"""Largest ratio of an error to that of ``flash``."""


def exact(q: Any, k: Any, v: Any, g: Any) -> list[Any]:
    """Return the output and the gradients [seq, heads, head_dim] in fp64, from a plain numpy implementation."""
    import numpy as np

    group, found = q.shape[1] // k.shape[1], [np.zeros(x.shape) for x in (q, q, k, v)]
    o, dq, dk, dv = found
    hidden = np.triu(np.ones((len(q), len(q)), bool), 1)
    scale = q.shape[2] ** -0.5
    for head in range(q.shape[1]):
        mine, own = np.s_[:, head], np.s_[:, head // group]
        s = np.where(hidden, -np.inf, scale * q[mine] @ k[own].T)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        o[mine] = p @ v[own]
        ds = scale * p * (g[mine] @ v[own].T - (g[mine] * o[mine]).sum(1, keepdims=True))
        dq[mine] = ds @ k[own]
        dk[own] += ds.T @ q[mine]
        dv[own] += p.T @ g[mine]
    return found


def measure(devices: int, seq: int) -> int:
    """Print the ratios; return how many of them exceed the goal."""
    jp.simulate_devices(devices)
    import jax
    import jax.numpy as jnp
    import numpy as np

    rules = jp.Rules(seq=("context", "ulysses"), **dict.fromkeys(("batch", "heads", "kv_heads", "head_dim")))
    meshes: dict[Impl, jp.MeshSpec] = {
        "flash": jp.MeshSpec(),
        "ring": jp.MeshSpec(context=devices),
        "gather": jp.MeshSpec(context=devices),
        "ulysses": jp.MeshSpec(ulysses=devices),
        "hybrid": jp.MeshSpec(context=devices // 4, ulysses=4),
    }
    rng = np.random.default_rng(0)
    shapes = [(1, seq, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    x = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    want = exact(*(np.asarray(a, np.float64)[0] for a in x))

    def errors(impl: Impl) -> np.ndarray[Any, Any]:
        def both(q: Any, k: Any, v: Any, g: Any) -> Any:
            o, back = jax.vjp(lambda *a: jp.attention(*a, impl=impl), q, k, v)
            return o, *back(g)

        spec = meshes[impl]
        with jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), rules):
            found = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*x)
        rms = lambda a: np.sqrt(np.mean(a**2))
        return np.array([rms(np.asarray(a, np.float64)[0] - b) / rms(b) for a, b in zip(found, want, strict=True)])

    one, missed = errors("flash"), 0
    print(f"{devices:7}  flash, 1 device  {', '.join(f'{e:.2e}' for e in one)}", flush=True)
    for impl in list(meshes)[1:]:
        ratios = errors(impl) / one
        missed += int((ratios > GOAL).sum())
        print(f"{devices:7}  {impl:15}  {', '.join(f'{r:8.4f}' for r in ratios)}", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", default="8,32", help="numbers of simulated devices, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--seq", type=int, default=1024, help="number of tokens (default: %(default)s)")
    options = parser.parse_args()
    counts = [int(n) for n in options.devices.split(",")]
    if len(counts) == 1:
        missed = measure(counts[0], options.seq)
        print(f"{missed} ratios above {GOAL}")
        return 1 if missed else 0
    print(
        "devices  implementation   relative RMS error of o, dq, dk, dv in bf16: of flash, then as ratios to it",
        flush=True,
    )
    # A process can simulate devices only once, before it imports jax.
    again = [sys.executable, __file__, "--seq", str(options.seq), "--devices"]
    return max(subprocess.run([*again, str(n)], check=False).returncode for n in counts)


if __name__ == "__main__":
    sys.exit(main())
