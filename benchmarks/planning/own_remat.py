"""Recomputation policies of a GPT that knows nothing of jaxpar: time and memory as estimated, and as compiled.

    uv run python benchmarks/planning/own_remat.py scan none dots full   # or: list; extra tpu

The layers are scanned, or in a list. The step is FSDP on v5e:2x4, 16 rows of 1,024 tokens. Goals: the estimated step
and peak are within 0.8 and 1.25 of those of the compiled program. Exit status 1 otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.compiled import compile_plan
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.sharding.hardware.topology import Topology

EMBED, HEADS, MLP, VOCAB, SEQ, LAYERS, ROWS = 1024, 8, 4096, 16384, 1024, 8, 16
TOPOLOGY = Topology.parse("v5e:2x4")


class Block(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs):
        options: dict[str, Any] = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.norm1, self.norm2 = nnx.LayerNorm(EMBED, **options), nnx.LayerNorm(EMBED, **options)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, **options)
        self.up, self.down = nnx.Linear(EMBED, MLP, **options), nnx.Linear(MLP, EMBED, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run one layer."""
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(jnp.zeros(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """A decoder whose layers are scanned, or in a list."""

    def __init__(self, rngs: nnx.Rngs, *, scanned: bool):
        options: dict[str, Any] = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.tokens, self.norm = nnx.Embed(VOCAB, EMBED, **options), nnx.LayerNorm(EMBED, **options)
        self.head, self.scanned = nnx.Linear(EMBED, VOCAB, use_bias=False, **options), scanned
        if scanned:
            self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)
        else:
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Compute the logits."""
        x = self.tokens(tokens)
        if self.scanned:
            layer = lambda x, block: block(x)
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model: GPT, batch: Any) -> jax.Array:
    """The entropy of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()


def planner(layers: str) -> ModelPlanner:
    """Returns the planner of the GPT whose layers are in a ``scan`` or a ``list``."""
    batch = {name: jax.ShapeDtypeStruct((ROWS, SEQ), "int32") for name in ("tokens", "targets")}
    make_model = lambda key: GPT(nnx.Rngs(key), scanned=layers == "scan")
    return ModelPlanner.of(make_model, loss_fn, batch, optax.adamw(1e-3))


def main(layers: str, *policies: str) -> int:
    """Print a row for each policy."""
    run = planner(layers)
    model, near = CostModel(run.workload, TOPOLOGY), True
    print("| layers | remat | step, estimated | compiled | peak, estimated | compiled |\n|---|---|---:|---:|---:|---:|")
    for policy in policies:
        plan = Plan(data=TOPOLOGY.devices, zero=3, remat=policy)
        cost, found = model.cost(plan), compile_plan(run.run_of(plan), TOPOLOGY)
        cells = (f"{1e3 * cost.step:.1f} ms", f"{1e3 * found.step:.1f} ms")
        peaks = (f"{cost.peak_bytes / 2**30:.2f} GiB", f"{found.peak_bytes / 2**30:.2f} GiB")
        print(f"| {layers} | {policy} | {' | '.join((*cells, *peaks))} |", flush=True)
        pairs = ((cost.step, found.step), (cost.peak_bytes, found.peak_bytes))
        near &= all(0.8 <= estimated / known <= 1.25 for estimated, known in pairs)
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
