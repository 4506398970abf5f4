"""The state of steps as scripts have them: what the trace alone says of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.planning.script.trace import StepTrace

PARAMS = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8), "scale": jnp.ones(8)}
X = np.ones((16, 4), np.float32)
BATCH = {"x": X}
SGD = optax.sgd(0.1).init(PARAMS)


def model(params: Any, x: Any) -> jax.Array:
    return jax.nn.relu(x @ params["w"] + params["b"]) * params["scale"]


def rebuilt(params: Any, x: Any) -> jax.Array:
    return x + model(params, x) @ params["w"].T


def trained(params: Any, loss_fn: Callable[[Any], Any]) -> tuple[Any, Any]:
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def square(x: jax.Array) -> jax.Array:
    return (x**2).mean()


def target(params: Any, target: Any, batch: Any) -> Any:
    return trained(params, lambda p: square(model(p, batch["x"]) - model(target, batch["x"])))


def temperature(params: Any, log_alpha: Any, batch: Any) -> Any:
    new, loss = trained((params, log_alpha), lambda both: square(model(both[0], batch["x"])) * jnp.exp(both[1]))
    return *new, loss


def weighted(params: Any, beta: Any, batch: Any) -> Any:
    return trained(params, lambda p: square(model(p, batch["x"])) + beta * square(p["w"]))


def logged(params: Any, rate: Any, batch: Any) -> Any:
    new, loss = trained(params, lambda p: square(model(p, batch["x"])))
    return new, {"loss": loss, "rate": rate, "rows": batch["x"].sum(1)}


def denoised(params: Any, x: Any) -> Any:
    return *trained(params, lambda p: square(rebuilt(p, x))), rebuilt(params, x)


def denoised_tree(params: Any, batch: Any) -> Any:
    new, _ = trained(params, lambda p: square(rebuilt(p, batch["x"])))
    return new, {"x": rebuilt(params, batch["x"])}


def counted(params: Any, count: Any, batch: Any) -> Any:
    new, loss = trained(params, lambda p: square(model(p, batch["x"])))
    return new, count + 1, loss


def scaled(params: Any, scale: Any, batch: Any) -> Any:
    new, loss = trained(params, lambda p: square(model(p, batch["x"])) * scale)
    return new, jnp.where(jnp.isfinite(loss), scale * 2, scale / 2), loss


def split(params: Any, key: Any, batch: Any) -> Any:
    first, second = jax.random.split(key)
    new, loss = trained(params, lambda p: square(model(p, batch["x"])))
    return new, first, second, loss


def empty(params: Any, stats: Any, opt: Any, batch: Any) -> Any:
    new, loss = trained(params, lambda p: square(model(p, batch["x"])))
    return new, stats, opt, loss


def carry(carry: Any, batch: Any) -> Any:
    params, opt, table = carry
    new, loss = trained(params, lambda p: square(model(p, batch["x"]) * table))
    return new, opt, loss


def bare(up: Any, bias: Any, down: Any, x: Any) -> Any:
    new, loss = trained((up, bias, down), lambda p: square(jax.nn.relu(x @ p[0] + p[1]) @ p[2]))
    return *new, loss


ONES = jnp.ones(())
KINDS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, tuple[str, ...]], set[str], set[str]]] = [
    # the step, its arguments, the results that may continue each part, those that are unsure, and the empty arguments
    (target, (PARAMS, PARAMS, BATCH), {"params": ("0",)}, set(), set()),
    (temperature, (PARAMS, ONES, BATCH), {"params": ("0",), "log_alpha": ("1",)}, set(), set()),
    (weighted, (PARAMS, ONES, BATCH), {"params": ("0",)}, set(), set()),
    (weighted, (PARAMS, 0.5, BATCH), {"params": ("0",)}, set(), set()),
    (logged, (PARAMS, ONES, BATCH), {"params": ("0",)}, set(), set()),
    (denoised, (PARAMS, X), {"params": ("0",)}, set(), set()),
    (denoised, (PARAMS, jnp.asarray(X)), {"params": ("0",), "x": ("2",)}, {"x"}, set()),
    (denoised_tree, (PARAMS, BATCH), {"params": ("0",)}, set(), set()),
    (counted, (PARAMS, 0, BATCH), {"params": ("0",), "count": ("1",)}, set(), set()),
    (scaled, (PARAMS, ONES, BATCH), {"params": ("0",), "scale": ("1",)}, set(), set()),
    (split, (PARAMS, jax.random.key(0), BATCH), {"params": ("0",), "key": ("1", "2")}, set(), set()),
    (split, (PARAMS, jax.random.PRNGKey(0), BATCH), {"params": ("0",), "key": ("1", "2")}, set(), set()),
    (empty, (PARAMS, {}, SGD, BATCH), {"params": ("0",)}, set(), {"stats", "opt"}),
    (empty, (PARAMS, None, SGD, BATCH), {"params": ("0",)}, set(), {"stats", "opt"}),
    (carry, ((PARAMS, SGD, jnp.ones(8)), BATCH), {"carry/0": ("0",)}, set(), set()),
    (
        bare,
        (jnp.ones((4, 16)), jnp.zeros(16), jnp.ones((16, 4)), X),
        {"up": ("0",), "bias": ("1",), "down": ("2",)},
        set(),
        set(),
    ),
]


@pytest.mark.parametrize(("step", "args", "parts", "unsure", "empty"), KINDS)
def test_state_is_told_from_data(step: Any, args: Any, parts: Any, unsure: Any, empty: Any) -> None:
    trace = StepTrace.of(step, args, {})
    assert {part.path: part.results for part in trace.parts} == parts
    assert {part.path for part in trace.parts if not part.sure} == unsure
    assert trace.empty == empty
    assert [trace.call.paths[i] for i in trace.batch[0]] == ["x" if "x" in trace.call.paths else "batch/x"]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: getattr(optax, name)(1e-2) for name in (
        "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "amsgrad", "fromage", "lamb",
        "lars", "lion", "nadam", "novograd", "optimistic_gradient_descent", "radam", "rmsprop", "rprop", "sgd",
        "sign_sgd", "sm3", "yogi",
    )},
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 4),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, momentum=0.9)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    "prodigy": optax.contrib.prodigy,
    "muon": lambda: optax.contrib.muon(1e-2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_optimizers_are_told_from_gradients(name: str) -> None:
    tx = OPTIMIZERS[name]()
    opt = tx.init(PARAMS)
    # Every order for one optimizer; for the others one in which parameters are first, and one in which they are last.
    orders = list(itertools.permutations(("params", "opt", "grads", "loss")))
    for order in orders if name == "adam" else (orders[0], orders[-1]):

        def step(params: Any, opt: Any, batch: Any, order: Any = order) -> Any:
            loss, grads = jax.value_and_grad(lambda p: square(model(p, batch["x"])))(params)
            updates, opt = tx.update(grads, opt, params)
            made = {"loss": loss, "grads": grads, "params": optax.apply_updates(params, updates), "opt": opt}
            return tuple(made[name] for name in order)

        trace = StepTrace.of(step, (PARAMS, opt, BATCH), {})
        state = {"params", "opt"} - trace.empty
        assert {part.path: part.results for part in trace.parts} == {n: (str(order.index(n)),) for n in state}
        assert trace.empty <= {"opt"} and all(part.decided for part in trace.parts)
