"""Tests per-layer random numbers, losses and metrics under a pipeline, and evaluation, against one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from one_step import check_same, layout_of, one_step
from profiles import few

import jaxpar as jp
from jaxpar.errors import LayoutError, ModelError
from jaxpar.parallel.pipeline.executor.layer_inputs import LayerInputs
from jaxpar.parallel.pipeline.executor.stage import Chunk
from jaxpar.parallel.pipeline.schedules.registry import NAMES

QUICK = {"xla_backend_optimization_level": 0}
WIDTH, EXPERTS, LAYERS, ROWS, SEQ, PIECES = 8, 2, 6, 16, 4, 4
RULES = jp.Rules(batch="data", embed=None, experts=None, layers="pipeline", params={"embed": "data"})


def numbers(*shape: int) -> jax.Array:
    """Deterministic numbers, because random ones take longer to compile than everything else here."""
    return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) ** 1.5).reshape(shape)


def make_model(key: jax.Array) -> Any:
    expert = numbers(LAYERS, EXPERTS, WIDTH, WIDTH) / 3
    return {
        "blocks": {
            "router": jp.tag(numbers(LAYERS, WIDTH, EXPERTS), "layers", "embed", "experts"),
            "expert": jp.tag(expert, "layers", "experts", "embed", None),
        },
        "head": jp.tag(numbers(WIDTH), "embed"),
    }


def dropped(x: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.vmap(lambda key, row: jnp.where(jax.random.bernoulli(key, 0.7, row.shape), row / 0.7, 0))(keys, x)


def layer(block: Any, x: jax.Array, side: Any, keys: jax.Array) -> Any:
    """Experts with dropout, a balancing loss that is not linear in the rows, and a metric."""
    shares = jax.nn.softmax(x @ block["router"])
    found = jnp.einsum("bse,bsd,edf->bsf", shares, x, block["expert"])
    most = jax.lax.stop_gradient(jnp.mean(jax.nn.one_hot(shares.argmax(-1), EXPERTS), (0, 1)))
    balance = 0.1 * EXPERTS * jnp.sum(most * jnp.mean(shares, (0, 1)))
    return x + dropped(jnp.tanh(found), keys), {"loss": balance, "entropy": -jnp.mean(shares * jnp.log(shares))}


def after(model: Any, x: jax.Array, batch: Any) -> Any:
    weight = jnp.sum(batch["counts"])
    errors = jnp.mean((x @ model["head"] - batch["y"]) ** 2, 1)
    return jnp.sum(errors * batch["counts"]) / weight, {"weight": weight}


LOSS = jp.pipeline.PipelineLoss(
    layers="blocks", embed=lambda model, batch: batch["x"], layer=layer, head=after, keys=True
)


def batch_of() -> dict[str, jax.Array]:
    y, counts = numbers(2 * ROWS, SEQ)[ROWS:], 1 + numbers(ROWS) / 2
    x = numbers(ROWS, SEQ, WIDTH)
    return {"x": x, "y": y, "counts": counts, "code": jnp.round(4 + 4 * x)}


def run(
    sizes: dict[str, int], pipeline: Any = None, loss: Any = LOSS, make: Any = make_model, **options: Any
) -> tuple[dict[str, float], Any]:
    """Returns the metrics and the gradients of one step."""
    return one_step(layout_of(RULES, sizes), loss, make, batch_of(), pipeline=pipeline, **options)[:2]


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, float], Any]:
    found = run({"data": 1}, grad_accum_steps=PIECES)
    assert found[0]["aux_loss"] > 0.1 and found[0]["entropy"] > 0.1
    return found


# name, mesh, chunks, activation_checkpointing, layers of each piece, executor
CASES: list[tuple[str, dict[str, int], int, str, tuple[int, ...], str]] = [
    ("gpipe", {"pipeline": 2}, 1, "full", (), "lockstep"),
    ("1f1b", {"pipeline": 2, "data": 2}, 1, "none", (4, 2), "lockstep"),
    ("interleaved", {"pipeline": 2}, 2, "none", (2, 1, 2, 1), "lockstep"),
    ("zb_h1", {"pipeline": 2, "data": 2}, 1, "none", (), "independent"),
    ("zb_v", {"pipeline": 2}, 2, "full", (1, 2, 1, 2), "lockstep"),
]


@pytest.mark.parametrize("case", few(CASES, 1), ids=lambda case: case[0])
def test_dropout_and_losses_of_layers_are_those_of_one_device(case: Any, one_device: Any) -> None:
    """The rows that a device has of a microbatch form one microbatch of the single device."""
    name, sizes, chunks, activation_checkpointing, layers, executor = case
    microbatches = PIECES // sizes.get("data", 1)
    schedule = jp.pipeline.schedule(name, stages=2, microbatches=microbatches, chunks=chunks)
    check_same(
        run(
            sizes,
            jp.Pipeline(
                schedule, activation_checkpointing=activation_checkpointing, layers_per_stage=layers, executor=executor
            ),
        ),
        one_device,
    )


def test_keys_are_not_kept() -> None:
    """A layer recomputes from its input; its keys are derived again from the keys of the rows."""

    @jax.checkpoint
    def remade(block: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        first, second = jax.vmap(jax.random.split, out_axes=1)(keys)
        return dropped(jnp.tanh(dropped(x, first) @ block["w"]), second)

    def kept(layer: Any) -> list[Any]:
        weights = {"w": jnp.ones((1, 1, WIDTH, WIDTH))}
        chunk = Chunk(layer, weights, jnp.asarray(0), jnp.asarray(1), start=jnp.asarray(3))
        side = LayerInputs(None, jax.random.split(jax.random.key(0), ROWS), jnp.zeros(()))
        found = jax.eval_shape(lambda: chunk.kept(jnp.ones((ROWS, WIDTH)), side)[1])
        return [(x.shape, str(x.dtype)) for x in found]

    assert kept(lambda block, x, side: remade(block, x, side.keys)) == [((ROWS, WIDTH), "float32")]
    outside = lambda block, x, side: remade(block, x, jax.vmap(lambda key: jax.random.fold_in(key, 1))(side.keys))
    assert kept(outside) == [((ROWS, WIDTH), "float32"), ((ROWS, 2), "uint32")]


def evaluate(sizes: dict[str, int], pipeline: Any, loss: Any, batch: Any) -> tuple[dict[str, float], Any]:
    """Returns the metrics of one evaluation and its compiled program."""
    layout = jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]), RULES)
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make_model, optax.sgd(0.1))
        step = jp.eval_step(layout, loss, pipeline=pipeline).lower(state, batch).compile(compiler_options=QUICK)
        return {name: float(value) for name, value in step(state, batch).items()}, step


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["per_step", "per_microbatch"])
def test_an_evaluation_goes_through_the_stages(embedding: Any, one_device: Any) -> None:
    sizes, schedule = {"pipeline": 2, "data": 2}, jp.pipeline.schedule("1f1b", stages=2, microbatches=PIECES // 2)
    got, compiled = evaluate(
        sizes, jp.Pipeline(schedule, layers_per_stage=(4, 2), embedding=embedding), LOSS, batch_of()
    )
    assert got == {
        name: pytest.approx(one_device[0][name], rel=1e-6) for name in ("loss", "weight", "entropy", "aux_loss")
    }
    report = jp.audit(compiled, mesh=jp.MeshSpec(**sizes).abstract())
    ticks = len(schedule.forwards().ticks.rows)
    assert {c.count for c in report.select("collective-permute") if "from_neighbour" in c.source} == {ticks}
    # Only the input of the first stage is gathered over stages, one microbatch at a time; layers never are.
    gathered = report.select("all-gather", axis="pipeline")
    assert bool(gathered) == (embedding == "per_step") and all("first_input " in c.source for c in gathered)


@pytest.mark.slow
def test_draws_are_those_of_one_device_to_the_bit() -> None:
    """Integer sums are exact, so the loss checks every draw by row and position for any mesh and any microbatches."""

    def layer(block: Any, x: jax.Array, side: Any, keys: jax.Array) -> jax.Array:
        return x + jax.vmap(lambda key: jax.random.randint(key, x.shape[1:], 0, 8).astype(x.dtype))(keys)

    after = lambda model, x, batch: jnp.mean(jnp.sum(x * batch["code"], (1, 2)))
    loss = jp.pipeline.PipelineLoss(
        "blocks", lambda model, batch: jnp.zeros_like(batch["code"]), layer, after, keys=True
    )
    schedule = jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=2)
    pipeline = jp.Pipeline(schedule, layers_per_stage=(2, 1, 2, 1))
    want = evaluate({"data": 1}, None, loss, batch_of())[0]
    assert want["loss"] % 2**-4 == 0 and want["loss"] > 1e3
    assert evaluate({"pipeline": 2, "data": 2}, pipeline, loss, batch_of())[0] == want
    # Without a pipeline, microbatches are those of each device, or those of all devices.
    for ways in ({"grad_reduction": "per_step"}, {"grad_reduction": "per_microbatch"}):
        assert run({"data": 2}, loss=loss, grad_accum_steps=2, **ways)[0]["loss"] == want["loss"]


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {"circular"}))
def test_the_forwards_of_a_schedule_are_one(name: str) -> None:
    chunks, parts = (1 if NAMES[name].chunks == "one" else 2), 2 if NAMES[name].sequences else 1
    trains = jp.pipeline.schedule(name, stages=4, microbatches=8, chunks=chunks, sequence_chunks=parts)
    found, circular = (
        trains.forwards().validate(),
        jp.pipeline.schedule("circular", stages=4, microbatches=8, chunks=chunks),
    )
    assert found.forwards() is found and found.pieces == trains.pieces and found.microbatches == 8
    more = len(found.ticks.rows) - len(circular.ticks.rows)
    # With a V placement, chunk 1 begins when its first microbatch has come back.
    assert more == (3 if trains.pieces.placement == "v" else 0)


TWO_STAGES = jp.Layout(jp.MeshSpec(pipeline=2).abstract(), RULES)
ONE_F_ONE_B = jp.pipeline.schedule("1f1b", stages=2, microbatches=4)
WRONG: dict[str, tuple[Any, str]] = {
    "three": (lambda block, x, side, keys: (x, 0.0, {}), "3"),
    "vector": (lambda block, x, side, keys: (x, {"balance": jnp.ones(3)}), "balance"),
    "twice": (lambda block, x, side, keys: (x, {"weight": 1.0}), "weight"),
    "taken": (lambda block, x, side, keys: (x, {"grad_norm": 1.0}), "loss_fn"),
}


@pytest.mark.parametrize("pipeline", [None, ONE_F_ONE_B], ids=["alone", "pipeline"])
@pytest.mark.parametrize("case", WRONG)
def test_what_a_layer_may_not_return_is_named(case: str, pipeline: Any) -> None:
    wrong, text = WRONG[case]
    step = jp.train_step(TWO_STAGES, replace(LOSS, layer=wrong), pipeline=pipeline)
    with raises(ModelError, text):
        step.lower(jp.abstract_state(TWO_STAGES, make_model, optax.sgd(0.1)), batch_of())


def test_rows_that_make_no_microbatches_are_named() -> None:
    step = jp.eval_step(TWO_STAGES, LOSS, pipeline=jp.pipeline.schedule("circular", stages=2, microbatches=6))
    with raises(LayoutError, "batch/code"):
        step.lower(jp.abstract_state(TWO_STAGES, make_model, optax.sgd(0.1)), batch_of())


def test_a_loss_that_draws_wants_a_key() -> None:
    with raises(ModelError, "keys=True", "draws"):
        LOSS({}, batch_of())
