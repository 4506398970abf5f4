"""Custom orders, drawn at random with random sizes: the executor against one device, values and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from one_step import check_same, layout_of, one_step
from profiles import examples, few
from random_orders import orders_of_ones_own

import jaxpar as jp
from jaxpar.parallel.pipeline.executor.program import GLOBAL_FIELDS, PipelineProgram
from jaxpar.parallel.pipeline.executor.run import run
from jaxpar.parallel.pipeline.executor.tick_context import TickContext
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.table import _BUFFERS, CHANNELS, FIELDS, ActivationCheckpointing, Table
from jaxpar.sharding.layout import tracing_under

MOST, WIDTH, ROWS = 4, 6, 2
"""The most microbatches, the width, and the rows of each microbatch."""
CASES: list[tuple[int, int, str, ActivationCheckpointing]] = [
    (2, 2, "FBW", "none"),
    (3, 1, "FB", "full"),
    (4, 2, "FB", "none"),
]
"""Stages, chunks, kinds of operations, and what is kept. Each case is one program, which takes tables as arrays."""


@dataclass(frozen=True)
class Given(PipelineProgram):
    """A program that receives its table at run time, with fixed maximal microbatches, ticks and slots."""

    numbers: tuple[Any, Any] = (None, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        slots, stages = MOST * self.schedule.pieces.chunks, self.schedule.stages
        sizes, nowhere = dict.fromkeys(self.table.sizes, slots), np.full(stages, slots, np.int32)
        table = Table(self.table.stages, self.table.ticks, (nowhere, 0), MOST, sizes, CHANNELS)
        object.__setattr__(self, "table", table)

    def rows(self) -> Any:
        return self.numbers

    def active_ticks(self, name: str) -> tuple[int, int]:
        return 1, 1


def layer(weights: jax.Array, x: jax.Array, side: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ weights + side)


def head(after: jax.Array, piece: Any, y: jax.Array) -> Any:
    """The sum of squares with its gradient, and the cotangent of ``y``."""
    loss = lambda after, y: jnp.sum((y @ after - piece["wanted"]) ** 2)
    value, (grad, cotangent) = jax.value_and_grad(loss, (0, 1))(after, y)
    return (value, grad), (cotangent, jnp.ones(2))


def numbers_of(
    schedule: Schedule, activation_checkpointing: ActivationCheckpointing, ticks: int
) -> tuple[np.ndarray, np.ndarray]:
    """A schedule's table, padded to ``ticks`` ticks and more slots.

    The first microbatch is fed in a tick before all others; the last one leaves in a tick after them.
    """
    program = PipelineProgram(schedule, layer, lambda piece: piece, head, (), activation_checkpointing)
    (rows, global_rows), table = program.rows(), program.table
    found = np.zeros((ticks, *rows.shape[1:]), np.int32)
    length, before, behind = len(rows), found[0], found[len(rows) + 1]
    found[1 : length + 1] = rows
    for at, name in enumerate(FIELDS):
        size = table.sizes.get(_BUFFERS.get(name[2:], name[:3]))
        if size is not None:
            nowhere = MOST * schedule.pieces.chunks
            found[[0, *range(length + 1, ticks)], :, at] = nowhere
            before[:, at] = np.where(table.first[0] == size, nowhere, table.first[0]) if name == "act_feed" else nowhere
            found[1 : length + 1, :, at] = np.where(rows[:, :, at] == size, nowhere, rows[:, :, at])
    behind[:, len(FIELDS)] = table.column("b_first")[-1]
    all_ = np.zeros((ticks, global_rows.shape[1]), np.int32)
    all_[1 : length + 1] = global_rows
    all_[0, [GLOBAL_FIELDS.index("feed"), GLOBAL_FIELDS.index("feeds")]] = table.first[1], 1
    all_[length + 1, [GLOBAL_FIELDS.index("drain"), GLOBAL_FIELDS.index("drains")]] = (
        table.last,
        table.last < schedule.microbatches,
    )
    return found, all_


@functools.cache
def pipelined(
    stages: int, chunks: int, kinds: str, activation_checkpointing: ActivationCheckpointing
) -> Callable[..., Any]:
    """The executor's gradients of weights [stages, 1, chunks, 1, ...], the sums, and the cotangents of ``x``."""
    layout = jp.Layout(jp.MeshSpec(pipeline=stages).build(jax.devices()[:stages]), jp.Rules(batch=None))
    order = [
        f"{kind}{m}.{c}" for kind in kinds for c in range(chunks)[:: 1 if kind == "F" else -1] for m in range(MOST)
    ]
    like = jp.pipeline.schedule([" ".join(order)] * stages, stages=stages, microbatches=MOST, chunks=chunks)

    def pipe(numbers: Any, weights: jax.Array, after: jax.Array, x: jax.Array, pieces: Any) -> Any:
        with tracing_under(layout):
            program = Given(
                like, layer, lambda piece, read: piece["side"], head, (), activation_checkpointing, numbers=numbers
            )
            return run(TickContext.of(program, x, weights, after, pieces), x)

    everywhere = jax.NamedSharding(layout.mesh, jax.P())
    return jax.jit(pipe, in_shardings=everywhere, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def alone() -> Callable[..., Any]:
    """The same on one device, with weights in the order of the model [pieces, ...]."""

    def loss(weights: jax.Array, after: jax.Array, x: jax.Array, pieces: Any, there: jax.Array) -> jax.Array:
        def one(x: jax.Array, piece: Any) -> jax.Array:
            y, _ = jax.lax.scan(lambda x, w: (layer(w, x, piece["side"]), None), x, weights)
            return jnp.sum((y @ after - piece["wanted"]) ** 2)

        return jnp.sum(jnp.where(there, jax.vmap(one)(x, pieces), 0))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


@pytest.mark.parametrize("case", few(CASES, 1), ids=str)
def test_any_order_gives_the_gradients_of_one_device(case: tuple[int, int, str, ActivationCheckpointing]) -> None:
    stages, chunks, kinds, activation_checkpointing = case

    @examples(25)
    @given(orders_of_ones_own([stages], [chunks], [1], [kinds]), st.integers(0, 99))
    def check(drawn: tuple[Any, dict[str, Any]], seed: int) -> None:
        orders, sizes = drawn
        one, dice = jp.pipeline.schedule(orders, **sizes), np.random.default_rng(seed)
        draw = lambda *shape: dice.normal(size=shape).astype(np.float32)
        weights, after = draw(stages * chunks, WIDTH, WIDTH) / 3, draw(WIDTH, WIDTH) / 3
        x, pieces = draw(MOST, ROWS, WIDTH), {"side": draw(MOST, ROWS, 1), "wanted": draw(MOST, ROWS, WIDTH)}
        at = np.array([[one.pieces.piece(stage, chunk) for chunk in range(chunks)] for stage in range(stages)])
        numbers = numbers_of(one, activation_checkpointing, len(kinds) * MOST * stages * chunks + 2)
        mine = jax.tree.map(lambda x: x[None], (x, pieces))
        grads, sums, back = jax.device_get(pipelined(*case)(numbers, weights[at][:, :, None], after, *mine))
        there = np.arange(MOST) < one.microbatches
        value, wanted = jax.device_get(alone()(weights, after, x, pieces, there))
        got = grads[:, 0, :, 0], sums[1][0], back[0][there]
        assert abs(sums[0][0] - value) <= 2e-6 * abs(value)
        for mine, other in zip(got, (wanted[0][at], wanted[1], wanted[2][there]), strict=True):
            assert np.abs(mine - other).max() <= 4e-6 * np.abs(other).max()

    check()


RULES = jp.Rules(batch="data", embed=None, layers="pipeline", params={"embed": "data"})
LOSS = jp.pipeline.PipelineLoss(
    layers="blocks",
    embed=lambda model, batch: batch["x"],
    layer=layer,
    head=lambda model, x, batch: jnp.mean((x @ model["head"] - batch["wanted"]) ** 2),
    layer_inputs=lambda model, batch: batch["side"],
)


def make_model(key: jax.Array) -> Any:
    numbers = lambda *shape: jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) ** 1.5).reshape(shape) / 3
    return {
        "blocks": jp.tag(numbers(4, WIDTH, WIDTH), "layers", "embed", None),
        "head": jp.tag(numbers(WIDTH, WIDTH), "embed", None),
    }


@functools.cache
def batch_of() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(0)
    return {
        name: dice.normal(size=(24, width)).astype(np.float32) for name, width in (("x", 6), ("wanted", 6), ("side", 1))
    }


# Every example compiles a program, and so would every attempt to shrink a failure.
@pytest.mark.slow
@examples(2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(orders_of_ones_own([2], [1, 2], [1], ["FB", "FBW"]), st.sampled_from(["full", "none"]))
def test_a_step_in_any_order_is_that_of_one_device(
    drawn: tuple[Any, dict[str, Any]], activation_checkpointing: Any
) -> None:
    orders, sizes = drawn
    want = one_step(layout_of(RULES, {"data": 1}), LOSS, make_model, batch_of())
    layout, schedule = layout_of(RULES, {"pipeline": 2, "data": 2}), jp.pipeline.schedule(orders, **sizes)
    check_same(
        one_step(
            layout,
            LOSS,
            make_model,
            batch_of(),
            pipeline=jp.Pipeline(schedule, activation_checkpointing=activation_checkpointing),
        ),
        want,
    )
