"""Which results of a step continue which of its arguments, over orders of both, and what is saved of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from error_texts import raises
from profiles import examples

import jaxpar as jp
from jaxpar.errors import ConfigError, StateError
from jaxpar.planning.script.held_state import HeldState
from jaxpar.planning.script.trace import StepTrace

ROWS, IN, OUT = 16, 4, 8
TX = optax.sgd(0.1, momentum=0.9)
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, IN)).astype(np.float32)}


def weights(seed: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(seed), (IN, OUT)) / 2, "b": jnp.zeros(OUT) + seed}


STATE: dict[str, Any] = {
    "student": weights(0),
    "teacher": weights(1),
    "opt": TX.init(weights(0)),
    "plain": optax.sgd(0.1).init(weights(0)),
    "centre": jnp.zeros(OUT),
    "queue": jnp.zeros((32, OUT)),
    "count": jnp.zeros((), jnp.int32),
    "loss_mean": jnp.zeros(()),
    "key": jax.random.key(3),
}
OUTPUTS = ("loss", "grads", "norm", "logits")


def values_of(penalty: float, state: dict[str, Any], batch: Any) -> dict[str, Any]:
    """A step of self-distillation: what it returns, by name."""
    student, teacher, zero = state["student"], state["teacher"], jnp.zeros(())
    out = jax.nn.softmax(batch["x"] @ teacher["w"] + teacher["b"] - state.get("centre", zero))

    def loss_fn(params: Any) -> Any:
        logits = batch["x"] @ params["w"] + params["b"]
        if "key" in state:
            logits += jax.random.normal(state["key"], logits.shape)
        loss = optax.softmax_cross_entropy(logits, out).mean()
        return loss + (penalty * optax.tree.norm(params, squared=True) if penalty else 0), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(student)
    updates, opt = TX.update(grads, state["opt"])
    new = optax.apply_updates(student, updates)
    made = {
        "student": new,
        "teacher": optax.incremental_update(new, teacher, 0.1),
        "opt": opt,
        "loss": loss,
        "grads": grads,
        "norm": optax.tree.norm(grads),
        "logits": logits,
    }
    made["plain"] = state.get("plain")
    made["centre"] = 0.9 * state.get("centre", zero) + 0.1 * out.mean(0)
    made["queue"] = jnp.concatenate([out, state["queue"][:-ROWS]]) if "queue" in state else zero
    made["count"] = state.get("count", zero) + 1
    made["loss_mean"] = 0.9 * state.get("loss_mean", zero) + 0.1 * loss
    made["key"] = jax.random.split(state["key"])[0] if "key" in state else zero
    return made


def step_of(names: tuple[str, ...], results: tuple[str, ...], penalty: float) -> Callable[..., Any]:
    def train_step(*args: Any) -> Any:
        *state, batch = args
        made = values_of(penalty, dict(zip(names, state, strict=True)), batch)
        return tuple(made[name] for name in results)

    return train_step


def check(trace: StepTrace, names: tuple[str, ...], results: tuple[str, ...]) -> int:
    """What is decided is right, the rest holds the truth, and the next call settles it; returns what was open."""
    arrays = {path: jnp.zeros(s.shape) for path, s in zip(trace.call.paths, trace.shapes, strict=True) if s.shape}
    truth = {f"arg{i}": str(results.index(name)) for i, name in enumerate(names) if name != "plain"}
    assert {part.path: truth[part.path] in part.results and part.sure for part in trace.parts} == dict.fromkeys(
        truth, True
    )
    undecided = [part for part in trace.parts if not part.decided]
    assert all(part.results == (truth[part.path],) for part in trace.parts if part.decided)
    assert trace.empty == {f"arg{i}" for i, name in enumerate(names) if name == "plain"}
    held = HeldState(trace, arrays)
    outputs = [jax.device_put(np.zeros((), np.int8)) for _ in trace.result_paths]
    held.take(trace, outputs)
    by_path = dict(zip(trace.result_paths, outputs, strict=True))
    passed = []
    for path in trace.call.paths:
        name, *rest = path.split("/")
        passed.append(by_path["/".join([truth[name], *rest])] if name in truth else jnp.zeros(1))
    held.verify(trace.call.paths, passed)
    held.check("state")
    held.take(trace, outputs)
    assert all(held.arrays[path] is x for path, x in zip(trace.call.paths, passed, strict=True) if path in held.arrays)
    assert len(held.arrays) == sum(path.split("/")[0] in truth for path in trace.call.paths)
    return len(undecided)


@examples(25)
@hypothesis.given(st.data())
def test_any_order_of_arguments_and_results(data: st.DataObject) -> None:
    needed = ("student", "teacher", "opt")
    others = data.draw(st.sets(st.sampled_from([name for name in STATE if name not in needed])))
    outputs = data.draw(st.sets(st.sampled_from(OUTPUTS)))
    names = tuple(data.draw(st.permutations([*needed, *sorted(others)])))
    results = tuple(data.draw(st.permutations([*names, *sorted(outputs)])))
    penalty = data.draw(st.sampled_from([0.0, 0.1]))
    trace = StepTrace.of(step_of(names, results, penalty), [*(STATE[name] for name in names), BATCH], {})
    undecided = check(trace, names, results)
    assert penalty or not undecided


def test_results_of_one_structure_without_a_penalty_are_told_apart() -> None:
    names = ("student", "teacher", "opt")
    for results in itertools.permutations((*names, "grads")):
        trace = StepTrace.of(step_of(names, results, 0.0), [*(STATE[name] for name in names), BATCH], {})
        assert check(trace, names, results) == 0


def close(arrays: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(arrays), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_has_what_the_next_call_is_passed(tmp_path: Path) -> None:
    names = ("student", "teacher", "opt", "plain", "centre", "queue")
    results = ("loss", "queue", "grads", "teacher", "centre", "student", "plain", "opt")
    first = [STATE[name] for name in names]
    parallelize = lambda: jp.parallelize(
        step_of(names, results, 0.1), *jax.tree.map(jnp.copy, first), BATCH, layout="data", checkpoints=tmp_path
    )
    with parallelize() as step:
        state = step.state
        close(state, first)
        returned = step(*state, BATCH)
        for read, what in ((step.save, "step 1"), (lambda: step.state, "train_step.state")):
            with raises(StateError, what):
                read()
        step(*(returned[results.index(name)] for name in names), BATCH)
        step.save()
    expected = first
    for _ in range(2):
        made = values_of(0.1, dict(zip(names, expected, strict=True)), BATCH)
        expected = [made[name] for name in names]
    with parallelize() as step:
        assert step.steps == 2
        close(step.state, expected)


def test_plain_sgd_keeps_its_place_in_the_state() -> None:
    params, tx = weights(0), optax.sgd(0.1)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: ((batch["x"] @ p["w"] + p["b"]) ** 2).mean())(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jp.parallelize(train_step, params, tx.init(params), BATCH, layout="data")
    params, opt_state = step.state
    assert opt_state == tx.init(params) and params.keys() == {"w", "b"}


def one_array(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    loss, grads = jax.value_and_grad(lambda w: ((batch["x"] @ w) ** 2).mean())(w)
    return w - 0.1 * grads, loss


def test_a_model_of_one_bare_array() -> None:
    w = weights(0)["w"]
    expected, reference = one_array(w, BATCH)
    step = jp.parallelize(one_array, w, BATCH, layout="data", donate=False)
    state, loss = step(step.state, BATCH)
    close((state, loss, step.state), (expected, reference, expected))


def recurrent(params: Any, hidden: jax.Array, batch: Any) -> Any:
    """A step whose hidden state no result carries on element by element, and that might be data."""

    def loss_fn(params: Any) -> Any:
        out = jnp.tanh(batch["x"] @ params["w"] + hidden @ params["u"])
        return (out**2).mean(), out

    (loss, out), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), out, loss


def test_an_array_that_may_be_data(tmp_path: Path) -> None:
    first = {"w": weights(0)["w"], "u": jnp.eye(OUT)}, jnp.zeros((ROWS, OUT))
    parallelize = lambda **options: jp.parallelize(recurrent, *first, BATCH, layout="data", donate=False, **options)
    with parallelize(checkpoints=tmp_path) as step:
        with raises(StateError, "'hidden'"):
            _ = step.state
        params, hidden, _ = step(*first, BATCH)
        step(params, hidden, BATCH)
        step.save()
    expected = recurrent(*recurrent(*first, BATCH)[:2], BATCH)[:2]
    with parallelize(checkpoints=tmp_path) as step:
        close(step.state, expected)
    assert parallelize(state={"params": 0}).state.keys() == {"w", "u"}
    close(parallelize(state={"params": 0, "hidden": 1}).state, first)


def test_state_that_does_not_fit() -> None:
    w = weights(0)["w"]
    texts = {
        ("v", 0): "v",
        ("w", 3): "'3'",
        (
            "w",
            1,
        ): "state: result",
    }
    for (path, result), text in texts.items():
        with raises(ConfigError, text):
            jp.parallelize(one_array, w, BATCH, state={path: result})


def shadowed(w: jax.Array, batch: Any) -> Any:
    """A step whose next weights look like those that the last call was passed, and whose others look like new ones."""
    gradient = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, jnp.linalg.inv(jnp.eye(IN) + 0.01 * gradient @ gradient.T) @ w


def test_a_caller_who_proves_the_guess_wrong(tmp_path: Path) -> None:
    first = weights(0)["w"]
    parallelize = lambda: jp.parallelize(shadowed, jnp.copy(first), BATCH, layout="data", checkpoints=tmp_path)
    with parallelize() as step:
        _, w = step(step.state, BATCH)
        _, w = step(w, BATCH)
        close(step.state, shadowed(shadowed(first, BATCH)[1], BATCH)[1])
    with parallelize() as step:
        _, w = step(step.state, BATCH)
        step.save()
        with raises(StateError, "step 1", "'w'"):
            step(w, BATCH)
