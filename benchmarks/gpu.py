"""What one GPU does: attention, a 1B step, fp8, int8 decoding, offload and initialization, beside the roofline.

    python benchmarks/gpu.py --json gpu.json --table gpu.md
    python benchmarks/gpu.py --tiny

It is meant to end within 9 minutes on one H100 or H200, but has not run on one yet. It needs jaxpar, its packages and
a CUDA build of jax. A part that cannot run reports why, and a part that would start after ``--budget`` seconds is
skipped. Times are medians of wall-clock times that include the wait for the result. ``--tiny`` runs every part with
tiny sizes on any device, to show that the script works; its times say nothing.

Goals: every part runs, and initial parameters are bitwise equal. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.models import next_token_loss
from jaxpar.models.llama import LlamaConfig, make_llama, preset
from jaxpar.models.llama.decode import cached_llama
from jaxpar.sharding.hardware.accelerators import Accelerator, of_device


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    lengths: tuple[int, ...]
    heads: int
    config: LlamaConfig
    batch: int
    seq: int
    decoded: int
    host_bytes: int
    repeats: int


FULL = Scale((2048, 4096, 8192, 16_384, 32_768), 16, preset("1b", remat="full"), 4, 2048, 64, 2 * 2**30, 5)
TINY = Scale((32,), 2, preset("tiny", layers=1, embed=32, mlp=64, vocab=64, heads=2, head_dim=16), 2, 16, 3, 2**16, 1)
AXES = dict.fromkeys(
    ("seq", "residual_seq", "embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
)


def one_device() -> jp.Layout:
    return jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules(batch="data", **AXES))


def seconds(f: Callable[[], Any], repeats: int) -> float:
    """Returns the median time of a call and its result; the first call, which compiles, is not counted."""
    jax.block_until_ready(f())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def attentions() -> dict[str, Callable[..., jax.Array]]:
    """Returns the causal attentions that can be tried, as functions of queries, keys and values."""
    found: dict[str, Callable[..., jax.Array]] = {"jaxpar": partial(jp.attention, mask=jp.Mask(causal=True))}
    found["cudnn"] = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    found["xla"] = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    if importlib.util.find_spec("tokamax") is not None:
        tokamax = importlib.import_module("tokamax")
        found["tokamax"] = partial(tokamax.dot_product_attention, is_causal=True)
    return found


def attention(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    for length in scale.lengths:
        shape = (1, length, scale.heads, 128 if scale is FULL else 16)
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
        flops = 2 * length * length * shape[2] * shape[3]  # two products, of which a causal mask leaves half
        for name, f in attentions().items():
            row = {"attention": name, "tokens": length}
            if name == "xla" and length > 8192:
                continue  # its scores do not fit
            grad = jax.grad(lambda *x, f=f: jnp.sum(f(*x).astype(jnp.float32)), (0, 1, 2))
            for what, run, factor in (("forward", f, 1), ("both", grad, 3.5)):
                try:
                    with one_device():
                        took = seconds(partial(jax.jit(run), q, k, v), scale.repeats)
                except Exception as error:  # noqa: BLE001  # the row says why it did not run
                    yield row | {"pass": what, "error": _first_line(error)}
                    continue
                least = factor * flops / device.rate("bf16") if device is not None else None
                yield row | {"pass": what, "ms": 1e3 * took, "roofline_ms": None if least is None else 1e3 * least}


def _batch(scale: Scale) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, scale.config.vocab, (scale.batch, scale.seq + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _by_jaxpar(scale: Scale, precision: Any = None) -> tuple[float, Any]:
    """Returns the seconds of a step of jaxpar, and its compiled program."""
    layout, tx = one_device(), optax.adamw(1e-4)
    state = jp.init(layout, make_llama(scale.config), tx, precision=precision)
    step, batch = jp.train_step(layout, next_token_loss, precision=precision), jax.device_put(_batch(scale))
    program = step.lower(state, batch).compile()
    held = [state]

    def run() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics["loss"]

    return seconds(run, scale.repeats), program


def _by_hand(scale: Scale) -> float:
    """Returns the seconds of a step as one would write it for one device: jit, value_and_grad, optax."""
    tx, batch = optax.adamw(1e-4), jax.device_put(_batch(scale))
    with jp.unsharded():
        graph, params = nnx.split(nnx.jit(make_llama(scale.config))(jax.random.key(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params), batch)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    held = [params, jax.jit(tx.init)(params)]

    def run() -> Any:
        held[0], held[1], value = step(*held, batch)
        return value

    with jp.unsharded():
        return seconds(run, scale.repeats)


def train(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    took, program = _by_jaxpar(scale)
    tokens = scale.batch * scale.seq
    flops = tokens * scale.config.flops_per_token(scale.seq)
    row: dict[str, Any] = {"step": "jaxpar", "ms": 1e3 * took, "tokens_per_second": tokens / took}
    if device is not None:
        predicted = jp.roofline(jp.audit(program), f"{device.kind}:1x1", tokens=tokens, model_flops=flops)
        row |= {"mfu": flops / took / device.rate("bf16"), "roofline_ms": 1e3 * predicted.step}
    yield row
    del program
    hand = _by_hand(scale)
    yield {"step": "by hand", "ms": 1e3 * hand, "tokens_per_second": tokens / hand, "jaxpar_ratio": took / hand}


def fp8(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    times = {name: _by_jaxpar(scale, precision)[0] for name, precision in (("bf16", None), ("fp8", {"matmul": "fp8"}))}
    for name, took in times.items():
        yield {"matmuls": name, "ms": 1e3 * took, "speedup": times["bf16"] / took}


def decode(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    layout, config = one_device(), scale.config
    prompts = [[1, 2, 3]] * scale.batch
    for weights in (None, "int8"):
        cached = cached_llama(config, weights=weights, cache=weights)
        model = jp.Generator(layout, make_llama(config), cached, batch=scale.batch, slots=scale.decoded + 8)
        params = model.prepare(jp.init(layout, make_llama(config), optax.identity()).params)
        run = lambda model=model, params=params: model.generate(params, prompts, most=[scale.decoded] * len(prompts))
        took = seconds(run, scale.repeats)
        row = {"decode": weights or config.dtype, "tokens_per_second": scale.batch * scale.decoded / took}
        if device is not None:
            held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
            row["roofline_tokens_per_second"] = scale.batch * device.hbm_bandwidth / held
        yield row


def offload(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = here.with_memory_kind("pinned_host")
    x = jnp.ones(scale.host_bytes // 4, jnp.float32)
    there = jax.device_put(x, host)
    for name, data, target in (("to host", x, host), ("to device", there, here)):
        took = seconds(partial(jax.device_put, data, target, may_alias=False), scale.repeats)
        yield {"offload": name, "GB_per_second": scale.host_bytes / took / 1e9}


def initialization(scale: Scale, device: Accelerator | None) -> Iterator[dict[str, Any]]:
    """Initial parameters of two layouts on this device, bit by bit: one and the same in every layout."""
    config, found = dataclasses.replace(scale.config, layers=1), []
    rules = (jp.Rules(batch="data", **AXES), jp.Rules(batch="data", **AXES | {"embed": "data"}))
    for own in rules:
        layout = jp.Layout(jp.MeshSpec(data=-1).build(), own)
        found.append(
            [np.asarray(x) for x in jax.tree.leaves(jp.init(layout, make_llama(config), optax.identity()).params)]
        )
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))
    yield {"initialization": f"{len(jax.devices())} devices", "bitwise_equal": equal}


PARTS: dict[str, Callable[[Scale, Accelerator | None], Iterator[dict[str, Any]]]] = {
    "attention": attention,
    "train": train,
    "fp8": fp8,
    "decode": decode,
    "offload": offload,
    "initialization": initialization,
}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def measure(scale: Scale, parts: list[str], budget: float) -> dict[str, Any]:
    """Returns the rows of each part; a part that fails or starts too late has one row with the reason."""
    device = of_device(jax.devices()[0].device_kind)
    start, rows = time.perf_counter(), {}
    for name in parts:
        began = time.perf_counter()
        if began - start > budget:
            rows[name] = [{"skipped": f"{budget:.0f} s are over"}]
            continue
        found: list[dict[str, Any]] = []
        try:
            found.extend(PARTS[name](scale, device))
        except Exception as error:  # noqa: BLE001  # one part must not end the others
            found.append({"error": _first_line(error)})
        rows[name] = [row | {"part_s": round(time.perf_counter() - began, 1)} for row in found]
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    versions = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "devices": len(jax.devices())}
    return {"versions": versions, "seconds": time.perf_counter() - start, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Returns all rows as one Markdown table: part, what, measured, roofline."""
    lines = ["| part | what | measured | roofline | measured / roofline |", "|---|---|---|---|---|"]
    for part, rows in found["rows"].items():
        for row in rows:
            names = ("attention", "tokens", "pass", "step", "matmuls", "decode", "offload", "initialization")
            what = " ".join(str(row[name]) for name in names if name in row)
            figures = {k: v for k, v in row.items() if k not in names and k != "part_s" and "roofline" not in k}
            shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
            pairs = [(row[k.removeprefix("roofline_")], v) for k, v in row.items() if k.startswith("roofline_") and v]
            least = f"{pairs[0][1]:.4g} | {pairs[0][0] / pairs[0][1]:.2f}" if pairs else " | "
            lines.append(f"| {part} | {what} | {shown} | {least} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to show that the script runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--budget", type=float, default=480, metavar="S", help="start no part later (default: 480)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures into this file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table into this file")
    options = parser.parse_args()
    found = measure(TINY if options.tiny else FULL, options.parts, options.budget)
    text = table(found)
    print(text, end="")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if options.table is not None:
        options.table.write_text(text, encoding="utf-8")
    return 0 if passed(found) else 1


def passed(found: dict[str, Any]) -> bool:
    """Whether every part ran, and initial parameters are equal. An attention that the machine lacks is no failure."""
    rows = [row for part in found["rows"].values() for row in part]
    ran = not any("skipped" in row or ("error" in row and "attention" not in row) for row in rows)
    return ran and not any(row.get("bitwise_equal") is False for row in rows)


if __name__ == "__main__":
    sys.exit(main())
