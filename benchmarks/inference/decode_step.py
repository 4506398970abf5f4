"""A decode step of jaxpar is as fast as one written by hand, and generates the same tokens.

    uv run python benchmarks/inference/decode_step.py

Both decode the same tokens with the same Llama, shardings and cache, in one process on 8 simulated devices. There are
two versions by hand, as one would write them without jaxpar: ``scatter`` carries the full cache through the layers and
writes one slot of each row; ``stack`` scans over the cache layer by layer and restacks it. The versions run in turn;
tokens, wire bytes and CPU seconds are compared. ``decode_bytes.py`` shows memory and wire bytes on a
TPU.

Goals: equal tokens, and at most 1.05 × the CPU time of the faster version by hand. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from benchmarks.shared.paths import LAYOUTS
from jaxpar.inference.request import Request
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.llama.decode import cached_llama


def norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def turned(x: jax.Array, at: jax.Array, theta: float) -> jax.Array:
    """Apply rotary positions to [batch, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = at[:, None, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), -1).astype(x.dtype)


def by_hand(config: LlamaConfig, how: str) -> Any:
    """Return a greedy jitted ``step(params, keys, values, tokens, at) -> (keys, values, tokens, at)`` of one kind.

    ``how`` is ``scatter`` or ``stack``. The step donates its cache.
    """
    c, pin = config, jax.lax.with_sharding_constraint

    def attend(q: jax.Array, keys: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        q = q.reshape(q.shape[0], c.kv_heads, -1, c.head_dim)
        s = jnp.einsum("bkgd,bktd->bkgt", q, keys, preferred_element_type=jnp.float32) / math.sqrt(c.head_dim)
        seen = jnp.arange(keys.shape[2]) <= at[:, None]
        p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf), -1).astype(values.dtype)
        o = jnp.einsum("bkgt,bktd->bkgd", p, values, preferred_element_type=jnp.float32)
        return o.astype(q.dtype).reshape(q.shape[0], -1)

    def layer(x: jax.Array, w: Any, at: jax.Array, cached: Callable[..., Any]) -> tuple[jax.Array, Any]:
        a, m = w["attention"], w["mlp"]
        h = norm(x, w["attention_norm"]["scale"], c.norm_eps)
        q, k, v = (jnp.einsum("be,ehd->bhd", h, a[name]) for name in "qkv")
        q, k = turned(q, at, c.rope_theta), turned(k, at, c.rope_theta)
        keys, values, kept = cached(k, v)
        x = pin(x + attend(q, keys, values, at) @ a["o"].reshape(-1, c.embed), P("data"))
        h = norm(x, w["mlp_norm"]["scale"], c.norm_eps)
        return pin(x + (jax.nn.silu(h @ m["gate"]) * (h @ m["up"])) @ m["down"], P("data")), kept

    @partial(jax.jit, donate_argnums=(1, 2))
    def step(params: Any, keys: jax.Array, values: jax.Array, tokens: jax.Array, at: jax.Array) -> Any:
        x, rows = params["embedding"][tokens], jnp.arange(tokens.shape[0])
        if how == "scatter":

            def one(carry: Any, given: Any) -> Any:
                x, keys, values = carry
                i, w = given

                def cached(k: jax.Array, v: jax.Array) -> Any:
                    both = (keys.at[i, rows, :, at].set(k), values.at[i, rows, :, at].set(v))
                    return both[0][i], both[1][i], both

                x, both = layer(x, w, at, cached)
                return (x, *both), None

            numbers = jnp.arange(c.layers)
            (x, keys, values), _ = jax.lax.scan(one, (x, keys, values), (numbers, params["blocks"]))
        else:
            put = jax.vmap(lambda cache, new, at: jax.lax.dynamic_update_slice(cache, new[:, None], (0, at, 0)))

            def one_layer(x: Any, given: Any) -> Any:
                w, keys, values = given

                def cached(k: jax.Array, v: jax.Array) -> Any:
                    both = (put(keys, k, at), put(values, v, at))
                    return *both, both

                return layer(x, w, at, cached)

            x, (keys, values) = jax.lax.scan(one_layer, x, (params["blocks"], keys, values))
        logits = norm(x, params["norm"]["scale"], c.norm_eps) @ params["head"]
        place = P(None, "data", "model", None, None)
        return pin(keys, place), pin(values, place), pin(jnp.argmax(logits, -1), P("data")), at + 1

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps of each version in a round (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=512, help="slots of the cache (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    arguments = parser.parse_args()
    config = LlamaConfig(vocab=4096, embed=512, layers=6, heads=8, kv_heads=4, head_dim=64, mlp=1408)
    layout = jp.Layout.from_yaml(LAYOUTS / "tp.yaml")
    params = jp.init(layout, make_llama(config), optax.identity()).params
    model = jp.Generator(layout, make_llama(config), cached_llama(config), batch=arguments.batch, slots=arguments.slots)
    prompt = np.random.default_rng(0).integers(0, config.vocab, (arguments.batch, 16)).tolist()

    asked = model.prompts([Request(tuple(row), 10**6) for row in prompt])
    held: dict[str, Any] = {"jaxpar": model.prefill(params, asked)[0]}
    runs, wire, made = {}, {}, {}
    ours = model.decode.lower(model.params, model.abstract).compile()
    wire["jaxpar"] = jp.audit(ours, mesh=layout.mesh).wire_bytes()

    def run_ours() -> jax.Array:
        held["jaxpar"], tokens = ours(params, held["jaxpar"])
        return jax.block_until_ready(tokens)

    runs["jaxpar"] = run_ours
    for how in ("scatter", "stack"):
        first = model.prefill(params, asked)[0]
        with layout:
            arrays = (first.cache["keys"], first.cache["values"], first.tokens, first.at)
            hand = by_hand(config, how).lower(params, *arrays).compile()
        held[how], wire[how] = arrays, jp.audit(hand, mesh=layout.mesh).wire_bytes()

        def run_hand(how: str = how, hand: Any = hand) -> jax.Array:
            held[how] = hand(params, *held[how])
            return jax.block_until_ready(held[how][2])

        runs[how] = run_hand
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        made[name] = [np.asarray(run()).tolist() for _ in range(8)]
    for turn in range(arguments.rounds):
        for name in list(runs)[turn % 3 :] + list(runs)[: turn % 3]:
            began = time.process_time()
            for _ in range(arguments.steps):
                runs[name]()
            seconds[name].append((time.process_time() - began) / arguments.steps)
    best = min(("scatter", "stack"), key=lambda name: statistics.median(seconds[name]))
    ratio = statistics.median(a / b for a, b in zip(seconds["jaxpar"], seconds[best], strict=True))
    found = {
        "milliseconds": {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()},
        "wire_bytes": wire,
        "same_tokens": made["jaxpar"] == made["scatter"] == made["stack"],
        "faster_by_hand": best,
        "ratio": round(ratio, 3),
    }
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["same_tokens"] and ratio <= 1.05 else 1


if __name__ == "__main__":
    sys.exit(main())
