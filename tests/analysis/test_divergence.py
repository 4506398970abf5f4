"""A comparison of layouts that finds a difference reports it and its place, whatever the loss is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.analysis.compare import Verdict, compare
from jaxpar.analysis.divergence import difference, size
from jaxpar.models import remat_layers
from tests.covers import covering

ROWS, WIDTH, INNER = 16, 8, 16
Change = Callable[[jax.Array], jax.Array]


def on_many() -> bool:
    """Whether the loss is computed in a layout of several devices; names are found without one."""
    return not jax.sharding.get_abstract_mesh().empty and jp.current_layout().mesh.size > 1


CHANGES: dict[str, Change] = {
    "values": lambda x: 1.01 * x if on_many() else x,
    "gradients": lambda x: 1.01 * x - 0.01 * jax.lax.stop_gradient(x) if on_many() else x,
    "not finite": lambda x: x * jnp.nan if on_many() else x,
    "not finite anywhere": lambda x: x * jnp.nan,
}
"""What a layout computes otherwise than one device."""


def entropy(logits: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"right": (logits.argmax(-1) == batch["y"]).sum(), "any": jnp.any(logits > 9)}


def tagged(change: Change) -> Any:
    """Its hints are of floats, integers, choices and keys."""
    shapes = {"up": (WIDTH, INNER), "down": (INNER, 4)}
    names = {"up": ("embed", "mlp"), "down": ("mlp", None)}
    make = lambda key: {n: jp.tag(0.3 * jax.random.normal(key, shape), *names[n]) for n, shape in shapes.items()}

    def loss(p: Any, batch: Any) -> Any:
        h = jp.hint(jnp.tanh(batch["x"] @ p["up"]), "batch", "mlp")
        for other in (h > 0, (3 * h).astype(jnp.uint8), h.astype(jnp.bfloat16)):
            jp.hint(other, "batch", "mlp")
        jp.hint(jax.random.wrap_key_data(batch["words"]), "batch")
        return entropy(jp.hint(change(h), "batch", "mlp") @ p["down"], batch)

    return make, loss


def plain(change: Change) -> Any:
    shapes = {"up": (WIDTH, INNER), "down": (INNER, 4)}
    make = lambda key: {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}
    return make, lambda p, batch: entropy(change(jnp.tanh(batch["x"] @ p["up"])) @ p["down"], batch)


def layers(change: Change) -> Any:
    """Recomputed layers in a scan, a jitted function in them, and dropout."""

    def make(key: jax.Array) -> Any:
        shapes = {"first": (WIDTH, INNER), "layers": (3, INNER, INNER), "down": (INNER, 4)}
        return {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}

    def loss(p: Any, batch: Any, key: jax.Array) -> Any:
        layer = lambda x, w: (x + change(jnp.tanh(jax.jit(lambda x: x @ w)(x))), None)
        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ p["first"], p["layers"])
        return entropy(x * jax.random.bernoulli(key, 0.5, x.shape) @ p["down"], batch)

    return make, loss


class Normed(nn.Module):
    change: Change

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.variable("count", "calls", lambda: jnp.zeros((), jnp.int32)).value += 1
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(INNER)(x)))
        return nn.Dense(4)(self.change(x))


def linen(change: Change) -> Any:
    module = Normed(change)

    def loss(variables: Any, batch: Any) -> Any:
        out, updates = module.apply(variables, batch["x"], mutable=["batch_stats", "count"])
        return *entropy(out, batch), updates

    return lambda key: module.init(key, jnp.ones((2, WIDTH))), loss


class Dropped(nnx.Module):
    def __init__(self, key: jax.Array, change: Change):
        rngs = nnx.Rngs(key)
        self.up, self.down = nnx.Linear(WIDTH, INNER, rngs=rngs), nnx.Linear(INNER, 4, rngs=rngs)
        self.dropout, self.change = nnx.Dropout(0.3, rngs=nnx.Rngs(1)), change

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(self.change(nnx.relu(self.up(x)))))


def module(change: Change) -> Any:
    return lambda key: Dropped(key, change), lambda model, batch: entropy(model(batch["x"]), batch)


MODELS: dict[str, Callable[[Change], Any]] = {
    "named by hand": tagged,
    "found": plain,
    "found, in a scan": layers,
    "found, recomputed by a policy": layers,
    "found, Linen": linen,
    "found, NNX": module,
}


def outcome(model: str, change: Change, **options: Any) -> Verdict:
    make_model, loss_fn = MODELS[model](change)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(ROWS, WIDTH)).astype("float32"), "y": rng.integers(0, 4, ROWS).astype("int32")}
    batch["words"] = rng.integers(0, 9, (ROWS, 2)).astype("uint32")
    rules, dims = jp.Rules(batch="data", embed=None, mlp="model"), {"x": ("batch", None), "y": ("batch",)}
    dims["words"] = ("batch", None)
    if model != "named by hand":
        found = jp.annotate(make_model, loss_fn, batch)
        make_model, loss_fn, dims = found.make_model, found.loss_fn, dict(found.batch_dims)
        rules = found.rules(batch="data", embed="model")
    if "policy" in model:
        loss_fn = remat_layers(loss_fn, "full")
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).build(), rules)
    tx = optax.sgd(0.1)
    return compare(layout.on_one_device(), layout, make_model, tx, loss_fn, [batch], dims, bound=1e-5, **options)


@pytest.mark.parametrize(("model", "change"), covering(MODELS, CHANGES, keep=1, strength=1))
def test_a_difference_is_reported(model: str, change: str) -> None:
    verdict = outcome(model, CHANGES[change])
    assert not verdict.passed
    assert verdict.first is not None and verdict.first.endswith(", step 1")
    if change == "gradients":
        assert verdict.first.startswith("the gradient of ") and verdict.first.endswith(
            "every activation agrees, step 1"
        )
    elif change == "not finite anywhere":
        assert verdict.first.startswith("one device's step is not finite: ")
    else:
        assert "its activation differs by" in verdict.first


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"grad_accum_steps": 2}, {"precision": "bfloat16"}], ids=str)
def test_dropout_of_other_pieces_and_rounding_are_reported(options: dict[str, Any]) -> None:
    """Each microbatch draws other numbers than the batch in one piece."""
    assert not outcome("found, in a scan", lambda x: x, **options).passed


def test_differences_of_any_dtype() -> None:
    inf, nan = np.inf, np.nan
    assert difference(np.array([True, False]), np.array([False, False])) == 1
    assert difference(np.array([0], np.uint8), np.array([255], np.uint8)) == 255
    assert difference(np.array([inf, -inf, 1.0]), np.array([inf, -inf, 3.0])) == 2
    assert np.isnan(difference(np.array([nan]), np.array([nan])))
    assert difference(np.array([nan, 1.0]), np.array([nan, 1.5]), nan_equal=True) == 0.5
    assert np.isinf(difference(np.array([inf]), np.array([-inf])))
    assert np.isnan(difference(np.array([nan]), np.array([1.0]), nan_equal=True))
    assert difference(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert difference(np.asarray(jnp.bfloat16([1.5])), np.asarray(jnp.bfloat16([1.0]))) == 0.5
    assert difference(np.array([1 + 1j]), np.array([1 - 1j])) == 2
    assert size(np.array([-3.0, nan, -inf])) == 3 and size(np.array([nan])) == 0 and size(np.array([True])) == 1
