"""Asynchronous pipelines equal their recurrences on one device, bitwise in fp64, also after a flush and a restore."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from exact_model import CALLS, LAYERS, LOSS, READS, RULES, TIED, batch_of, make_model, stepping
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, LayoutError
from jaxpar.sharding.layout import tracing_under
from jaxpar.training.asynchronous.step import PipedreamStep

QUICK = {"xla_backend_optimization_level": 0}
"""Each program runs a few times, so compiling it with optimizations takes longer than running it."""


def microbatches(batch: Any, count: int, ways: int) -> list[Any]:
    """Cuts the batch into microbatches as each of ``ways`` devices cuts its own rows."""
    cut = jax.tree.map(lambda x: np.asarray(x).reshape(ways, count, -1, *x.shape[1:]).swapaxes(0, 1), batch)
    return [jax.tree.map(lambda x, n=n: x[n].reshape(-1, *x.shape[3:]), cut) for n in range(count)]


@functools.cache
def gradient(loss: jp.pipeline.PipelineLoss = LOSS) -> Callable[[Any, Any], Any]:
    """Returns a function of loss and gradient of one microbatch, on one device, without a pipeline."""
    one = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES)

    def run(params: Any, batch: Any) -> Any:
        with tracing_under(one):
            return jax.value_and_grad(lambda params: loss(params, batch)[0])(params)

    return jax.jit(run)


@functools.cache
def updating() -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    tx = stepping()

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    return tx, jax.jit(update)


def two_versions(params: Any, loss: jp.pipeline.PipelineLoss, count: int, ways: int) -> list[Any]:
    """Returns the weights after every call and after a flush: W(t + 1) = W(t) - u(g(W(t - 1)))."""
    (tx, update), mean = updating(), lambda *grads: sum(grads) / count
    state, found, late = tx.init(params), [params], None
    for number in range(CALLS + 1):
        new = found[-1]
        if late is not None:
            new, state = update(late, state, new)
        if number < CALLS:
            grads = [gradient(loss)(found[-1], piece)[1] for piece in microbatches(batch_of(number), count, ways)]
            late = jax.tree.map(mean, *grads)
        found.append(new)
    return found[1:]


def every_microbatch(
    params: Any, loss: jp.pipeline.PipelineLoss, count: int, ways: int, layers: tuple[int, ...]
) -> list[Any]:
    """Returns the weights after every call and after a flush.

    Stage s computes W_s(m + 1) = W_s(m) - u(g_m), where g_m is the gradient of microbatch m.

    All stages r compute g_m with W_r(m - 2 (S - 1 - r)). The embedding belongs to the first stage, also where the head
    uses it again: it has one version, one gradient of both uses and one update.
    """
    (tx, update), stages = updating(), len(layers)
    delay, ends = 2 * (stages - 1), np.cumsum(layers)
    groups = {"words": params["words"], "head": params["head"]}
    of_stage = lambda w, s: w[ends[s] - layers[s] : ends[s]]
    groups |= {f"{s}": of_stage(params["blocks"]["w"], s) for s in range(stages)}
    late = {"words": delay, "head": 0, **{f"{s}": delay - 2 * s for s in range(stages)}}
    # When a call ends, the last updates of each group are pending, because their microbatches are in flight.
    still = {"words": delay, "head": stages - 1, **{f"{s}": delay - s for s in range(stages)}}
    found, states = {name: [w] for name, w in groups.items()}, {name: tx.init(w) for name, w in groups.items()}

    def joined(at: Callable[[str], int]) -> Any:
        one = {name: versions[max(at(name), 0)] for name, versions in found.items()}
        blocks = {"w": jnp.concatenate([one[f"{s}"] for s in range(stages)])}
        return {"words": one["words"], "head": one["head"], "blocks": blocks}

    pieces = [piece for number in range(CALLS) for piece in microbatches(batch_of(number), count, ways)]
    for m, piece in enumerate(pieces):
        grads = gradient(loss)(joined(lambda name, m=m: m - late[name]), piece)[1]
        of = {"words": grads["words"], "head": grads["head"]}
        of |= {f"{s}": of_stage(grads["blocks"]["w"], s) for s in range(stages)}
        for name, grad in of.items():
            new, states[name] = update(grad, states[name], found[name][-1])
            found[name].append(new)
    after_calls = [joined(lambda name, n=n: n * count - still[name]) for n in range(1, CALLS + 1)]
    return [*after_calls, joined(lambda name: len(pieces))]


@dataclass
class Run:
    """Parameters and metrics of each call, and the states before the last call and at the end."""

    params: list[Any]
    metrics: list[dict[str, float]]
    saved: Any
    state: Any
    call: Any


def saved(state: Any) -> Any:
    """Returns the arrays as a checkpoint stores them."""
    one = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: np.array(one(x)), state)


def restored(numbers: Any, like: Any) -> Any:
    def one(x: np.ndarray, old: jax.Array) -> jax.Array:
        key = jnp.issubdtype(old.dtype, jax.dtypes.prng_key)
        return jax.device_put(jax.random.wrap_key_data(x) if key else x, old.sharding)

    return jax.tree.map(one, numbers, like)


CASES: list[tuple[dict[str, int], jp.pipeline.Asynchronous, jp.pipeline.PipelineLoss, bool]] = [
    ({"pipeline": 3}, jp.pipeline.Asynchronous("pipedream_2bw", stages=3, microbatches=4), LOSS, True),
    (
        {"pipeline": 2, "data": 2, "model": 2},
        jp.pipeline.Asynchronous(
            "pipedream_2bw", stages=2, microbatches=2, activation_checkpointing="none", layers_per_stage=(4, 2)
        ),
        TIED,
        False,
    ),
    (
        {"pipeline": 3, "data": 2},
        jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4, activation_checkpointing="none"),
        LOSS,
        True,
    ),
    (
        {"pipeline": 3, "model": 2},
        jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4, layers_per_stage=(3, 1, 2)),
        TIED,
        True,
    ),
    ({"pipeline": 2, "data": 2}, jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=2), READS, True),
]
"""Mesh, pipeline, loss, and whether the run ends with a flush."""


def step_of(case: int) -> tuple[jp.Layout, PipedreamStep]:
    sizes, pipeline, loss, _ = CASES[case]
    layout = jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]), RULES)
    return layout, jp.pipeline.pipedream_train_step(layout, loss, pipeline, donate=False)


@functools.cache
def begun(case: int) -> tuple[PipedreamStep, Any]:
    """Returns the step and its first state."""
    layout, step = step_of(case)
    return step, step.start(jp.init(layout, make_model, stepping()), batch_of(0))


@functools.cache
def done(case: int) -> Run:
    step, state = begun(case)
    call = step.lower(state, batch_of(0)).compile(compiler_options=QUICK)
    params, metrics, numbers = [jax.device_get(state.params)], [], None
    for number in range(CALLS):
        numbers = saved(state) if number == CALLS - 1 else numbers
        state, told = call(state, batch_of(number))
        params.append(jax.device_get(state.params))
        metrics.append({name: float(x) for name, x in told.items()})
    if CASES[case][-1]:
        final, told = step.lower(state).compile(compiler_options=QUICK)(state)
        params.append(jax.device_get(final.params))
        metrics.append({name: float(x) for name, x in told.items()})
        assert int(final.step) == CALLS and int(final.flight["pending"]) == 0
    return Run(params, metrics, numbers, state, call)


@pytest.mark.parametrize("case", few((4, 0, 1, 2, 3), 1))
def test_a_run_is_its_recurrence_to_the_bit(case: int) -> None:
    sizes, pipeline, loss, flushes = CASES[case]
    first, *got = done(case).params
    count, ways = pipeline.microbatches, sizes.get("data", 1)
    both = pipeline.name == "pipedream_2bw"
    layers = pipeline.layers_per_stage or (LAYERS // pipeline.stages,) * pipeline.stages
    want = two_versions(first, loss, count, ways) if both else every_microbatch(first, loss, count, ways, layers)
    assert got[0]["head"].dtype == np.float64
    for number, (a, b) in enumerate(zip(got, want if flushes else want[:-1], strict=True)):
        for (keys, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            assert np.array_equal(x, y), (number, jax.tree_util.keystr(keys), np.abs(x - y).max())
    # Every call after the first changes all parameters. In the first call, 2BW has no gradient yet, and the embedding
    # has none under both schedules.
    moved = [
        {name: np.abs(a[name] - b[name]).max() for name in ("words", "head")}
        for a, b in itertools.pairwise([first, *got])
    ]
    assert moved[0]["words"] == 0 and (moved[0]["head"] == 0) == both
    assert min(size for sizes in moved[1:] for size in sizes.values()) > 0


@pytest.mark.parametrize("case", few((4, 3, 2), 1))
def test_a_saved_state_goes_on_to_the_bit(case: int) -> None:
    ran = done(case)
    state, _ = ran.call(restored(ran.saved, ran.state), batch_of(CALLS - 1))
    for x, y in zip(jax.tree.leaves(saved(state)), jax.tree.leaves(saved(ran.state)), strict=True):
        assert np.array_equal(x, y)
    assert all(
        x.sharding == y.sharding for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(ran.state), strict=True)
    )


def stacked(key: jax.Array) -> Any:
    weights = lambda *shape: jnp.full(shape, 2.0)
    blocks = {"w": jp.tag(weights(2, 4, 4), "layers", "embed", "mlp"), "norm": jp.tag(weights(2, 4), "layers", "embed")}
    words, norm = jp.tag(weights(8, 4), "vocab", "embed"), jp.tag(weights(4), "embed")
    return {"blocks": blocks, "words": words, "norm": norm, "out": {"w": jp.tag(weights(4, 4), "embed", "mlp")}}


def shrinking(**options: Any) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(0.5, **options), optax.scale(-1.0))


CHOSEN: dict[str, tuple[Callable[[], optax.GradientTransformation], set[str]]] = {
    "mask": (
        lambda: shrinking(mask=jp.optimizers.decay_mask(stacked, ["vectors", "words"])),
        {"blocks/w", "out/w"},
    ),
    "tree": (
        lambda: shrinking(
            mask={"blocks": {"w": False, "norm": True}, "words": True, "norm": False, "out": {"w": False}}
        ),
        {"blocks/norm", "words"},
    ),
    "muon": (lambda: jp.optimizers.muon(stacked, 0.5, weight_decay=0.5), {"blocks/w"}),
}
"""An optimizer that shrinks some parameters, and which ones: without a gradient nothing else changes."""


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("schedule", [pytest.param("pipedream_2bw", marks=pytest.mark.slow), "pipedream"])
def test_an_optimizer_knows_the_parameters_by_their_paths_and_dims(schedule: Any, name: str) -> None:
    loss = jp.pipeline.PipelineLoss(
        "blocks",
        lambda model, batch: model["words"][batch["tokens"]],
        lambda block, x, side: x * block["norm"] @ block["w"],
        lambda model, x, batch: 0 * (x * model["norm"] @ model["out"]["w"]).mean(),
    )
    layout = jp.Layout(jp.MeshSpec(pipeline=2).build(jax.devices()[:2]), RULES)
    step = jp.pipeline.pipedream_train_step(layout, loss, jp.pipeline.Asynchronous(schedule, stages=2, microbatches=2))
    tx, chosen = CHOSEN[name][0](), CHOSEN[name][1]
    state = step.start(jp.init(layout, stacked, tx), batch_of(0))
    call = step.lower(state, batch_of(0)).compile(compiler_options=QUICK)
    for _ in range(2):
        state, _ = call(state, batch_of(0))
    values = jax.tree_util.tree_leaves_with_path(jax.device_get(state.params))
    shrunk = {jax.tree_util.keystr(keys, simple=True, separator="/") for keys, w in values if (w < 2.0).all()}
    assert shrunk == chosen
    assert all(
        (w == 2.0).all() for keys, w in values if jax.tree_util.keystr(keys, simple=True, separator="/") not in chosen
    )


@pytest.mark.slow
def test_metrics_are_of_microbatches_whose_loss_was_made() -> None:
    first, later = done(0), done(2)
    pieces = [piece for number in range(2) for piece in microbatches(batch_of(number), 4, 1)]
    losses = [float(gradient()(first.params[0], piece)[0]) for piece in pieces]
    # With three stages, the last two losses of a batch are computed in the next call, with that batch's weights.
    assert first.metrics[0]["loss"] == np.mean(losses[:2]) and first.metrics[1]["loss"] == np.mean(losses[2:6])
    told = [(run["updated"], run["skipped"], run["grad_norm"] > 0) for run in first.metrics]
    assert told == [(0, 0, False), (1, 0, True), (1, 0, True), (1, 0, True)]
    assert int(first.state.step) == CALLS and int(first.state.opt_state[0]) == CALLS - 1
    assert all(run["updated"] == 1 and run["grad_norm"] > 0 for run in later.metrics)
    counts = {name: np.asarray(later.state.opt_state[name][0]).tolist() for name in ("before", "layers", "after")}
    assert counts == {"before": 8, "layers": [8, 9, 10], "after": 10}


@pytest.mark.parametrize("case", few((4, 3, 0, 1, 2), 2))
def test_a_first_state_is_known_before_it_is_made(case: int) -> None:
    """``jaxpar check --topology`` compiles from these shapes, dtypes and shardings."""
    layout, step = step_of(case)
    batch = jax.tree.map(lambda x: jp.shard_array(layout, np.asarray(x), "batch", *[None] * (x.ndim - 1)), batch_of(0))
    told, made = step.abstract(jp.abstract_state(layout, make_model, stepping()), batch), begun(case)[1]
    leaves = zip(jax.tree_util.tree_leaves_with_path(told), jax.tree_util.tree_leaves_with_path(made), strict=True)
    for (keys, one), (path, other) in leaves:
        assert (keys, one.shape, one.dtype) == (path, other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, other.ndim), keys


@pytest.mark.slow
def test_batches_and_states_that_do_not_go_on_are_named() -> None:
    ran = done(0)
    layout = jp.Layout(jp.MeshSpec(pipeline=3).build(jax.devices()[:3]), RULES)
    step = jp.pipeline.pipedream_train_step(layout, LOSS, CASES[0][1])
    with raises(LayoutError, "batch/targets"):
        step.lower(ran.state, jax.tree.map(lambda x: x[:4], batch_of(0)))
    others = [
        (0, "pipedream_2bw", jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4), "2-2-2", "2-2-2"),
        (
            0,
            "pipedream_2bw",
            jp.pipeline.Asynchronous("pipedream_2bw", stages=3, microbatches=4, layers_per_stage=(1, 1, 4)),
            "2-2-2",
            "1-1-4",
        ),
        (3, "pipedream", jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4), "3-1-2", "2-2-2"),
        (
            3,
            "pipedream",
            jp.pipeline.Asynchronous("pipedream", stages=3, microbatches=4, layers_per_stage=(1, 2, 3)),
            "3-1-2",
            "1-2-3",
        ),
    ]
    for case, name, asked, each, now in others:
        with raises(ConfigError, f"'{name}'", f"'{asked.name}'", f"of {each}", f"of {now}"):
            jp.pipeline.pipedream_train_step(step_of(case)[0], CASES[case][2], asked).lower(
                done(case).state, batch_of(0)
            )
    with raises(ConfigError, "step.start(state, batch)"):
        step.lower(ran.state.landed, batch_of(0))
