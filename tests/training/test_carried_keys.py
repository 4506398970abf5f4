"""PRNG keys that a model carries (``nnx.Rngs``): devices that reduce once per step draw different numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp
from jaxpar.nnx import axes


class Dropped(nnx.Module):
    """Dropout before a linear layer of ones: the output is the sum of the kept entries of each row."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Linear(64, 1, kernel_init=axes(nnx.initializers.ones)("embed", None), use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def loss(model: Dropped, batch: Any) -> Any:
    kept = model.drop(batch["x"])
    number = (kept * jnp.arange(64)).sum(1).mean()  # differs between masks
    return (model.w(kept) ** 2).mean(), {"number": number, "square": number**2}


def test_each_device_drops_out_its_own_and_the_key_is_carried_as_it_was() -> None:
    zero = jp.Zero(1, min_bytes=0)
    layout = jp.Layout(jp.MeshSpec(data=8).build(), zero.rules(jp.Rules(batch="data", embed=None)))
    state = jp.init(layout, lambda key: Dropped(nnx.Rngs(key)), optax.sgd(0.1))
    bits = lambda state: jax.random.key_data(state.variables["drop"]["rngs"]["key"])
    before, step = np.asarray(bits(state)), jp.train_step(layout, loss, **zero.step)
    batch = {"x": jp.shard_array(layout, np.ones((16, 64), np.float32), "batch", None)}
    numbers = []
    for calls in (1, 2):
        state, metrics = step(state, batch)
        numbers.append((float(metrics["number"]), float(metrics["square"])))
        count = state.variables["drop"]["rngs"]["count"]
        assert all(np.array_equal(before, shard.data) for shard in bits(state).addressable_shards)
        assert len({int(shard.data) for shard in count.addressable_shards}) == 1
        assert int(count) == calls
    # The variance would be 0 with the same mask on all devices.
    assert all(square - mean**2 > 1e4 for mean, square in numbers)
    assert numbers[0] != numbers[1]
