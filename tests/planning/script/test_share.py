"""Batches whose arrays begin with other sizes, and the share of a step that a device computes."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp

NODES, GRAPHS, FEATURES, HIDDEN, CLASSES = 1024, 16, 16, 64, 8


def graph(nodes: int = NODES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, 4 * NODES), dtype=np.int32)
    return {
        "nodes": rng.normal(size=(nodes, FEATURES)).astype(np.float32),
        "senders": ends[0],
        "receivers": ends[1],
        "labels": np.eye(CLASSES, dtype=np.float32)[rng.integers(0, CLASSES, GRAPHS)],
        "graph": np.sort(rng.integers(0, GRAPHS, nodes)).astype(np.int32),
        "weights": np.linspace(1, 2, CLASSES, dtype=np.float32),
    }


def new_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {"in": (FEATURES, HIDDEN), "hidden": (HIDDEN, HIDDEN), "out": (HIDDEN, CLASSES)}
    return {name: jax.random.normal(key, sizes[name]) / 8 for name, key in zip(sizes, keys, strict=True)}


def train_step(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        h = jax.nn.relu(batch["nodes"] @ params["in"])
        sums = jax.ops.segment_sum(h[batch["senders"]], batch["receivers"], len(h))
        h = h + jax.nn.relu(sums @ params["hidden"])
        logits = jax.ops.segment_sum(h, batch["graph"], GRAPHS) @ params["out"]
        return (optax.softmax_cross_entropy(logits, batch["labels"] * batch["weights"])).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_each_dim_that_is_data_is_sharded() -> None:
    expected, reference = train_step(new_params(), graph())
    step = jp.parallelize(train_step, new_params(), graph(), layout="data")
    whole = {a.path for a in step.placed if a.role == "activations" and not a.resolved.axes[0]}
    assert whole == {"batch/weights"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, loss = step(step.state, graph())
    np.testing.assert_allclose(loss, reference, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_a_device_that_computes_more_than_its_share_warns() -> None:
    odd = graph(NODES + 1)
    _, reference = train_step(new_params(), odd)
    step = jp.parallelize(train_step, new_params(), odd, layout="data")
    with pytest.warns(UserWarning) as caught:
        _, loss = step(step.state, odd)
    assert str(caught[0].message) == (
        "train_step: each of the 8 devices computes 1.00 of the step's matmuls, 8.0 times its share. Every device has "
        "all of batch/nodes [1025, 16], batch/graph [1025]. Remedy: pass arrays of the batch whose first dims are "
        "multiples of 8, or choose another layout: print(train_step) shows the dims and how they are sharded."
    )
    np.testing.assert_allclose(loss, reference, rtol=1e-5)
