"""Whether plans shard the sequence of a model that nobody wrote for jaxpar, and that such plans train."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans
from jaxpar.training.model import leaves_with_paths, show
from tests.planning.names import models

HEADS, EMBED, VOCAB = 4, 16, 32
TEXT = {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("tokens", "targets")}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, calls: bool):
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, dropout_rate=0.0, rngs=rngs)
        self.up, self.down = nnx.Linear(EMBED, 32, rngs=rngs), nnx.Linear(32, EMBED, rngs=rngs)
        self.calls = calls

    def __call__(self, x: jax.Array) -> jax.Array:
        a = self.attention
        y = a.out(jp.attention(a.query(x), a.key(x), a.value(x))) if self.calls else a(x)
        return x + self.down(nnx.gelu(self.up(x + y)))


class Decoder(nnx.Module):
    """Its first layers call jp.attention, the others that of Flax, which is not causal."""

    def __init__(self, rngs: nnx.Rngs, calls: tuple[bool, ...]):
        self.table, self.head = nnx.Embed(VOCAB, EMBED, rngs=rngs), nnx.Linear(EMBED, VOCAB, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, call) for call in calls])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def planner(*calls: bool, annotated: bool = True) -> ModelPlanner:
    make_model = lambda key: Decoder(nnx.Rngs(key), calls)
    found = ModelPlanner.of(make_model, models.text_loss, TEXT, optax.sgd(0.1))
    return found if annotated else ModelPlanner(found.make_model, models.text_loss, found.batch, found.tx, False)


def _about_attention(found: ModelPlanner) -> list[str]:
    return [note for note in found.notes if "attention" in note]


@pytest.mark.slow
def test_attention_that_is_recognised_or_called_may_be_split() -> None:
    for calls in ((True, True), (True, False), (False, False)):
        found = planner(*calls)
        assert found.axes == ("replica", "data", "context", "ulysses", "model") and _about_attention(found) == []
        assert found.workload.causal is all(calls) and not found.workload.flash
    assert planner(True, True, annotated=False).axes == ("replica", "data", "context", "ulysses", "model")


@pytest.mark.slow
def test_attention_that_would_gather_is_reported() -> None:
    found = planner(True, False, False, annotated=False)
    (note,) = _about_attention(found)
    assert found.axes == ("replica", "data", "model")
    assert note == (
        "left out: context and ulysses, because 2 of 3 attentions would gather the sequence; to shard it, call "
        "jp.attention"
    )
    make_model, loss_fn, batch = models.experts()
    assert ModelPlanner.of(make_model, loss_fn, batch, optax.sgd(0.1)).axes == ("replica", "data", "model")


@pytest.mark.slow
def test_no_plan_shards_the_sequence_where_each_device_has_gradients_of_its_own_rows() -> None:
    work = planner(True, True).workload
    space = Space(axes=("data", "context"), remat=("none",), own_model=True)
    every = [plan for plan in plans(work, 8, space, Counter()) if plan.context > 1]
    assert {(plan.zero, plan.grad_accum_steps > 1) for plan in every} == {(0, False), (3, False), (3, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, context=2, ulysses=2, zero=3, remat="full"),
        Plan(data=2, context=4, remat="none"),
        Plan(data=2, ulysses=2, model=2, tensor=("mlp",), zero=3, remat="dots"),
    ],
    ids=Plan.describe,
)
def test_such_a_plan_computes_what_one_device_does(plan: Plan) -> None:
    own, rng = planner(True, False), np.random.default_rng(0)
    batch: Any = {name: rng.integers(0, VOCAB, x.shape, dtype=np.int32) for name, x in TEXT.items()}
    run, (layout, _) = own.run_of(plan), plan.layout(own.workload.names)
    state = jp.init(layout, run.make_model, run.tx)
    step = jp.train_step(layout, run.loss_fn, return_grads=True, donate=False, **run.options)
    compiled = step.lower(state, batch).compile()
    text = compiled.as_text() or ""
    assert "all-to-all" in text or "collective-permute" in text  # as the implementation that auto picks
    _, metrics = compiled(state, batch)
    with jp.unsharded():
        loss, grads = jax.jit(jax.value_and_grad(models.text_loss))(state.model, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    largest = lambda x: np.abs(np.asarray(x)).max()
    most = max(map(largest, jax.tree.leaves(grads)))
    for (path, g), (_, expected) in zip(leaves_with_paths(metrics["grads"]), leaves_with_paths(grads), strict=True):
        assert largest(g - expected) <= 1e-5 * max(largest(expected), 1e-2 * most), show(path)
