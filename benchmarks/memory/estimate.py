"""The memory estimate of ``jp.explain`` compared with the peak memory that the TPU compiler reports.

    uv run python benchmarks/memory/estimate.py [--compile] [--write]

Reads the points of ``tests/analysis/memory/memory_points.json`` (each a model, a layout and a TPU topology), and prints
estimate and peak as the table of ``docs/measured/memory.md``. ``--write`` writes the table there. ``--compile`` first
compiles the points without figures (extra ``tpu``, or ``JAXPAR_TPU_PYTHON``), one or two CPU minutes each, and updates
the file after each point. The table states how many points are within 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpar as jp
from benchmarks.shared.paths import LAYOUTS, ROOT
from jaxpar.analysis.compile.ahead_of_time import aim
from jaxpar.analysis.memory.estimate import Memory
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.models.vit import ViTConfig, make_vit, vit_loss
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.yaml_config import load_yaml, merge

POINTS = ROOT / "tests" / "analysis" / "memory" / "memory_points.json"
DOCS, MARKS = ROOT / "docs" / "measured" / "memory.md", ("<!-- table -->", "<!-- end of table -->")


def inputs(point: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that ``jp.explain`` and ``jp.analysis.compile_for`` share, for one point."""
    data = merge(load_yaml(LAYOUTS / f"{point['layout']}.yaml"), {"mesh": point["mesh"]})
    layout = jp.Layout.from_dict(data, devices=Topology.parse(point["topology"]).devices)
    rest = _vit(point) if point.get("family") == "vit" else _llama(point)
    return {"layout": layout, "tx": optax.adamw(1e-3), **rest}


def _llama(point: dict[str, Any]) -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct((point["batch"], point["seq"]), "int32")
    batch = {name: jp.tag(shape, "batch", "seq") for name in ("tokens", "targets")}
    return {"make_model": make_llama(LlamaConfig(**point["model"])), "loss_fn": next_token_loss, "batch": batch}


def options(point: dict[str, Any]) -> dict[str, Any]:
    """Return the step options of a point: a 16-bit Llama sums in 16 bits, as when the points were compiled."""
    half = point.get("family") != "vit" and point["model"]["dtype"] == "bfloat16"
    return {"precision": {"reduce": "bf16"}} if half else {}


def _vit(point: dict[str, Any]) -> dict[str, Any]:
    config = ViTConfig(**point["model"])
    images = jax.ShapeDtypeStruct((point["batch"], config.image, config.image, config.channels), "float32")
    labels = jax.ShapeDtypeStruct((point["batch"],), "int32")
    batch = {"images": jp.tag(images, "batch", None, None, None), "labels": jp.tag(labels, "batch")}
    return {"make_model": make_vit(config), "loss_fn": vit_loss(config), "batch": batch}


def estimate_of(point: dict[str, Any]) -> Memory:
    """Return the estimate for one point on its topology."""
    given = inputs(point)
    given["layout"] = aim(given["layout"], Topology.parse(point["topology"]))
    memory = jp.explain(**given, step=options(point)).memory
    assert memory is not None
    return memory


def table(points: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the errors, in MiB on one device, and a line on their spread."""
    head = (
        "model",
        "remat",
        "layout",
        "topology",
        "tokens",
        "weights",
        "state",
        "activations",
        "estimate",
        "compiler",
        "error",
    )
    rows, errors = [], []
    for point in points:
        if "compiled" not in point:
            continue
        memory, peak = estimate_of(point), point["compiled"]["peak"]
        total = memory.total or 0
        errors.append(total / peak - 1)
        parts = memory.parts
        sums = (
            parts["parameters"] + parts["weight copies"],
            parts["optimizer"] + parts["gradients"] + parts["batch and rest"],
            parts["kept weights"] + parts["saved activations"] + parts["working"],
        )
        rows.append((*words(point), *(f"{n / 2**20:.0f}" for n in (*sums, total, peak)), f"{errors[-1]:+.1%}"))
    lines = [head, ("---",) * 5 + ("---:",) * 6, *rows]
    worst = sorted(errors, key=abs)
    mean = sum(map(abs, errors)) / max(len(errors), 1)
    inside = sum(abs(e) <= 0.1 for e in errors)
    note = (
        f"{len(errors)} points, {inside} of them within 10 %; mean error {mean:.1%}, largest {worst[-1]:+.1%}."
        if worst
        else ""
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note}\n"


def words(point: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells that describe a point."""
    layout = point["layout"] + "".join(f", {axis} {size}" for axis, size in point["mesh"].items())
    if point.get("family") == "vit":
        vit = ViTConfig(**point["model"])
        shape = f"ViT {vit.layers} × {vit.embed}/{vit.mlp}, {vit.heads} heads, {vit.classes} classes, {vit.dtype}"
        return shape, "none", layout, point["topology"], f"{point['batch']} × {(vit.image // vit.patch) ** 2}"
    model = LlamaConfig(**point["model"])
    shape = (
        f"{model.layers} × {model.embed}/{model.mlp}, {model.heads}/{model.kv_heads} × {model.head_dim}, {model.vocab}"
    )
    odd = [text for text, is_so in (("tied", model.tie_embeddings), (model.dtype, model.dtype != "bfloat16")) if is_so]
    odd += [f"stored {model.param_dtype}"] if model.param_dtype != "float32" else []
    tokens = f"{point['batch']} × {point['seq']}"
    return ", ".join((shape, *odd)), str(model.remat), layout, point["topology"], tokens


def compile_missing(file: Path, names: Sequence[str]) -> None:
    """Compile the points without figures, or those in ``names``, and write the figures into the file."""
    for name in [point["name"] for point in json.loads(file.read_text())["points"]]:
        data = json.loads(file.read_text())  # read again, because points may be added while this runs
        point = next((point for point in data["points"] if point["name"] == name), None)
        if point is None or (name not in names if names else "compiled" in point):
            continue
        try:
            program = jp.analysis.compile_for(point["topology"], **inputs(point), **options(point))
        except jp.errors.CompileError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        point["compiled"] = {key: program.memory[key] for key in ("argument", "output", "temp", "alias", "peak")}
        data["versions"] = program.versions
        write(file, data)
        print(f"{name}: {program.memory['peak'] / 2**20:.0f} MiB, {program.compile_cpu_seconds:.0f} CPU s", flush=True)


def write(file: Path, data: dict[str, Any]) -> None:
    """Write one point per line, and replace the file atomically."""
    points = ",\n  ".join(json.dumps(point) for point in data["points"])
    text = f'{{\n "versions": {json.dumps(data["versions"])},\n "points": [\n  {points}\n ]\n}}\n'
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        new.write(text)
    os.replace(new.name, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile the points without figures")
    parser.add_argument("--write", action="store_true", help="write the table into docs/measured/memory.md")
    parser.add_argument(
        "--points", type=Path, default=POINTS, metavar="FILE", help="JSON file of the points (default: %(default)s)"
    )
    parser.add_argument("names", nargs="*", help="only these points; --compile compiles them again")
    options = parser.parse_args()
    if options.compile:
        compile_missing(options.points, options.names)
    points = json.loads(options.points.read_text())["points"]
    text = table([point for point in points if not options.names or point["name"] in options.names])
    print(text, end="")
    if options.write:
        before, after = (
            DOCS.read_text(encoding="utf-8").split(MARKS[0])[0],
            DOCS.read_text(encoding="utf-8").split(MARKS[1])[1],
        )
        DOCS.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
