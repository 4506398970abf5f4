"""The held-out loss of the trained quickstart with quantized and with pruned weights, after training and fine-tuned.

    uv run jaxpar train configs/quickstart.yaml --set checkpoint.save_interval_steps=400
    uv run python benchmarks/compression/accuracy.py --checkpoint runs/quickstart/checkpoints

Every fine-tuned row starts from the checkpoint and takes the same steps on the same batches; ``fp32, fine-tuned`` is
the reference of these rows. Runs on one device.

Goal: int8 costs at most ``--bound`` nats, and int4 in groups of 32 costs less with rounded training than without, each
next to its reference. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(1)

import jax
import numpy as np
import optax

import jaxpar as jp
from benchmarks.shared.paths import CONFIGS, LAYOUTS
from jaxpar.app.config import load_run
from jaxpar.app.generate.generate import restored
from jaxpar.app.job import Job, make_job
from jaxpar.compression import PruneConfig, bytes_of, dequantize, prune, quantize, quantize_aware
from jaxpar.data import eval_batches, load_text
from jaxpar.models.llama.decode import quantized_weights
from jaxpar.training.from_params import state_from_params
from jaxpar.utils.plotting import new_figure

LAYERS = ("blocks/attention/*", "blocks/mlp/*")
AXIS = {"attention/q": -3, "attention/k": -3, "attention/v": -3}
HALF = PruneConfig(sparsity=0.5, targets=LAYERS)
TWO_OF_FOUR = PruneConfig(pattern=(2, 4), targets=LAYERS, axis=AXIS)


@dataclass(frozen=True)
class Study:
    """A trained model, with the data to measure and to fine-tune it."""

    job: Job
    layout: jp.Layout
    params: Any
    held: list[dict[str, np.ndarray]]
    more: list[dict[str, np.ndarray]]

    def loss(self, params: Any) -> float:
        """The mean held-out loss of parameters, in nats per token."""
        state = state_from_params(self.layout, self.job.make_model, optax.identity(), self.copy(params))
        step = jp.eval_step(self.layout, self.job.eval_loss_fn)
        return float(np.mean([step(state, batch)["loss"] for batch in self.held]))

    def tuned(self, make_model: Any, tx: Any) -> Any:
        """The parameters after the fine-tuning."""
        state = state_from_params(self.layout, make_model, tx, self.copy(self.params))
        step = jp.train_step(self.layout, self.job.loss_fn, clip_norm=1.0)
        for batch in self.more:
            state, _ = step(state, batch)
        return state.params

    def pruned(self, config: PruneConfig) -> Any:
        """The parameters with their smallest numbers at zero."""
        tx = prune(optax.sgd(0.0), config)
        changes, _ = jax.jit(tx.update)(self.params, tx.init(self.params), self.params)
        return optax.apply_updates(self.params, changes)

    def copy(self, params: Any) -> Any:
        return jax.tree.map(lambda x: x.copy(), params)


def rows(study: Study, rate: float) -> dict[str, tuple[float, int]]:
    """Returns the loss and the bytes of each kind of weights."""
    found: dict[str, tuple[float, int]] = {}
    make_model, config = study.job.make_model, study.job.llama
    steps = len(study.more)
    tx = lambda: optax.adamw(optax.linear_schedule(rate, 0.1 * rate, steps), b2=0.95, weight_decay=0.1)

    def add(name: str, params: Any) -> None:
        floats = jax.tree.map(lambda w: w.astype("float32"), dequantize(params, "float32"))
        found[name] = study.loss(floats), bytes_of(params)
        print(f"{name}: {found[name][0]:.4f} nats, {found[name][1]:,} bytes", flush=True)

    ways = {
        "int8 per channel": quantized_weights(config, 8),
        "int4 in groups of 32": quantized_weights(config, 4, 32),
        "int4 in groups of 64": quantized_weights(config, 4, 64),
        "int4 per channel": quantized_weights(config, 4),
    }
    add("fp32", study.params)
    add("bf16", jax.tree.map(lambda w: w.astype("bfloat16"), study.params))
    for name, how in ways.items():
        add(name, quantize(study.params, how))
    add("50 % pruned", study.pruned(HALF))
    add("2 of 4 pruned", study.pruned(TWO_OF_FOUR))
    if not steps:
        return found
    add("fp32, fine-tuned", study.tuned(make_model, tx()))
    aware = ways["int4 in groups of 32"]
    add("int4 in groups of 32, trained rounded", quantize(study.tuned(quantize_aware(make_model, aware), tx()), aware))
    add("2 of 4 pruned, fine-tuned", study.tuned(make_model, prune(tx(), TWO_OF_FOUR)))
    add("50 % pruned, fine-tuned", study.tuned(make_model, prune(tx(), HALF)))
    return found


def draw(found: dict[str, tuple[float, int]], file: Path) -> None:
    """Draws the losses as bars, those of fine-tuned rows in another color."""
    figure = new_figure("the picture of this benchmark", figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(found)[::-1]
    losses = [found[name][0] for name in names]
    colors = ["tab:orange" if "tuned" in name or "trained" in name else "tab:blue" for name in names]
    axes.barh(names, losses, color=colors)
    for at, loss in enumerate(losses):
        axes.text(loss, at, f" {loss:.4f}", va="center", fontsize=8)
    axes.set_xlim(min(losses) * 0.97, max(losses) * 1.02)
    axes.set_xlabel("held-out loss (nats per token); orange: fine-tuned")
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGS / "quickstart.yaml")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--batches", type=int, default=8, help="batches of held-out text (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each fine-tuning (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4, help="their first learning rate (default: %(default)s)")
    parser.add_argument("--bound", type=float, default=0.005, help="goal for int8, in nats (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw them into this file")
    arguments = parser.parse_args()
    job = make_job(load_run(arguments.config, ("cpu_devices=1", f"layout={LAYOUTS / 'dp.yaml'}")))
    data, layout = job.config.data, job.layout()
    text = load_text(data.source, seed=data.seed)
    held = eval_batches(text.heldout, batch=data.batch, seq=data.seq, max_batches=arguments.batches)
    stream = jp.data.batches(text.train, batch=data.batch, seq=data.seq, seed=data.seed + 1)
    more = [batch for _, batch in zip(range(arguments.steps), stream, strict=False)]
    like = jp.abstract_state(layout, job.make_model, optax.identity()).params
    params, _ = restored(arguments.checkpoint, like, print)
    found = rows(Study(replace(job), layout, params, held, more), arguments.rate)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.picture is not None:
        draw(found, arguments.picture)
    over = {name: loss - found["fp32"][0] for name, (loss, _) in found.items()}
    met = over["int8 per channel"] <= arguments.bound
    if "fp32, fine-tuned" in found:
        aware = found["int4 in groups of 32, trained rounded"][0] - found["fp32, fine-tuned"][0]
        met = met and aware < over["int4 in groups of 32"]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
