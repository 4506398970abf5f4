"""Models and losses of other forms: annotated by Flax, ensembles, and steps that are loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.errors import ModelError

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}


class Annotated(nnx.Module):
    """A feed-forward layer whose dims Flax's own annotations name."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        named = lambda *dims: nnx.with_partitioning(init, dims)
        self.up = nnx.Linear(16, 32, kernel_init=named("width", "hidden"), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=named("hidden", "width"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def nnx_step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: ((model(batch["x"]) - batch["x"]) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_annotations_of_nnx_are_read() -> None:
    with nnx.use_eager_sharding(False):
        model, reference = Annotated(nnx.Rngs(0)), Annotated(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        expected = nnx_step(reference, nnx.Optimizer(reference, optax.sgd(0.1), wrt=nnx.Param), BATCH)
    layout = jp.Layout(
        jp.MeshSpec(data=4, model=2).build(),
        jp.Rules(batch="data", width=None, hidden="model", params={"width": "data"}),
    )
    step = jp.parallelize(nnx_step, model, optimizer, BATCH, layout=layout)
    places = {array.path: (array.names, array.resolved.axes) for array in step.placed}
    assert places["model/up/kernel"] == (("width", "hidden"), (("data",), ("model",)))
    assert places["model/up/bias"][0] == ("hidden",)
    assert places["optimizer/opt_state/0/trace/down/kernel"][0] == ("hidden", "width")
    np.testing.assert_allclose(step(model, optimizer, BATCH), expected, rtol=1e-5)


def test_annotations_of_linen_are_read() -> None:
    init = nn.initializers.lecun_normal()
    model = nn.Dense(32, kernel_init=nn.with_partitioning(init, ("width", "hidden")))
    params = model.init(jax.random.key(0), BATCH["x"])["params"]

    def step(params: Any, batch: Any) -> Any:
        loss_fn = lambda p: (model.apply({"params": p}, batch["x"]) ** 2).mean()
        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    parallel = jp.parallelize(step, params, BATCH, layout="fsdp")
    names = {array.path: array.names for array in parallel.placed}
    assert names["params/kernel/value"] == ("width", "hidden") and names["params/bias"] == ("hidden",)


def member_step(params: Any, batch: Any) -> Any:
    loss_fn = lambda p: ((jax.nn.relu(batch["x"] @ p["up"]) @ p["down"] - batch["x"]) ** 2).mean()
    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def members(count: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(keys[0], (count, 16, 32)) / 4,
        "down": jax.random.normal(keys[1], (count, 32, 16)) / 6,
    }


def test_an_ensemble() -> None:
    step = jax.vmap(member_step, in_axes=(0, None))
    expected, losses = step(members(3), BATCH)
    parallel = jp.parallelize(step, members(3), BATCH, layout="fsdp")
    new, found = parallel(parallel.state, BATCH)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce", [lambda losses: losses, jnp.mean])
def test_steps_in_a_loop(reduce: Any) -> None:
    def steps(params: Any, batches: Any) -> Any:
        params, losses = jax.lax.scan(member_step, params, batches)
        return params, reduce(losses)

    params = jax.tree.map(lambda x: x[0], members(1))
    with raises(ModelError, "train_step", "takes"):
        jp.parallelize(steps, params, {"x": np.stack([BATCH["x"]] * 4)})
