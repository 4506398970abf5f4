"""A parallelized script is right where XLA's partitioner is not, and says what it does instead."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxpar as jp


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.gelu(linen.Conv(8, (3, 3))(x))
        x = linen.gelu(linen.Conv(8, (3, 3), feature_group_count=8, strides=2)(x))
        return linen.Dense(4)(x.mean((1, 2)))


def train_step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    loss = lambda params: ((Net().apply(params, batch["x"]) - batch["y"]) ** 2).mean()
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


@pytest.mark.slow
def test_depthwise_convolutions_beside_an_idle_axis() -> None:
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(8, 16, 16, 3)), "y": random.normal(size=(8, 4))}
    batch = {name: x.astype(np.float32) for name, x in batch.items()}
    params = Net().init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
    with jp.unsharded():
        expected, _ = jax.jit(train_step)(copy.deepcopy(params), batch)
    whole = dict.fromkeys(("height", "width", "channels", "channels_2", "features"))
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), jp.Rules(batch="data", **whole))
    step = jp.parallelize(train_step, params, batch, layout=layout)
    assert "wrong in XLA" not in str(step)
    with pytest.warns(UserWarning, match="times its share"):  # the axis that shards nothing
        result, _ = step(step.state, batch)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert "kernel gradient of a grouped convolution" in str(step) and "The step runs it slice by slice" in str(step)
