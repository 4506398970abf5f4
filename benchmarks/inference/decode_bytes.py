"""Bytes that a decode step holds, reads and sends, by mesh, batch and storage of weights and cache.

    uv run python benchmarks/inference/decode_bytes.py --topology v5e:4x4

Needs the TPU compiler (extra ``tpu``), but no TPU. Compiles and audits two layers of the 1B preset in bf16 with 2,048
slots. Without ``--topology`` it compiles for 16 simulated devices in fp32 (XLA:CPU sends 16-bit values as 32-bit ones),
which takes a tenth of the time.

The figures are totals over the two layers, the embedding and the head. ``weights`` and ``cache`` are bytes per device,
and a step reads each of them once. ``read a token`` is what all devices read, divided by the rows of the batch. There
is no goal: docs/measured/generate.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(16)

import jax
import jax.numpy as jnp

import jaxpar as jp
from benchmarks.shared.paths import LAYOUTS
from jaxpar.analysis.compile.ahead_of_time import compile_program
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.llama.decode import cached_llama
from jaxpar.sharding.hardware.topology import Topology

MESHES: dict[str, dict[str, int]] = {
    "data": {"data": -1},
    "model 2": {"data": -1, "model": 2},
    "model 4": {"data": -1, "model": 4},
    "model 8": {"data": -1, "model": 8},
    "model 16": {"data": -1, "model": 16},
    "context 2, model 4": {"data": -1, "context": 2, "model": 4},
    "pipeline 2, model 4": {"data": -1, "pipeline": 2, "model": 4},
    "pipeline 2, model 4, gathered": {"data": -1, "pipeline": 2, "model": 4},
}
KEPT: dict[str, dict[str, str]] = {
    "as computed": {},
    "int8 weights": {"weights": "int8"},
    "int8": {"weights": "int8", "cache": "int8"},
}


def compiled(name: str | None, layout: jp.Layout, model: jp.Generator) -> tuple[Any, int, float]:
    """Return the audit of a model's step, its temporary bytes, and the CPU seconds of the compiler."""
    if name is None:
        began = time.process_time()
        audit = jp.audit(model.decode.lower(model.prepared, model.abstract).compile(), mesh=layout.mesh)
        return audit, audit.memory["temp"], time.process_time() - began

    def step(state: Any, params: Any) -> Any:  # exported programs take no PRNG keys, and greedy decoding needs none
        keys = jax.vmap(jax.random.key)(jnp.zeros(model.batch, jnp.uint32))
        decode: Any = model.decode
        state, tokens = decode.__wrapped__(params, replace(state, keys=keys))
        return replace(state, keys=None), tokens

    state = replace(model.abstract, keys=None)
    leaves = len(jax.tree.leaves(state))
    found = compile_program(Topology.parse(name), layout, step, (state, model.prepared), donated=leaves)
    return jp.audit(found.as_text(), mesh=layout.mesh), found.memory["temp"], found.compile_cpu_seconds


def step_of(name: str | None, mesh: str, kept: str, batch: int, slots: int) -> dict[str, Any]:
    """Compile one step; return its figures."""
    config = preset("1b", layers=2, **({"dtype": "float32"} if name is None else {"param_dtype": "bfloat16"}))
    rules = jp.Layout.from_yaml(LAYOUTS / "tp.yaml", devices=2).rules.replace(vocab=("pipeline", "model"))
    spec = jp.MeshSpec(**MESHES[mesh])
    layout = jp.Layout(spec.build() if name is None else spec.on(name), rules)
    cached = cached_llama(config, **KEPT[kept])
    cached = replace(cached, stack=None) if mesh.endswith("gathered") else cached
    model = jp.Generator(layout, make_llama(config), cached, batch=batch, slots=slots)
    audit, temp, seconds = compiled(name, layout, model)
    totals = {part: model.explain().total(part).device_bytes for part in ("params", "cache")}
    wire: dict[str, float] = {}
    for one in audit.collectives:
        wire["+".join(one.axes)] = wire.get("+".join(one.axes), 0) + one.wire_bytes * one.count
    return {
        "mesh": mesh,
        "kept": kept,
        "batch": batch,
        "weights": totals["params"],
        "cache": totals["cache"],
        "temp": temp,
        "flops": audit.matmul_flops,
        "traffic": audit.hbm_bytes,
        "read a token": (totals["params"] + totals["cache"]) * layout.mesh.size / batch,
        "wire": audit.wire_bytes(),
        "wire a token": audit.wire_bytes() * layout.mesh.size / batch,
        "wire by axes": wire,
        "collectives": sum(one.count for one in audit.collectives),
        "cpu s": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--topology", help="compile for this topology, for example v5e:4x4 (default: 16 simulated devices)"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[16, 64, 256], help="rows{D}")
    parser.add_argument("--slots", type=int, default=2048, help="slots of the cache (default: %(default)s)")
    parser.add_argument("--mesh", nargs="*", choices=list(MESHES), default=list(MESHES), help="meshes (default: all)")
    parser.add_argument(
        "--kept", nargs="*", choices=list(KEPT), default=list(KEPT), help="types of weights and cache (default: all)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    arguments = parser.parse_args()
    rows = []
    mib = lambda count: f"{count / 2**20:.2f}"
    columns = ("weights", "cache", "temp", "traffic", "read a token", "wire", "wire a token")
    print(
        f"two layers of 1B, {arguments.slots} slots, {arguments.topology or '16 simulated devices'}; MiB a device "
        f"and step, MiB of all devices a token"
    )
    print(f"| mesh | kept | rows | {' | '.join(columns)} | MFLOPs | collectives | compile CPU s |")
    print(f"|{'---|' * (6 + len(columns))}")
    for mesh in arguments.mesh:
        for kept in arguments.kept:
            for batch in arguments.batch:
                row = step_of(arguments.topology, mesh, kept, batch, arguments.slots)
                rows.append(row)
                cells = [mesh, kept, str(batch), *(mib(row[name]) for name in columns)]
                cells += [f"{row['flops'] / 1e6:.0f}", f"{row['collectives']:g}", f"{row['cpu s']:.0f}"]
                print(f"| {' | '.join(cells)} |", row["wire by axes"], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
