"""The overhead of jaxpar's train step over a step written by hand.

    uv run python benchmarks/overhead/train_step.py

Both steps train the same Llama with the same shardings in one process. Compares the compiled programs, and the CPU
seconds of running them in turn. jaxpar's step skips an update that is not finite, and the one by hand does not: the
programs are compared with ``skip_nonfinite=False``, and what skipping adds is a column of its own, as the CPU seconds
are those of the step as it is by default. Also measures the CPU seconds to explain, trace and lower the step of the 70B
preset for 4,096 devices.

Goal: equal FLOPs and equal collectives. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar as jp
from benchmarks.shared.paths import LAYOUTS
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import next_token_loss

COLLECTIVE = re.compile(r"= (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def hand_written_step(graphdef: Any, rest: Any, tx: Any, shardings: Any) -> Any:
    """Return the step as written without jaxpar: value_and_grad, sharded gradients, update, out_shardings, donation."""

    def step(params: Any, opt_state: Any, count: jax.Array, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return next_token_loss(nnx.merge(graphdef, params, rest), batch)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.lax.with_sharding_constraint(grads, shardings[0])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, count + 1, loss, optax.tree.norm(grads)

    return jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=shardings)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Compiled steps: jaxpar's by default, jaxpar's without skipping, the hand-written one; and what runs them once."""

    default: Any
    ours: Any
    hand: Any
    run_default: Callable[[], None]
    run_hand: Callable[[], None]


def programs(layout: jp.Layout, config: Any, batch: Any) -> Programs:
    """Return the compiled steps, and functions that run the default and the hand-written one and wait."""
    tx = optax.adamw(1e-3)
    make_model = make_llama(config)
    state = jp.init(layout, make_model, tx)
    default = jp.train_step(layout, next_token_loss).lower(state, batch).compile()
    ours = jp.train_step(layout, next_token_loss, skip_nonfinite=False).lower(state, batch).compile()

    with nnx.use_eager_sharding(False):
        graphdef, params, rest = nnx.split(nnx.eval_shape(make_model, jax.random.key(0)), nnx.Param, ...)
    fresh = jp.init(layout, make_model, tx)  # the same values: both steps donate their arguments
    params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(fresh.params))
    opt_state = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(tx.init, params)), jax.tree.leaves(fresh.opt_state)
    )
    scalar = NamedSharding(layout.mesh, PartitionSpec())
    shardings = (
        jax.tree.map(lambda x: x.sharding, params),
        jax.tree.map(lambda x: x.sharding, opt_state),
        scalar,
        scalar,
        scalar,
    )
    count = jax.device_put(jnp.zeros((), jnp.int32), scalar)
    with layout:
        hand = hand_written_step(graphdef, rest, tx, shardings).lower(params, opt_state, count, batch).compile()

    held: dict[str, Any] = {"state": state, "hand": (params, opt_state, count)}

    def run_default() -> None:
        held["state"], metrics = default(held["state"], batch)
        jax.block_until_ready((held["state"], metrics))

    def run_hand() -> None:
        *kept, loss, norm = hand(*held["hand"], batch)
        held["hand"] = tuple(kept)
        jax.block_until_ready((kept, loss, norm))

    return Programs(default, ours, hand, run_default, run_hand)


def facts(compiled: Any) -> dict[str, Any]:
    """Return FLOPs and collectives (kind and result type → count) of a compiled program."""
    found = COLLECTIVE.findall(compiled.as_text())
    kinds = Counter(f"{kind} {re.sub(r'{[^}]*}', '', result)}" for result, kind in found)
    return {"flops": compiled.cost_analysis()["flops"], "collectives": dict(sorted(kinds.items()))}


def elements(collectives: dict[str, int]) -> Counter[str]:
    """Return collectives by single array, because the compiler may combine arrays into tuples in different ways."""
    single: Counter[str] = Counter()
    for text, count in collectives.items():
        kind, result = text.split(" ", 1)
        for array in re.findall(r"\w+\[[\d,]*\]", re.sub(r"/\*.*?\*/", "", result)):
            single[f"{kind} {array}"] += count
    return single


def cpu_ratio(a: Callable[[], None], b: Callable[[], None], rounds: int, steps: int) -> tuple[float, float, float]:
    """Return median CPU seconds per step of ``a`` and ``b``, and the median of their ratio; rounds alternate."""

    def block(f: Callable[[], None]) -> float:
        began = time.process_time()
        for _ in range(steps):
            f()
        return (time.process_time() - began) / steps

    a()
    b()
    pairs = []
    for number in range(rounds):
        first, second = (a, b) if number % 2 == 0 else (b, a)
        times = {first: block(first), second: block(second)}
        pairs.append((times[a], times[b]))
    return (
        statistics.median(x for x, _ in pairs),
        statistics.median(y for _, y in pairs),
        statistics.median(x / y for x, y in pairs),
    )


def large_model() -> dict[str, float]:
    """Return CPU seconds to explain, trace and lower the 70B preset's step for 4,096 abstract TPU devices."""
    layout = jp.Layout.from_yaml(LAYOUTS / "fsdp_tp.yaml", devices=4096)
    make_model, tx, seconds = make_llama(preset("llama3_1_70b")), optax.adamw(1e-3), {}
    shape = (2048, 8192)
    batch = {k: jp.tag(jax.ShapeDtypeStruct(shape, "int32"), "batch", "seq") for k in ("tokens", "targets")}

    began = time.process_time()
    jp.explain(layout, make_model, tx, batch=batch, loss_fn=next_token_loss)
    seconds["explain"] = time.process_time() - began

    began = time.process_time()
    state = jp.abstract_state(layout, make_model, tx)
    sharding = layout.sharding(("batch", "seq"), shape)
    inputs = {k: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for k in batch}
    traced = jp.train_step(layout, next_token_loss).trace(state, inputs)
    seconds["trace"] = time.process_time() - began

    began = time.process_time()
    traced.lower(lowering_platforms=("tpu",))
    seconds["lower"] = time.process_time() - began
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of timed blocks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    options = parser.parse_args()
    config = preset("tiny", layers=2)
    rng = np.random.default_rng(0)
    figures: dict[str, Any] = {}
    ok = True
    print("layout    FLOPs jaxpar / by hand    skipping  collectives  CPU s per step jaxpar / hand  ratio")
    for name in ("dp", "fsdp", "fsdp_tp"):
        layout = jp.Layout.from_yaml(LAYOUTS / f"{name}.yaml")
        batch = {
            k: jp.shard_array(layout, rng.integers(0, 256, (16, 64)).astype(np.int32), "batch", "seq")
            for k in ("tokens", "targets")
        }
        found = programs(layout, config, batch)
        a, b = facts(found.ours), facts(found.hand)
        skipping = facts(found.default)["flops"] / a["flops"] - 1
        # XLA's FLOP count varies by a few scalar operations with their duplication into fusions.
        equal_flops = math.isclose(a["flops"], b["flops"], rel_tol=1e-6)
        equal = elements(a["collectives"]) == elements(b["collectives"])
        ok = ok and equal and equal_flops
        mine, theirs, ratio = cpu_ratio(found.run_default, found.run_hand, options.rounds, options.steps)
        same = f"{sum(elements(a['collectives']).values())} equal" if equal else "DIFFER"
        flops = f"{a['flops']:.6g} / {b['flops']:.6g}{'' if equal_flops else ' DIFFER'}"
        print(f"{name:8}  {flops:24}  {skipping:+8.2%}  {same:>11}  {mine:.4f} / {theirs:.4f}  {ratio:.3f}", flush=True)
        if not equal:
            print("  only jaxpar: ", elements(a["collectives"]) - elements(b["collectives"]))
            print("  only by hand:", elements(b["collectives"]) - elements(a["collectives"]))
        row = {"ours": a, "hand": b, "skipping": skipping, "cpu_seconds": [mine, theirs], "ratio": ratio}
        figures[name] = row
    figures["70b_4096"] = large_model()
    print("70B on 4,096 devices, CPU s:", ", ".join(f"{k} {v:.2f}" for k, v in figures["70b_4096"].items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
