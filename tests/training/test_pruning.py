"""Pruned weights are 0 and stay 0; masks are those of NumPy in every layout, sharded and saved like parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.compression import PruneConfig, prune, sparsity_of
from jaxpar.errors import ConfigError
from jaxpar.models import LlamaConfig, make_llama
from jaxpar.training.model import leaves_with_paths

RULES = jp.Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")


def layout_of(data: int, model: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model]), RULES)


def make_model(key: jax.Array) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": jp.tag(jax.random.normal(up, (16, 24)), "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (24, 16)), "mlp", "embed"),
        "bias": jp.tag(jnp.zeros(24), "mlp"),
    }


def loss_fn(model: Any, batch: Any) -> Any:
    return (((jnp.tanh(batch["x"] @ model["up"] + model["bias"]) @ model["down"]) - batch["x"]) ** 2).mean()


def trained(layout: jp.Layout, config: PruneConfig, steps: int, state: Any = None) -> Any:
    tx = OPTIMIZERS.setdefault(str(config), prune(optax.adam(1e-2), config))
    state = jp.init(layout, make_model, tx) if state is None else state
    step = STEPS.setdefault(layout, jp.train_step(layout, loss_fn, donate=False))
    for _ in range(steps):
        state, _ = step(state, {"x": X})
    return state


STEPS: dict[jp.Layout, Any] = {}
OPTIMIZERS: dict[str, Any] = {}
"""One optimizer for each configuration: a state is that of its own."""
HALF = PruneConfig(sparsity=0.5, begin=1, end=5, every=2)


@pytest.mark.slow
def test_the_sparsity_grows_and_pruned_numbers_stay_zero_in_every_layout(tmp_path: Path) -> None:
    one = trained(layout_of(1, 1), HALF, 2)
    assert sparsity_of(one.opt_state) == {"down": 0.0, "up": 0.0}  # 1 - (1 - t)**3 at t = 0
    one = trained(layout_of(1, 1), HALF, 2, one)
    assert sparsity_of(one.opt_state) == {"down": 168 / 384, "up": 168 / 384}  # half of 1 - 0.5**3 = 7 / 8
    layout = layout_of(2, 2)
    state = trained(layout, HALF, 4)
    for name in ("up", "down"):
        mask, w = state.opt_state.masks[name], state.params[name]
        assert mask.sharding.spec == w.sharding.spec and mask.dtype == bool
        np.testing.assert_array_equal(np.asarray(mask), np.asarray(one.opt_state.masks[name]))
        np.testing.assert_array_equal(np.asarray(w) == 0, ~np.asarray(mask))
    jp.save(tmp_path / "one", state, layout=layout)
    restored = jp.restore(tmp_path / "one", jp.abstract_state(layout, make_model, OPTIMIZERS[str(HALF)]))
    ends = [trained(layout, HALF, 3, start) for start in (state, restored)]
    assert sparsity_of(ends[0].opt_state) == {"down": 0.5, "up": 0.5}
    for a, b in zip(*(jax.tree.leaves((end.params, end.opt_state)) for end in ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not np.asarray(ends[0].params["up"])[~np.asarray(state.opt_state.masks["up"])].any()
    assert np.count_nonzero(ends[0].params["bias"]) == 24


RANDOM = np.random.default_rng(1).normal(size=(3, 40, 50))


@pytest.mark.parametrize(
    ("dtype", "values"),
    few(
        [
            ("float32", np.sign(RANDOM)),
            ("float32", RANDOM),
            ("float32", np.zeros(RANDOM.shape)),
            ("float64", RANDOM),
            ("bfloat16", RANDOM),
        ],
        2,
        names=2,
    ),
)
def test_the_first_of_the_smallest_numbers_are_pruned_also_where_many_are_equal(values: Any, dtype: str) -> None:
    """Equal numbers are told apart by their index, so as many are pruned as the sparsity says, in every layout."""
    with jax.enable_x64(dtype == "float64"):
        layout = layout_of(2, 2)
        near = 1 + 1e-12 * values if dtype == "float64" else values  # fp32 cannot tell these apart
        w = jax.device_put(jnp.asarray(near, dtype), layout.sharding((None, "batch", "mlp")))
        config = PruneConfig(sparsity=0.999, end=8)
        tx = prune(optax.sgd(0.0), config)
        update = jax.jit(tx.update)
        order = np.argsort(np.abs(np.asarray(w, np.float64)).reshape(-1), kind="stable")
        for step in (0, 1, 4, 8):
            state = tx.init({"w": w})._replace(count=jnp.asarray(step, jnp.int32))
            changes, state = update({"w": w}, state, {"w": w})
            after = np.asarray(optax.apply_updates({"w": w}, changes)["w"], np.float64).reshape(-1)
            expected = np.ones(w.size, bool)
            expected[order[: round(0.999 * (1 - (1 - step / 8) ** 3) * w.size)]] = False
            np.testing.assert_array_equal(np.asarray(state.masks["w"]).reshape(-1), expected)
            assert not after[~expected].any()


def llama_like(key: jax.Array) -> Any:
    """Two layers in a stack, with experts, norms, and biases of several dims under names that say nothing."""
    shapes = {
        "table": ((32, 8), ("vocab", "embed")),
        "blocks/q": ((2, 8, 2, 4), ("layers", "embed", "heads", "head_dim")),
        "blocks/shift": ((2, 2, 4), ("layers", "heads", "head_dim")),
        "blocks/norm": ((2, 8), ("layers", "embed")),
        "blocks/up": ((2, 3, 8, 16), ("layers", "experts", "embed", "mlp")),
        "blocks/up_shift": ((2, 3, 16), ("layers", "experts", "mlp")),
        "norm": ((8,), ("embed",)),
    }
    return {name: jp.tag(jnp.ones(shape), *dims) for name, (shape, dims) in shapes.items()}


MLP = ("gate", "up", "down")


def test_a_stack_of_vectors_is_never_pruned() -> None:
    dims = ("batch", "vocab", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "experts", "norm")
    layout = jp.Layout(jp.MeshSpec().abstract(), jp.Rules(**dict.fromkeys(dims), unannotated="replicate"))

    def pruned(make_model: Any, config: PruneConfig) -> set[str]:
        state = jp.abstract_state(layout, make_model, optax.chain(prune(optax.adam(1.0), config)))
        return {"/".join(path) for path, _ in leaves_with_paths(state.opt_state[0].masks)}

    every = PruneConfig(sparsity=0.5)
    assert pruned(llama_like, every) == {"table", "blocks/q", "blocks/up"}
    assert pruned(llama_like, PruneConfig(sparsity=0.5, targets=("blocks/shift",))) == {"blocks/shift"}
    llama = make_llama(LlamaConfig(vocab=32, embed=8, layers=2, heads=2, mlp=16, qkv_bias=True, qk_norm=True))
    assert {name.rpartition("/")[2] for name in pruned(llama, every)} == {"embedding", "head", *"qkvo", *MLP}
    unnamed = {"dense": {"kernel": jnp.ones((2, 8, 8)), "bias": jnp.ones((2, 8))}, "norm": {"scale": jnp.ones((2, 8))}}
    assert pruned(lambda _: unnamed, every) == {"dense/kernel"}  # a stack of Linen layers without names of its dims
    with raises(ConfigError, "blocks/*norm"):
        pruned(llama_like, PruneConfig(sparsity=0.5, targets=("blocks/*norm",)))


@pytest.mark.slow
def test_a_pattern_keeps_the_largest_of_neighbours_along_the_inputs() -> None:
    config = PruneConfig(pattern=(2, 4), targets=("up", "down"))
    state = trained(layout_of(2, 2), config, 3)
    for name in ("up", "down"):
        mask = np.asarray(state.opt_state.masks[name])
        groups = mask.reshape(mask.shape[0] // 4, 4, -1)
        assert (groups.sum(1) == 2).all()
        np.testing.assert_array_equal(np.asarray(state.params[name]) == 0, ~mask)


def test_a_pattern_keeps_the_first_of_equal_neighbours_and_leaves_vectors() -> None:
    params = {"w": jnp.array([[1.0, 2.0, 2.0, 2.0]]), "bias": jnp.array([0.0, 1.0])}
    tx = prune(optax.sgd(0.0), PruneConfig(pattern=(1, 2), axis={"w": 1}))
    changes, state = jax.jit(tx.update)(params, tx.init(params), params)
    after = optax.apply_updates(params, changes)
    assert after["w"].tolist() == [[0.0, 2.0, 2.0, 0.0]] and after["bias"].tolist() == [0.0, 1.0]
    assert sparsity_of(state) == {"w": 0.5}
    with raises(ConfigError, "prune", "update"):
        tx.update(params, state)


def test_settings_that_do_not_fit_are_errors() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "sparsity or pattern"),
        ({"sparsity": 0.5, "pattern": (2, 4)}, "sparsity or pattern"),
        ({"sparsity": 1.0}, "prune: sparsity"),
        ({"pattern": (4, 4)}, "prune: pattern"),
    ]
    for options, name in cases:
        with raises(ConfigError, name):
            PruneConfig(**options)
    with raises(ConfigError, "prune: begin"):
        PruneConfig(sparsity=0.5, begin=5, end=2)
    params = {"up": jnp.ones((6, 8)), "bias": jnp.ones(8)}
    for config, name in (
        (PruneConfig(sparsity=0.5, targets=("upp",)), "'upp'"),
        (PruneConfig(pattern=(2, 4)), "prune: up"),
    ):
        with raises(ConfigError, name):
            prune(optax.sgd(0.1), config).init(params)
