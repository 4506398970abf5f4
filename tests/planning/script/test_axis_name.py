"""Steps made for ``jax.pmap``: each collective has the meaning that it has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from jax import lax
from profiles import few

import jaxpar as jp
from jaxpar.errors import LayoutError, ModelError
from jaxpar.planning.script.mapped import size_of_means
from jaxpar.planning.script.trace import StepTrace

DEVICES, AXIS = 8, "batch"
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
W = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)

USES: dict[str, Callable[[Any], Any]] = {
    "pmean": lambda g: lax.pmean(g, AXIS),
    "psum over the devices": lambda g: lax.psum(g, AXIS) / jax.device_count(),
    "psum over psum(1)": lambda g: lax.psum(g, AXIS) / lax.psum(1, AXIS),
    "psum over axis_size": lambda g: lax.psum(g, AXIS) / lax.axis_size(AXIS),
    "psum": lambda g: lax.psum(g, AXIS),
    "psum of counts": lambda g: lax.psum(g * 3, AXIS) / lax.psum(jnp.full((), 3.0), AXIS),
    "pmax": lambda g: lax.pmax(g, AXIS),
    "pmin": lambda g: lax.pmin(g, AXIS),
    "all_gather": lambda g: lax.all_gather(g, AXIS).mean(0),
    "all_gather tiled": lambda g: lax.all_gather(g, AXIS, tiled=True).reshape(DEVICES, *g.shape).sum(0),
    "ppermute": lambda g: lax.pmean(g * lax.ppermute(g, AXIS, [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), AXIS),
    "psum_scatter": lambda g: lax.all_gather(lax.psum_scatter(g, AXIS, scatter_dimension=1), AXIS, axis=1),
    "all_to_all": lambda g: lax.pmean(lax.all_to_all(g, AXIS, 1, 0).reshape(g.shape), AXIS),
    "axis_index": lambda g: lax.psum(g * lax.axis_index(AXIS), AXIS),
    "two in a row": lambda g: lax.pmean(lax.psum(g, AXIS) ** 2, AXIS),
    "in a loop": lambda g: lax.fori_loop(0, 2, lambda i, x: lax.psum(x, AXIS) / 4, lax.pmean(g, AXIS)),
}


def step_of(use: Callable[[Any], Any]) -> Callable[..., Any]:
    def train_step(w: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: (jnp.tanh(batch["x"] @ w["w"]) ** 2).mean())(w)
        return {"w": w["w"] - 0.1 * use(grads["w"])}, loss

    return train_step


ALIKE = ("psum over the devices", "psum over axis_size", "psum of counts", "pmin", "all_gather tiled", "two in a row")
"""Uses of collectives that others of the list have too."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in ALIKE else ()) for n in USES])
def test_collectives_are_those_of_pmap(name: str) -> None:
    step, state = step_of(USES[name]), {"w": jnp.asarray(W)}
    local = {"x": BATCH["x"].reshape(DEVICES, 2, 4)}
    expected, losses = jax.pmap(step, AXIS, in_axes=(None, 0))(state, local)
    trace = StepTrace.of(step, (state, BATCH), {}, AXIS)
    new, loss = jax.jit(jax.extend.core.jaxpr_as_fun(trace.jaxpr))(W, BATCH["x"])
    np.testing.assert_allclose(new, expected["w"][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)


@pytest.mark.parametrize("name", few(["psum over the devices", "psum", "pmax"], 1))
def test_a_step_over_all_devices(name: str) -> None:
    step, state = step_of(USES[name]), {"w": jnp.asarray(W)}
    expected, losses = jax.pmap(step, AXIS, in_axes=(None, 0))(state, {"x": BATCH["x"].reshape(DEVICES, 2, 4)})
    parallel = jp.parallelize(step, state, BATCH, layout="fsdp", axis_name=AXIS)
    new, loss = parallel(parallel.state, BATCH)
    np.testing.assert_allclose(new["w"], expected["w"][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-5)


def test_errors() -> None:
    state = {"w": jnp.asarray(W)}
    with raises(ModelError, "axis_name"):
        jp.parallelize(step_of(lambda g: g + lax.axis_index(AXIS) * lax.psum(g, AXIS)), state, BATCH, axis_name=AXIS)
    with raises(LayoutError, "axis_name"):
        jp.parallelize(step_of(USES["psum"]), state, {"x": BATCH["x"][:12]}, axis_name=AXIS)


@pytest.mark.parametrize(("over", "size"), [(1, 1), (DEVICES, DEVICES)])
def test_means_inside_of_a_loss_are_those_of_the_global_batch(over: int, size: int) -> None:
    """Normalization over all devices, whose derivative sums what it has divided."""
    mean = lambda x: lax.pmean(x, AXIS) if over == 1 else lax.psum(x, AXIS) / jax.device_count()

    def step(w: Any, batch: Any) -> Any:
        def loss_fn(w: Any) -> jax.Array:
            h = batch["x"] @ w["w"]
            return ((h - mean(h.mean(0))) ** 4).mean()

        loss, grads = jax.value_and_grad(loss_fn)(w)
        return {"w": w["w"] - 0.1 * mean(grads["w"])}, mean(loss)

    flat = lambda w, x: jax.tree.leaves(step({"w": w}, {"x": x}))
    assert size_of_means(flat, (W, BATCH["x"]), AXIS) == size
    expected, losses = jax.pmap(step, AXIS, in_axes=(None, 0))({"w": W}, {"x": BATCH["x"].reshape(DEVICES, 2, 4)})
    trace = StepTrace.of(step, ({"w": jnp.asarray(W)}, BATCH), {}, AXIS)
    new, loss = jax.jit(jax.extend.core.jaxpr_as_fun(trace.jaxpr))(W, BATCH["x"])
    np.testing.assert_allclose(new, expected["w"][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, losses[0], rtol=1e-5)
