"""Gradients of every pipeline schedule compared with those of one device, on the full grid of options.

    uv run python benchmarks/pipeline/gradient_errors.py

The grid is schedules × {pipeline only, with data and model axes (lockstep executor), with a data axis (independent
executor)} × {full, no activation checkpointing} × {even, uneven pieces}. It runs on eight simulated CPU devices in
fp32: a model of 16 layers that mix each token with its predecessors, 8 microbatches, and four stages (two with the
model axis). The error of a tensor is its largest difference relative to its largest entry. Prints the worst error of
loss and gradients. ``--embedding per_microbatch`` looks up embeddings in the ticks. Each schedule and mesh takes half a
CPU minute. The test suite runs a part of the grid (``tests/training/pipeline/test_gradients_pipelined.py``).

Goal: no error above 2e-6. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Literal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar as jp

GOAL = 2e-6
WIDTH, WORDS, LAYERS, ROWS, SEQ, MICROBATCHES = 8, 16, 16, 16, 8, 8
SCHEDULES = {
    **dict.fromkeys(("gpipe", "1f1b", "seq1f1b"), 1),
    **dict.fromkeys(("interleaved", "depth_first", "breadth_first"), 2),
    **dict.fromkeys(("zb_uniform", "zb_h1", "zb_h2"), 1),
    **dict.fromkeys(("zb_v", "dualpipe_v"), 2),
}
"""Schedule → chunks of the model on a stage."""
Executor = Literal["lockstep", "independent"]
MESHES: dict[str, tuple[dict[str, int], Executor]] = {
    "pipeline alone": ({"pipeline": 4}, "lockstep"),
    "x data x model": ({"pipeline": 2, "data": 2, "model": 2}, "lockstep"),
    "independent, x data": ({"pipeline": 4, "data": 2}, "independent"),
}
RULES = jp.Rules(
    batch="data",
    seq=None,
    embed=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)


def make_model(key: jax.Array) -> Any:
    a, b, c, d = jax.random.split(key, 4)
    return {
        "words": jp.tag(jax.random.normal(a, (WORDS, WIDTH)), "vocab", "embed"),
        "blocks": {
            "up": jp.tag(jax.random.normal(b, (LAYERS, WIDTH, 2 * WIDTH)) / 3, "layers", "embed", "mlp"),
            "down": jp.tag(jax.random.normal(c, (LAYERS, 2 * WIDTH, WIDTH)) / 22, "layers", "mlp", "embed"),
        },
        "head": jp.tag(jax.random.normal(d, (WIDTH, WORDS)) / 3, "embed", "vocab"),
    }


def mixed(block: Any, x: jax.Array, past: jax.Array, start: Any) -> jax.Array:
    """Add to each token the mean of those up to it; ``past`` holds all tokens, and ``x`` begins at ``start``."""
    place = start + jnp.arange(x.shape[1])[:, None]
    share = jnp.where(place >= jnp.arange(past.shape[1])[None], 1 / (1 + place), 0)
    mean = jnp.einsum("st,bte->bse", share, past)
    return x + jp.hint(jnp.tanh((x + mean) @ block["up"]), "batch", "seq", "mlp") @ block["down"]


def carried(block: Any, x: jax.Array, side: Any, carry: Any, chunk: jax.Array) -> tuple[jax.Array, Any]:
    start = chunk * x.shape[1]
    past = jax.lax.dynamic_update_slice_in_dim(carry["past"], x, start, 1)
    return mixed(block, x, past, start), {"past": past}


def after(model: Any, x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean loss over the targets that count, a number that differs between microbatches, and this weight.

    The head uses the embedding again.
    """
    logits = jp.hint(x @ (model["head"] + model["words"].T), "batch", "seq", "vocab")
    right = jax.nn.one_hot(batch["targets"], WORDS)
    counts = (batch["targets"] > 2).astype(jnp.float32)
    weight = jnp.sum(counts)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1)
    return jnp.sum(losses * counts) / jnp.maximum(weight, 1), {"weight": weight}


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: model["words"][batch["tokens"]],
    layer=lambda block, x, side: mixed(block, x, x, 0),
    head=after,
    dims=("batch", "seq", "embed"),
    chunked_layer=carried,
    chunk_carry=lambda model, batch: {"past": jnp.zeros((*batch["tokens"].shape, WIDTH))},
)


def one_step(sizes: dict[str, int], pipeline: jp.Pipeline | None) -> tuple[float, Any]:
    """Return loss and gradients of one step."""
    layout = jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]), RULES)
    batch = {
        name: jax.random.randint(jax.random.key(n), (ROWS, SEQ), 0, WORDS)
        for n, name in enumerate(("tokens", "targets"))
    }
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make_model, optax.sgd(0.1))
        step = jp.train_step(layout, LOSS, return_grads=True, pipeline=pipeline)
        compiled = step.lower(state, batch).compile(compiler_options={"xla_backend_optimization_level": 0})
        metrics = compiled(state, batch)[1]
    return float(metrics["loss"]), jax.device_get(metrics["grads"])


def pipeline_of(
    name: str, stages: int, executor: Executor, activation_checkpointing: Any, uneven: bool, embedding: Any
) -> jp.Pipeline:
    """Return the schedule's pipeline; with ``uneven`` its first piece has one more layer and its last one fewer."""
    chunks = SCHEDULES[name]
    cut = 4 if name == "seq1f1b" else 1
    schedule = jp.pipeline.schedule(name, stages=stages, microbatches=MICROBATCHES, chunks=chunks, sequence_chunks=cut)
    each = [LAYERS // (stages * chunks)] * (stages * chunks)
    each[0] += 1
    each[-1] -= 1
    return jp.Pipeline(
        schedule,
        activation_checkpointing=activation_checkpointing,
        executor=executor,
        layers_per_stage=tuple(each) if uneven else (),
        embedding=embedding,
    )


def apart(got: tuple[float, Any], want: tuple[float, Any]) -> float:
    """Return the largest of the relative errors of the loss and of each tensor."""
    errors = [abs(got[0] - want[0]) / abs(want[0])]
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        errors.append(float(np.abs(a - b).max() / np.abs(b).max()))
    return float(np.max(errors))  # not max(), which may drop a NaN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help="schedules, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--meshes", default=";".join(MESHES), help="meshes, separated by semicolons (default: %(default)s)"
    )
    parser.add_argument(
        "--embedding", default="per_step", choices=("per_step", "per_microbatch"), help="(default: %(default)s)"
    )
    options = parser.parse_args()
    want, missed, worst, cells = one_step({"data": 1}, None), 0, 0.0, 0
    ways = [
        (activation_checkpointing, uneven) for activation_checkpointing in ("full", "none") for uneven in (False, True)
    ]
    columns = "".join(
        f"{activation_checkpointing}, {'uneven' if uneven else 'even'}".rjust(19)
        for activation_checkpointing, uneven in ways
    )
    print(f"{'worst relative error':35}{columns}")
    for name in options.schedules.split(","):
        for told in options.meshes.split(";"):
            sizes, executor = MESHES[told]
            found = [
                apart(one_step(sizes, pipeline_of(name, sizes["pipeline"], executor, *way, options.embedding)), want)
                for way in ways
            ]
            missed += sum(not error <= GOAL for error in found)
            worst, cells = float(np.max([worst, *found])), cells + len(found)
            print(f"{name:15}{told:20}{''.join(f'{error:19.2g}' for error in found)}", flush=True)
            jax.clear_caches()
    print(f"{cells} programs; largest error {worst:.2g}; {missed} above {GOAL:g}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
