"""One step of a small model on a mesh, shared by the tests that compare a step with one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.parallel.experts.bias import BIAS

SGD = optax.sgd(0.1)
BOUND = 6e-6
"""Relative bound for the gradients of one step in fp32.

An entry sums some n = 100 tokens, and two orders of such a sum differ by up to n * eps / 2 = 6e-6 of the sum of
magnitudes. Measured: up to 1.3e-6, and up to a factor of three more or less on other instruction sets.
"""
LLAMA_RULES = jp.Rules(
    batch="data",
    seq=("context", "ulysses"),
    residual_seq=("context", "ulysses", "model"),
    embed=None,
    norm=None,
    heads="model",
    kv_heads="model",
    head_dim=None,
    mlp="model",
    vocab=("pipeline", "model"),
    layers="pipeline",
    params={"embed": "data"},
)
"""Rules for a Llama, or for a model with some of its names, over every axis."""


def layout_of(rules: jp.Rules, sizes: dict[str, int]) -> jp.Layout:
    """A layout on the first devices, as many as ``sizes`` need."""
    return jp.Layout(jp.MeshSpec(**sizes).build(jax.devices()[: int(np.prod(list(sizes.values())))]), rules)


@functools.cache
def leaves_of(make: Any, rules: jp.Rules, tx: Any = SGD) -> list[Any]:
    """The initial state's host leaves, cached: ``init`` gives the same in every layout, but compiles for each."""
    layout = layout_of(rules, {"data": 1})
    with jax.default_matmul_precision("highest"), layout:
        state = jp.init(layout, make, tx)
    data = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    host = lambda x: jax.random.wrap_key_data(np.asarray(jax.random.key_data(x))) if data(x) else np.asarray(x)
    return [host(leaf) for leaf in jax.tree.leaves(state)]


def initial(shapes: Any, make: Any, rules: jp.Rules, tx: Any = SGD) -> Any:
    """The state that ``abstract_state`` describes as ``shapes``, without a compile for its layout."""
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves_of(make, rules, tx))


def drawn(shapes: Any, seed: int = 0, scale: float = 1.0) -> Any:
    """Random values for the leaves of ``abstract_state``, placed as they are; ``init`` would compile a program."""
    rng = np.random.default_rng(seed)

    def value(like: Any) -> jax.Array:
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(seed), like.sharding)
        return jax.device_put(np.asarray(scale * rng.normal(size=like.shape)).astype(like.dtype), like.sharding)

    return jax.tree.map(value, shapes)


def one_step(layout: jp.Layout, loss: Any, make: Any, batch: Any, first: Any = None, **options: Any) -> Any:
    """Metrics, host gradients and the program of one step; ``first`` makes the same parameters as ``make``."""
    with jax.default_matmul_precision("highest"), layout:
        shapes = jp.abstract_state(layout, make, SGD)
        step = jp.train_step(layout, loss, return_grads=True, donate=False, **options)
        # These programs run once: optimizing them takes longer than running them.
        compiled = step.lower(shapes, batch).compile(compiler_options={"xla_backend_optimization_level": 0})
        state = initial(shapes, first or make, layout.rules)
        _, metrics = compiled(state, batch)
    grads = jax.device_get(metrics.pop("grads"))
    return {name: float(value) for name, value in metrics.items()}, grads, compiled


def check_grads(got: Any, want: Any, bound: float) -> None:
    """Compare relative to each tensor's largest entry; of a bias that balances experts only the sign has a meaning."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (keys, a), b in pairs:
        if jax.tree_util.keystr(keys[-1:], simple=True) == BIAS:
            a, b = np.sign(a), np.sign(b)
        assert np.abs(a - b).max() <= bound * np.abs(b).max(), jax.tree_util.keystr(keys)


def check_same(got: Any, want: Any) -> None:
    """Compare metrics and gradients."""
    for name, value in want[0].items():
        assert got[0][name] == pytest.approx(value, rel=2e-6, abs=2e-6), name
    check_grads(got[1], want[1], BOUND)
