"""Errors of each implementation of attention against plain attention on one device, as a table.

    uv run python benchmarks/attention/error_table.py [--markdown FILE]

It covers every implementation × mask or option × key heads × dtype × kind of mesh axes. Each of about 1,500 programs
runs once, on small arrays, so the time is spent on compiling. The compiler therefore optimizes nothing, and compiles
one program while the next is traced.

The full table takes 25 CPU minutes. ``--markdown FILE`` also writes it into a file, between the lines ``MARKS``.

Goal: no error above ``BOUNDS``. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jaxpar as jp

jp.simulate_devices(8)

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.parallel.attention.options import Impl

RULES = jp.Rules(
    batch="data", seq=("context", "ulysses"), heads="model", kv_heads=jp.first_of("model", None), head_dim=None
)
MESHES: dict[Impl, dict[str, int]] = {
    "dense": {"context": 4},
    "flash": {"data": 2},
    "gather": {"context": 4},
    "ring": {"context": 4},
    "ring_self_attention": {"context": 4},
    "ulysses": {"ulysses": 4},
    "hybrid": {"context": 2, "ulysses": 2},
}
BATCH, SEQ, HEADS, HEAD_DIM = 2, 32, 4, 8
KV_HEADS = (2, 1, 4)
DTYPES = {"fp32": False, "bf16": True}
"""Name → whether arrays are rounded to bfloat16."""
LEARNED = ("bias", "sinks", "alibi")
BOUNDS = {"fp32": 1e-5, "bf16": 3e-2}
"""Largest error allowed: fp32 against fp32, bf16 against fp32 of the same numbers, relative to each array's largest
entry."""
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MARKS = "<!-- errors -->", "<!-- end of errors -->"
"""The lines of the Markdown file between which the table stands."""
ONE_AT_A_TIME = threading.Lock()
"""Serializes runs: two programs that run concurrently on the same simulated devices may deadlock on each other's
threads."""


def cases() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 4, size=(BATCH, SEQ)), axis=1).astype(np.int32)
    ids[:, -3:] = -1
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)
    return {
        "causal": {},
        "full": {"causal": False},
        "window": {"mask": jp.Mask(window=5)},
        "two-sided window": {"mask": jp.Mask(causal=False, window=(3, 6))},
        "documents, padding": {"segment_ids": ids},
        "documents, full": {"segment_ids": ids, "causal": False},
        "prefix": {"prefix": 7},
        "prefix of each": {"prefix": np.array([0, 9])},
        "chunks": {"mask": jp.Mask(chunk=8)},
        "function": {"mask": lambda q, k: (q - k) % 3 == 0, "causal": False},
        "function, empty rows": {"mask": lambda q, k: k < q - 2},
        "soft cap": {"softcap": 0.7},
        "scale": {"scale": 0.3},
        "ALiBi": {"alibi": abs(draw(HEADS))},
        "bias of heads": {"bias": draw(1, HEADS, SEQ, SEQ)},
        "bias of sequences": {"bias": draw(BATCH, 1, SEQ, SEQ)},
        "sinks": {"sinks": draw(HEADS)},
        "dropout": {"dropout": 0.3, "key": jax.random.key(3)},
    }


class Programs:
    """Results of the programs for one case. Each distinct program is compiled and run once.

    Under Explicit axes a program often equals the one for Auto axes except for annotations outside the ``shard_map``
    and for numbering. It is then traced and lowered, which is where Explicit axes raise errors, but not compiled again.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Future[list[np.ndarray]]] = {}
        self.lock = threading.Lock()

    def run(
        self, layout: jp.Layout, impl: Impl, x: tuple[Any, ...], options: dict[str, Any], which: tuple[Any, ...]
    ) -> list[np.ndarray]:
        """Return the output and the gradients of queries, keys, values and the learned options.

        ``which`` identifies the input arrays, so that programs on different inputs are not confused.
        """
        learned = {name: options[name] for name in LEARNED if name in options}
        fixed = {name: value for name, value in options.items() if name not in learned}

        attend: Any = jp.attention  # its options depend on the case

        def both(x: Any, learned: Any, gradient: Any) -> Any:
            o, back = jax.vjp(lambda x, learned: attend(*x, impl=impl, **fixed, **learned), x, learned)
            return o, back(gradient)

        *given, gradient = (
            jax.device_put(a, layout.sharding(("batch", "seq", "heads", "head_dim"), a.shape)) for a in x
        )
        with layout:
            lowered = jax.jit(both).lower(tuple(given), learned, gradient)
            key = (*which, without_annotations(lowered.as_text()))
            with self.lock:
                known, made = self.made.get(key), Future[list[np.ndarray]]()
                self.made[key] = known or made
            if known:
                return known.result()
            try:
                program = lowered.compile(QUICK)
                with ONE_AT_A_TIME:
                    leaves = jax.tree.leaves(program(tuple(given), learned, gradient))
                    made.set_result([np.asarray(leaf, np.float32) for leaf in leaves])
            except Exception as error:  # noqa: BLE001 (it is raised again where it is waited for)
                made.set_exception(error)
        return made.result()


def without_annotations(text: str) -> str:
    """Strip sharding annotations outside a ``shard_map`` from lowered text, and renumber each function's values."""
    return "\nfunc.func".join(_renumbered(part) for part in text.split("\n  func.func"))


def _renumbered(function: str) -> str:
    same = dict(re.findall(r"(%\w+) = sdy\.sharding_constraint (%[\w#]+) ", function))
    signature, *lines = (line for line in function.splitlines() if " = sdy.sharding_constraint " not in line)
    while (bare := re.sub(r" \{[^{}]*\}|\{[^{}]*\}", "", signature)) != signature:
        signature = bare
    numbers: dict[str, str] = {}

    def numbered(name: re.Match[str]) -> str:
        value = name[0]
        while value in same:
            value = same[value]
        stem, _, part = value.partition("#")
        return f"{numbers.setdefault(stem, f'%{len(numbers)}')}#{part}"

    return re.sub(r"%[\w#]+", numbered, "\n".join((signature, *lines)))


def layout_of(explicit: bool, **sizes: int) -> jp.Layout:
    spec = jp.MeshSpec(**sizes)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    return jp.Layout(spec.build(jax.devices()[: spec.abstract().size], axis_type=kind), RULES, explicit)


def arrays(kv_heads: int, half: bool) -> tuple[Any, ...]:
    """Return queries, keys, values and the output's gradient in fp32; with ``half`` rounded to bfloat16 first."""
    rng = np.random.default_rng(0)
    shapes = ((BATCH, SEQ, HEADS, HEAD_DIM), *((BATCH, SEQ, kv_heads, HEAD_DIM),) * 2)
    x = (rng.normal(size=shape).astype(np.float32) for shape in (*shapes, shapes[0]))
    return tuple(np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) if half else a for a in x)


def error_of(
    impl: Impl,
    explicit: bool,
    half: bool,
    kv_heads: int,
    options: dict[str, Any],
    programs: Programs,
    want: list[np.ndarray],
) -> float:
    """Return the largest error of the output or of a gradient; infinity if the program fails."""
    x = arrays(kv_heads, half)
    x = tuple(jnp.asarray(a, jnp.bfloat16) for a in x) if half else x
    try:
        found = programs.run(layout_of(explicit, **MESHES[impl]), impl, x, options, (half, kv_heads))
    except Exception as error:  # noqa: BLE001 (the other figures of the table are still computed)
        sizes = f"{kv_heads} key heads, {'bf16' if half else 'fp32'}, {'Explicit' if explicit else 'Auto'}"
        print(f"{impl}, {sizes}: {type(error).__name__}: {str(error)[:600]}", file=sys.stderr, flush=True)
        return float("inf")
    gaps = [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in zip(found, want, strict=True)]
    return max(gap if np.isfinite(gap) else float("inf") for gap in gaps)


def errors_of(
    impls: Sequence[Impl], kv_heads: int, options: dict[str, Any], pool: ThreadPoolExecutor
) -> tuple[dict[Impl, dict[str, float]], int]:
    """Return implementation → dtype → largest error over both kinds of axes, and the number of compiled programs."""
    one, programs = layout_of(False, data=1), Programs()
    wanted = [
        pool.submit(programs.run, one, "dense", arrays(kv_heads, half), options, ("wanted", half))
        for half in DTYPES.values()
    ]
    want = [done.result() for done in wanted]
    found = {
        (impl, half, explicit): pool.submit(error_of, impl, explicit, half, kv_heads, options, programs, want[half])
        for impl, explicit, half in itertools.product(impls, (False, True), DTYPES.values())
    }
    errors = {
        impl: {
            dtype: max(found[impl, half, explicit].result() for explicit in (False, True))
            for dtype, half in DTYPES.items()
        }
        for impl in impls
    }
    return errors, len(programs.made) - len(wanted)


def as_markdown(impls: Sequence[Impl], rows: dict[str, dict[Impl, dict[str, float]]]) -> list[str]:
    cell = lambda errors: f"{errors['fp32']:.0e} / {errors['bf16']:.0e}".replace("e-0", "e-")
    return [
        "| fp32 / bf16; key heads | " + " | ".join(f"`{impl}`" for impl in impls) + " |",
        "|---|" + "---:|" * len(impls),
        *(f"| {name} | " + " | ".join(cell(row[impl]) for impl in impls) + " |" for name, row in rows.items()),
    ]


def table(
    impls: Sequence[Impl],
    kv_heads: Sequence[int],
    chosen: dict[str, dict[str, Any]],
    kept: Path | None,
    markdown: Path | None,
) -> int:
    """Print the table; return 1 if a figure is out of bounds.

    Args:
      impls: implementations, one per column.
      kv_heads: numbers of key heads to compute. Rows include others that ``kept`` holds; a row's title lists its
        numbers.
      chosen: name of a mask or option → arguments of attention.
      kept: JSON file of figures that were computed before and are not computed again.
      markdown: a file in which the table replaces the lines between :data:`MARKS`.
    """
    found: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    each = len(impls) * len(DTYPES) * 2
    with ThreadPoolExecutor(2) as pool:
        for heads, (name, options) in itertools.product(kv_heads, chosen.items()):
            key = f"{name}, {heads} key heads"
            missing = [impl for impl in impls if impl not in found.get(key, {})]
            if not missing:
                continue
            start, cpu = time.monotonic(), time.process_time()
            errors, compiled = errors_of(missing, heads, options, pool)
            found[key] = found.get(key, {}) | errors
            took = f"{time.monotonic() - start:.0f} s, {time.process_time() - cpu:.0f} CPU s"
            print(f"{key}: {each} programs, {compiled} compiled, {took}", flush=True)
            if kept:
                kept.write_text(json.dumps(found, indent=1))
    rows = {}
    for name in chosen:
        there = {n: row for n in KV_HEADS if set(impls) <= set(row := found.get(f"{name}, {n} key heads", {}))}
        if there:
            title = f"{name}, {', '.join(map(str, there))}"
            rows[title] = {
                impl: {dtype: max(row[impl][dtype] for row in there.values()) for dtype in DTYPES} for impl in impls
            }
    lines = as_markdown(impls, rows)
    print("\n".join(lines))
    if markdown:
        before, rest = markdown.read_text().split(MARKS[0])
        _, after = rest.split(MARKS[1])
        markdown.write_text("\n".join((before + MARKS[0], *lines, MARKS[1] + after)))
    bad = sum(row[impl][dtype] > bound for row in rows.values() for impl in impls for dtype, bound in BOUNDS.items())
    print(f"{len(found) * each} programs; {bad} of {len(rows) * len(impls) * 2} figures above the bounds {BOUNDS}")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--impls", default=",".join(MESHES), help="implementations, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-heads", default="2,1,4", help="numbers of key heads, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--cases", help="masks and options, separated by semicolons (default: all); for example 'causal;dropout'"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="JSON file of figures; those that it holds are not computed again"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="replace the table in this Markdown file")
    options = parser.parse_args()
    if unknown := sorted(set(options.impls.split(",")) - MESHES.keys()):
        parser.error(f"no implementation {', '.join(unknown)}; implementations are {', '.join(MESHES)}")
    known, names = cases(), options.cases.split(";") if options.cases else list(cases())
    if unknown := sorted(set(names) - known.keys()):
        parser.error(f"no case {', '.join(unknown)}; cases are {'; '.join(known)}")
    heads = [int(n) for n in options.kv_heads.split(",")]
    return table(options.impls.split(","), heads, {n: known[n] for n in names}, options.keep, options.markdown)


if __name__ == "__main__":
    sys.exit(main())
