"""Draw the picture of the README: a layout, a schedule and an audit, from the same calls that a user makes.

    uv run python docs/draw_overview.py

It writes docs/pictures/overview.png. Nothing in it is drawn by hand: the blocks come from the rules, the bars of the
schedule from its simulation, and the bytes from the compiled program of one training step on 8 simulated devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jaxpar as jp
from jaxpar.models import make_llama, next_token_loss, preset

FILE = Path(__file__).parent / "pictures" / "overview.png"
BLUE, GREEN, ORANGE = "#4477aa", "#77aa88", "#dd8855"
LAYOUT = Path(__file__).parents[1] / "configs" / "layouts" / "fsdp_tp.yaml"


def draw_layout(ax: Any, layout: jp.Layout) -> None:
    """The blocks of one weight, the devices that hold them, and the rules that say so."""
    report = jp.explain(layout, make_llama(preset("tiny")), optax.adamw(1e-3))
    row = next(row for row in report.rows if row.path == "params/blocks/mlp/gate")
    jp.analysis.draw_shards(layout, *row.dims[1:], shape=row.shape[1:], role="params", path=row.path, ax=ax)
    for text in list(ax.texts):
        if "shards of" in text.get_text():
            text.remove()
    ax.set_title("Every tensor: where, and why", loc="left", fontsize=11, fontweight="bold", pad=42)
    reason = f"{row.path}, {row.device_bytes:,} bytes a device\nrules: " + "; ".join(row.rules)
    ax.text(0, 1.03, reason, transform=ax.transAxes, fontsize=8.5, va="bottom", family="monospace")


def draw_schedule(ax: Any) -> None:
    """A pipeline schedule, simulated."""
    schedule = jp.pipeline.schedule("1f1b", stages=4, microbatches=8)
    found = jp.pipeline.simulate(schedule, {"F": 1, "B": 2}, timing="stages")
    for stage, spans in enumerate(found.spans):
        for span in spans:
            color = BLUE if span.op.kind == "F" else GREEN
            width = span.end - span.start
            ax.broken_barh([(span.start, width)], (stage - 0.45, 0.9), facecolor=color, edgecolor="white")
            ax.text(span.start + width / 2, stage, span.op.microbatch, ha="center", va="center", color="w", fontsize=7)
    ax.set(yticks=range(4), yticklabels=[f"stage {n}" for n in range(4)], xticks=[], xlim=(0, found.time))
    ax.invert_yaxis()
    ax.spines[["top", "right", "bottom", "left"]].set_visible(False)
    ax.tick_params(length=0)
    ax.set_title("Every schedule: checked and simulated", loc="left", fontsize=11, fontweight="bold", pad=42)
    told = f"1f1b, 8 microbatches, forward blue, backward green\nbubble {found.bubble:.0%} of the time"
    ax.text(0, 1.03, told, transform=ax.transAxes, fontsize=8.5, va="bottom", family="monospace")


def audited(layout: jp.Layout) -> jp.analysis.Audit:
    """What the compiled step of a small Llama sends."""
    state = jp.abstract_state(layout, make_llama(preset("tiny")), optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((32, 128), jnp.int32, sharding=layout.sharding(("batch", "seq"), (32, 128)))
    batch = {"tokens": tokens, "targets": tokens}
    return jp.audit(jp.train_step(layout, next_token_loss).lower(state, batch).compile(), mesh=layout.mesh)


def draw_audit(ax: Any, audit: Any) -> None:
    """The bytes that one device sends in one step, by mesh axis and kind."""
    sums: dict[tuple[str, str], float] = {}
    for one in audit.collectives:
        key = (" × ".join(one.axes), one.kind)
        sums[key] = sums.get(key, 0) + one.total_wire_bytes / 2**20
    rows = sorted(sums.items(), key=lambda item: -item[1])[:6]
    ax.barh(range(len(rows)), [size for _, size in rows], color=ORANGE, height=0.7)
    for n, (_, size) in enumerate(rows):
        ax.text(size, n, f" {size:.2f} MiB", va="center", fontsize=8)
    ax.set(yticks=range(len(rows)), yticklabels=[f"{kind}\nover {axes}" for (axes, kind), _ in rows], xticks=[])
    ax.set_xlim(0, 1.3 * max(size for _, size in rows))
    ax.tick_params(axis="y", length=0, labelsize=8)
    ax.invert_yaxis()
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.set_title("Every byte: counted in the program", loc="left", fontsize=11, fontweight="bold", pad=42)
    told = f"one step of a small Llama, data 4 × model 2\n{audit.matmul_flops / 1e9:.2f} GFLOP a device"
    ax.text(0, 1.03, told, transform=ax.transAxes, fontsize=8.5, va="bottom", family="monospace")


def main() -> None:
    """Draws the picture and writes the file."""
    jp.simulate_devices(8)
    layout = jp.Layout.from_yaml(LAYOUT)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained", width_ratios=[1, 1.25, 1])
    draw_layout(axes[0], layout)
    draw_schedule(axes[1])
    draw_audit(axes[2], audited(layout))
    figure.savefig(FILE, dpi=110, facecolor="white", metadata={"Software": None})
    print(f"wrote {FILE.relative_to(Path(__file__).parents[1])}, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
