"""In every mode, the ``value_fn`` and ``grad_fn`` that a step passes to an optimizer are the loss that it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from profiles import few

import jaxpar as jp

ROWS, WIDTH, LAYERS = 8, 4, 2
RULES = jp.Rules(batch="data", embed=None, layers="pipeline")
QUICK = {"xla_backend_optimization_level": 0}


def make_model(key: jax.Array) -> dict[str, Any]:
    blocks = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 2
    return {"blocks": jp.tag(blocks, "layers", "embed", None), "head": jp.tag(jnp.ones(WIDTH), "embed")}


def batch_of(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    numbers = {name: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}
    return {**numbers, "count": random.integers(1, 9, ROWS).astype(np.float32)}


def ends(head: jax.Array, x: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss that is not linear in rows, and its weight."""
    errors = jnp.mean((x * head - batch["y"]) ** 2, 1)
    weight = jnp.sum(batch["count"])
    return jnp.log(jnp.sum(errors * batch["count"]) / weight), {"weight": weight}


def layer(block: jax.Array, x: jax.Array, side: Any) -> jax.Array:
    return x + jnp.tanh(x @ block)


def layers_of(model: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(w, x, None), None), x.astype(model["blocks"].dtype), model["blocks"])[0]


def plain(model: Any, batch: Any) -> Any:
    return ends(model["head"], layers_of(model, batch["x"]), batch)


def keyed(model: Any, batch: Any, key: jax.Array) -> Any:
    noise = jax.random.normal(key, batch["x"].shape)
    return ends(model["head"], layers_of(model, batch["x"] + noise), batch)


STAGED = jp.pipeline.PipelineLoss(
    "blocks",
    lambda model, batch: batch["x"].astype(model["head"].dtype),
    layer,
    lambda model, x, batch: ends(model["head"], x, batch),
)


@dataclass(frozen=True)
class Mode:
    """A way to compute a loss: mesh, step options, and into how many parts the mode splits the batch."""

    loss: Any
    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    zero: int = 0
    devices: int = 1
    microbatches: int = 1
    folds: bool = True
    cast: Any = None

    @property
    def step(self) -> dict[str, Any]:
        return {**(jp.Zero(self.zero, min_bytes=0).step if self.zero else {}), **self.options}

    @property
    def layout(self) -> jp.Layout:
        rules = jp.Zero(self.zero, min_bytes=0).rules(RULES) if self.zero else RULES
        count = int(np.prod(list(self.sizes.values())))
        return jp.Layout(jp.MeshSpec(**self.sizes).build(jax.devices()[:count]), rules)


PIPED = jp.Pipeline(jp.pipeline.schedule("1f1b", stages=2, microbatches=2))
MODES = {
    "plain": Mode(keyed, {"data": 2}, folds=False),
    "grad_accum_steps": Mode(plain, {"data": 2}, {"grad_accum_steps": 2}, devices=2, microbatches=2),
    "grad_accum_steps with a key": Mode(keyed, {"data": 2}, {"grad_accum_steps": 2}, devices=2, microbatches=2),
    "grad_accum_steps, reduced each time": Mode(
        keyed, {"data": 2}, {"grad_accum_steps": 2, "grad_reduction": "per_microbatch"}, microbatches=2
    ),
    "ZeRO 1 with a key": Mode(keyed, {"data": 2}, zero=1, devices=2),
    "ZeRO 3": Mode(plain, {"data": 2}, zero=3),
    "bf16": Mode(keyed, {"data": 2}, {"precision": "bf16"}, folds=False, cast=jnp.bfloat16),
    "fp16 with a scale": Mode(plain, {"data": 2}, {"precision": "fp16"}, cast=jnp.float16),
    "pipeline": Mode(STAGED, {"pipeline": 2, "data": 2}, {"pipeline": PIPED}, devices=2, microbatches=2),
}


def by_hand(mode: Mode, batch: Any, key: jax.Array, step: Any) -> Callable[[Any], jax.Array]:
    """The mode's loss on one device: the weighted mean over the parts into which the mode splits the batch."""
    parts = [(d, m) for d in range(mode.devices) for m in range(mode.microbatches)]
    rows = np.arange(ROWS)
    if mode.devices == 1:
        own = rows.reshape(mode.sizes.get("data", 1), mode.microbatches, -1)
        cut = {(0, m): own[:, m].reshape(-1) for m in range(mode.microbatches)}
    else:
        own = rows.reshape(mode.devices, mode.microbatches, -1)
        cut = {(d, m): own[d, m] for d, m in parts}

    def value(params: Any) -> jax.Array:
        model = params if mode.cast is None else jax.tree.map(lambda w: w.astype(mode.cast), params)
        total, count = jnp.zeros(()), jnp.zeros(())
        for n, part in enumerate(parts):
            some = {name: jnp.asarray(x)[cut[part]] for name, x in batch.items()}
            own_key = jax.random.fold_in(key, n) if mode.folds else key
            extra = {"key": jax.random.fold_in(own_key, step)} if mode.loss is keyed else {}
            loss, found = mode.loss(model, some, **extra)
            total, count = total + loss * found["weight"], count + found["weight"]
        return total / count

    return value


def probe() -> optax.GradientTransformationExtraArgs:
    """SGD that stores the values and functions that the step passes to it."""

    def init(params: Any) -> Any:
        nothing, none = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        return {"value": none, "again": none, "shifted": none, "grad": nothing, "pushed": nothing}

    def update(grads: Any, state: Any, params: Any, *, value: Any, value_fn: Any, grad_fn: Any, **_: Any) -> Any:
        again, grad = jax.value_and_grad(value_fn)(params)
        _, shifted = jax.jvp(value_fn, (params,), (jax.tree.map(jnp.ones_like, params),))
        found = {"value": value, "again": again, "shifted": shifted, "grad": grad, "pushed": grad_fn(params)}
        found = {name: jax.tree.map(lambda x: x.astype(jnp.float32), x) for name, x in found.items()}
        return jax.tree.map(lambda g: -0.1 * g, grads), found

    return optax.GradientTransformationExtraArgs(init, update)


def one_step(mode: Mode, tx: Any, batches: list[Any]) -> tuple[Any, list[Any], Any]:
    """Returns the state before, the metrics of each step, and the state after."""
    precision = mode.options.get("precision")
    with jax.default_matmul_precision("highest"), mode.layout:
        first = state = jp.init(mode.layout, make_model, tx, precision=precision)
        step = jp.train_step(mode.layout, mode.loss, return_grads=True, donate=False, **mode.step)
        compiled = step.lower(state, batches[0]).compile(compiler_options=QUICK)
        found = []
        for batch in batches:
            state, metrics = compiled(state, batch)
            found.append(metrics)
    return first, found, state


@pytest.mark.slow
@pytest.mark.parametrize("name", few(MODES, 2))
def test_the_offered_function_is_the_one_whose_value_is_reported(name: str) -> None:
    mode = MODES[name]
    first, (metrics,), after = one_step(mode, probe(), [batch_of(1)])
    seen, last_bit = jax.device_get(after.opt_state), 1.2e-7
    reported = float(metrics["loss"])
    assert float(seen["value"]) == reported
    assert abs(float(seen["again"]) - reported) <= last_bit * abs(reported)
    grads = jax.device_get(metrics["grads"])
    for offered in ("grad", "pushed"):
        for a, b in zip(jax.tree.leaves(seen[offered]), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max(), err_msg=offered)
    total = sum(float(np.sum(g, dtype=np.float64)) for g in jax.tree.leaves(grads))
    assert float(seen["shifted"]) == pytest.approx(total, abs=1e-5)
    if mode.cast is None:
        value = by_hand(mode, batch_of(1), first.key, 0)
        want, of_hand = jax.jit(jax.value_and_grad(value))(jax.device_get(first.params))
        assert reported == pytest.approx(float(want), rel=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(of_hand), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


SEARCHES: dict[str, Callable[[], Any]] = {
    "backtracking": lambda: optax.chain(optax.sgd(4.0), optax.scale_by_backtracking_linesearch(6, store_grad=True)),
    "lbfgs": lambda: optax.lbfgs(memory_size=2, linesearch=optax.scale_by_zoom_linesearch(4)),
    "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.5),
}


PAIRS = [
    ("grad_accum_steps with a key", "lbfgs"),
    ("ZeRO 1 with a key", "backtracking"),
    ("pipeline", "backtracking"),
    ("ZeRO 1 with a key", "polyak"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), few(PAIRS, 1, names=2))
def test_a_line_search_takes_the_steps_of_a_plain_loop_of_optax(mode: str, name: str) -> None:
    """In fp64: a search compares losses that are nearly equal, which amplifies rounding."""
    with jax.enable_x64(True):
        batches, tx = [batch_of(seed) for seed in (2, 3)], SEARCHES[name]()
        first, metrics, after = one_step(MODES[mode], tx, batches)
        params = jax.device_get(first.params)
        state = tx.init(params)

        @jax.jit
        def plain_step(params: Any, state: Any, batch: Any, step: jax.Array) -> Any:
            value_fn = by_hand(MODES[mode], batch, first.key, step)
            value, grads = jax.value_and_grad(value_fn)(params)
            updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=value_fn)
            return optax.apply_updates(params, updates), state, value

        for step, batch in enumerate(batches):
            params, state, value = plain_step(params, state, batch, jnp.asarray(step))
            assert float(metrics[step]["loss"]) == pytest.approx(float(value), rel=1e-12)
        for a, b in zip(jax.tree.leaves(jax.device_get(after.params)), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


def test_an_optimizer_that_does_not_ask_traces_no_second_loss() -> None:
    calls = []

    def counted(model: Any, batch: Any) -> Any:
        calls.append(1)
        return plain(model, batch)

    mode = MODES["plain"]
    with mode.layout:
        for tx in (optax.sgd(0.1), optax.chain(optax.sgd(0.1), optax.with_extra_args_support(optax.identity()))):
            calls.clear()
            state = jp.abstract_state(mode.layout, make_model, tx)
            jp.train_step(mode.layout, counted).trace(state, batch_of(0))
            assert len(calls) == 1
