"""The searches of ``jp.plan`` side by side: strategies looked at, CPU seconds, and the estimated step of their choice.

    uv run python benchmarks/planning/searches.py

The models are the example Llama of 1B parameters, a GPT and a ResNet without a single name, each on 16 chips (v5e:4x4)
and on 256, with many and with few sequences. Nothing is compiled. All plans are estimated by the same closed form. A
propagation is given what a user of tensor parallelism would give: ``mlp`` over ``model``.

Goals: of the best plan on the mesh axes ``data`` and ``model``, that of dynamic programming takes at most 1.02 of the
estimated step, and that of the recursive search 1.25. Both take less than 10 CPU seconds, the trace included. Exit
status 1 otherwise.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxpar.app.plan import RunPlanner
from jaxpar.errors import PlanError
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.operators.choose import SEARCHES, SearchRequest, chosen_space
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import FULL
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology

GOALS, SECONDS = {"dynamic_programming": 1.02, "recursive": 1.25}, 10.0
CONFIG = Path(__file__).parents[2] / "configs" / "bench" / "1b_fsdp16.yaml"
LAYERS, WIDTH, HEADS, VOCAB, SEQ = 24, 2048, 16, 50304, 1024


class Block(nn.Module):
    """A layer of a GPT."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(hidden)


class GPT(nn.Module):
    """A GPT of 1.3B parameters, its layers one after the other; the head is the transposed table."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16)
        x = table(tokens) + nn.Embed(SEQ, WIDTH, dtype=jnp.bfloat16)(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS):
            x = Block()(x)
        return table.attend(nn.LayerNorm()(x))


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    channels: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.GroupNorm(32)(nn.Conv(self.channels, (1, 1), use_bias=False)(x)))
        y = nn.Conv(self.channels, (3, 3), (self.strides, self.strides), use_bias=False)(y)
        y = nn.Conv(4 * self.channels, (1, 1), use_bias=False)(nn.relu(nn.GroupNorm(32)(y)))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.channels, (1, 1), (self.strides, self.strides), use_bias=False)(x)
        return nn.relu(x + nn.GroupNorm(32)(y))


class ResNet50(nn.Module):
    """A ResNet-50 with group norms."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.Conv(64, (7, 7), (2, 2))(images), (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


def linen(model: nn.Module, batch: Mapping[str, jax.ShapeDtypeStruct]) -> ModelPlanner:
    """A planner of a Linen model that maps ``inputs`` to logits of ``targets``."""

    def make_model(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, *batch["inputs"].shape[1:]), batch["inputs"].dtype))["params"]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return ModelPlanner.of(make_model, loss_fn, dict(batch), optax.adamw(1e-3))


@dataclass(frozen=True)
class Case:
    """A model on a topology."""

    name: str
    topology: str
    workload: Workload
    space: Space
    trace: Callable[[], NamedProgram]
    given: Mapping[str, str] | None = None


def cases() -> Iterator[Case]:
    """The models, each with many and few sequences."""
    for topology, rows in (("v5e:4x4", 32), ("v5e:4x4", 4), ("v5e:16x16", 256)):
        run = RunPlanner(CONFIG, (f"data.batch={rows}",))
        yield Case(f"Llama 1B, {rows} rows", topology, run.workload, run.space(), run.trace, {"mlp": "model"})
        tokens = {name: jax.ShapeDtypeStruct((rows, SEQ), "int32") for name in ("inputs", "targets")}
        yield own(f"GPT 1.3B, {rows} rows", topology, linen(GPT(), tokens), {"mlp": "model"})
    images = {"inputs": jax.ShapeDtypeStruct((1024, 224, 224, 3), "bfloat16")}
    targets = {"targets": jax.ShapeDtypeStruct((1024,), "int32")}
    yield own("ResNet-50, 1,024 images", "v5e:4x4", linen(ResNet50(), images | targets))


def own(name: str, topology: str, planner: ModelPlanner, given: Mapping[str, str] | None = None) -> Case:
    """A case of a model without names."""
    space = Space(tensor=tensor_dims(planner.workload), sequence_parallel="seq" in planner.workload.sizes)
    return Case(name, topology, planner.workload, space, planner.trace, given)


def best(case: Case, space: Space, model: CostModel) -> tuple[float, Plan, int] | None:
    """The seconds of the best plan that fits, that plan, and how many there are."""
    every = list(plans(case.workload, model.topology.devices, space, Counter()))
    found = [(model.cost(p), i) for i, p in enumerate(every)]
    fits = [(c.step, i) for c, i in found if c.peak_bytes <= model.topology.accelerator.hbm_bytes * FULL]
    return (min(fits)[0], every[min(fits)[1]], len(every)) if fits else None


def main() -> int:
    failed = False
    for case in cases():
        topology = Topology.parse(case.topology)
        two = best(case, replace(case.space, axes=("data", "model")), CostModel(case.workload, topology))
        print(f"\n{case.name} on {case.topology}")
        print("| search | strategies | plans | CPU s | estimated step | of the best on two axes | plan |")
        print("|---|---:|---:|---:|---:|---:|---|")
        for name in (n for n in SEARCHES if case.given or n != "sharding_propagation"):
            start = time.process_time()
            model = CostModel(case.workload, topology)
            request = SearchRequest(name, (case.given or {}) if name == "sharding_propagation" else {})
            try:
                chosen = chosen_space(request, case.trace, model, case.space)
            except PlanError as error:
                print(f"| `{name}` | | | | {error} | | |")
                continue
            found = best(case, chosen.space, model)
            took = time.process_time() - start
            failed |= name in GOALS and took > SECONDS
            if found is None or two is None:
                print(f"| `{name}` | | | {took:.2f} | nothing fits | | |")
                continue
            looked = chosen.notes[0].split()[2] if name != "enumerate" else "–"
            ratio = found[0] / two[0]
            failed |= ratio > GOALS.get(name, ratio)
            shards = f" ({', '.join(found[1].tensor)})" if found[1].tensor else ""
            print(
                f"| `{name}` | {looked} | {found[2]:,} | {took:.2f} | {found[0] * 1e3:.1f} ms | {ratio:.2f} | "
                f"{found[1].describe()}{shards} |"
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
