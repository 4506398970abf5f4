"""Rows of the neighbours of a slice, against slices of the padded whole."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.parallel.spatial.halo import exchange_halo

DEVICES, SIZE = 4, 3


@pytest.mark.parametrize("words", [{}, {"fill": -np.inf}, {"circular": True}], ids=["zeros", "fill", "circular"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (0, 3), (2, 0)])
def test_a_slice_and_its_halo_are_a_part_of_the_padded_whole(words: dict[str, Any], before: int, after: int) -> None:
    x = np.random.default_rng(0).normal(size=(DEVICES * SIZE, 2)).astype(np.float32) - 3
    mode: Any = {"mode": "wrap"} if "circular" in words else {"constant_values": words.get("fill", 0.0)}
    padded = np.pad(x, ((before, after), (0, 0)), **mode)
    mesh = jp.MeshSpec(context=DEVICES).build(jax.devices()[:DEVICES])
    exchange = lambda x: exchange_halo(x, 0, ("context",), before, after, **words)
    slices = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("context"), out_specs=P("context")))(x)
    for i, own in enumerate(np.split(np.asarray(slices), DEVICES)):
        np.testing.assert_array_equal(own, padded[i * SIZE : (i + 1) * SIZE + before + after])
