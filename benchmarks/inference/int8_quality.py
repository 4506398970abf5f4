"""The quality that int8 weights and an int8 cache cost: held-out loss and agreement of greedy tokens.

    uv run python benchmarks/inference/int8_quality.py --checkpoint runs/resume/checkpoints

The trained model of the quickstart reads held-out text token by token through its cache: in fp32, with int8 weights,
with an int8 cache, and with both. Prints the held-out losses on the same tokens, and the fraction of greedy tokens that
agree with fp32, both in continuations of prompts and where each token is predicted from the same text.

Goal: no loss more than ``--bound`` nats above that of fp32. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpar.utils.simulate_devices import simulate_devices

simulate_devices(1)

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar as jp
from benchmarks.shared.paths import CONFIGS, LAYOUTS
from jaxpar.app.config import load_run
from jaxpar.app.generate.generate import restored
from jaxpar.app.job import make_job
from jaxpar.data import eval_batches, load_text
from jaxpar.models.llama.decode import cached_llama

KEPT: dict[str, dict[str, str]] = {
    "fp32": {},
    "int8 weights": {"weights": "int8"},
    "int8 cache": {"cache": "int8"},
    "int8 both": {"weights": "int8", "cache": "int8"},
}


def read_through(model: jp.Generator, params: Any, batch: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """Read a batch token by token through the cache; return the mean loss, and the likeliest tokens [batch, seq]."""

    @jax.jit
    def run(params: Any, tokens_BS: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole = model._state.metadata.kind.merge(params, {})
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.abstract.cache)

        def one(cache: Any, given: Any) -> tuple[Any, Any]:
            at, tokens_B, targets_B = given
            x, cache = model.cached.step(whole, tokens_B, jnp.full_like(tokens_B, at), cache)
            z_BV = jax.nn.log_softmax(model.cached.logits(whole, x))
            loss_B = -jnp.take_along_axis(z_BV, targets_B[:, None], 1)[:, 0]
            return cache, (loss_B.mean(), jnp.argmax(z_BV, -1))

        numbers = jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)
        _, (losses, likeliest) = jax.lax.scan(one, empty, (numbers, tokens_BS.T, targets_BS.T))
        return losses.mean(), likeliest.T

    with model.layout:
        loss, likeliest = run(params, jnp.asarray(batch["tokens"]), jnp.asarray(batch["targets"]))
    return float(loss), np.asarray(likeliest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        type=Path,
        default=CONFIGS / "recipes" / "resume.yaml",
        help="configuration of the trained model (default: %(default)s)",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--batches", type=int, default=8, help="batches of held-out text (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument(
        "--bound",
        type=float,
        default=0.005,
        help="goal: largest increase of the loss in nats per token (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures into this file")
    arguments = parser.parse_args()
    one = ("cpu_devices=1", f"layout={LAYOUTS / 'dp.yaml'}")
    job = make_job(load_run(arguments.config, one))
    data, layout = job.config.data, job.layout()
    layout = replace(layout, rules=layout.rules.replace(cache_seq=None))
    text = load_text(data.source, seed=data.seed)
    held = eval_batches(text.heldout, batch=data.batch, seq=data.seq, max_batches=arguments.batches)
    batch = {name: np.concatenate([each[name] for each in held]) for name in ("tokens", "targets")}
    rows = batch["tokens"].shape[0]
    prompts = batch["tokens"][:, : arguments.prompt].tolist()
    found: dict[str, dict[str, float]] = {}
    likeliest, made, trained = {}, {}, None
    for name, kept in KEPT.items():
        model = jp.Generator(layout, job.make_model, cached_llama(job.llama, **kept), batch=rows, slots=data.seq)
        trained = restored(arguments.checkpoint, model.params, print)[0] if trained is None else trained
        params = model.prepare(trained)
        loss, likeliest[name] = read_through(model, params, batch)
        made[name] = np.array(model.generate(params, prompts, most=data.seq - arguments.prompt))
        parted = [
            next((i for i, same in enumerate(a == b) if not same), len(a))
            for a, b in zip(made[name], made["fp32"], strict=True)
        ]
        totals = {part: model.explain().total(part).bytes for part in ("params", "cache")}
        found[name] = {
            "loss": round(loss, 5),
            "over fp32": round(loss - found["fp32"]["loss"], 5) if found else 0.0,
            "same likeliest": round(float((likeliest[name] == likeliest["fp32"]).mean()), 4),
            "same tokens": round(float((made[name] == made["fp32"]).mean()), 4),
            "median tokens before the first difference": float(np.median(parted)),
            **{f"{part} bytes": size for part, size in totals.items()},
        }
        print(name, found[name], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["over fp32"] <= arguments.bound for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
