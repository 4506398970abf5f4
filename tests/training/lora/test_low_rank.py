"""Weights with adapters are followed through a program, and are the sum where they cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.training.lora import low_rank
from jaxpar.training.lora.low_rank import RANK, LowRank
from jaxpar.training.lora.program import LowRankRun
from jaxpar.utils.jaxprs import equations, opened, with_inlined

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 8)).astype("float32")
normal = lambda *shape: RNG.normal(scale=0.4, size=shape).astype("float32")


def weight(*shape: int, split: int = 1, stacked: int = 0, rank: int = 2) -> LowRank:
    """A weight with ``stacked`` dims, then ``split`` inputs, then outputs."""
    middle = stacked + split
    a, b = normal(*shape[:middle], rank), normal(*shape[:stacked], rank, *shape[middle:])
    labels = (*range(middle), RANK), (*range(stacked), RANK, *range(middle, len(shape)))
    return low_rank.low_rank(normal(*shape), a, b, *labels, 0.5)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w)[0]


def recomputed(w: jax.Array, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda c, w: jnp.tanh(c @ w), prevent_cse=False)
    return jax.lax.scan(lambda c, w: (layer(c, w), w), x, w, reverse=True)[0]


def joined(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ jnp.concatenate([w, 2 * jnp.ones((8, 3)), w], 1)


FOLLOWED: dict[str, tuple[Callable[[Any, Any], Any], LowRank]] = {
    "product": (lambda w, x: x @ w, weight(8, 6)),
    "product from the left": (lambda w, x: w.T @ x.T, weight(8, 6)),
    "outputs summed": (lambda w, x: x @ w.T, weight(6, 8)),
    "heads": (lambda w, x: jnp.einsum("be,ehd->bhd", x, w), weight(8, 3, 4)),
    "heads as a matrix": (lambda w, x: x @ w.reshape(8, 12), weight(8, 3, 4)),
    "matrix as heads": (lambda w, x: jnp.einsum("be,ehd->hbd", x, w.reshape(8, 3, 1, 4)[:, :, 0]), weight(8, 12)),
    "back from heads": (lambda w, x: jnp.einsum("bhd,hde->be", x.reshape(5, 2, 4), w), weight(2, 4, 6, split=2)),
    "experts": (lambda w, x: jnp.einsum("xbe,xef->xbf", jnp.stack([x, x, x]), w), weight(3, 8, 6, stacked=1)),
    "layer of a stack": (lambda w, x: x @ w[1], weight(3, 8, 6, stacked=1)),
    "layers unstacked": (lambda w, x: sum(x @ one for one in w), weight(3, 8, 6, stacked=1)),
    "heads split": (lambda w, x: x @ jnp.split(w, [2, 5], 1)[1], weight(8, 6)),
    "columns": (lambda w, x: x @ w[:, 1:4], weight(8, 6)),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), weight(8, 6)),
    "scan": (scanned, weight(3, 8, 8, stacked=1)),
    "scan over inputs": (lambda w, x: jax.lax.scan(lambda c, row: (c, c[:, :6] @ row), x, w)[1], weight(8, 6, 4)),
    "constant of a scan": (
        lambda w, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 3)[0],
        weight(8, 8),
    ),
    "recomputed": (recomputed, weight(3, 8, 8, stacked=1)),
    "jit": (lambda w, x: jax.jit(lambda w: x @ w)(w), weight(8, 6)),
    "joined": (joined, weight(8, 4)),
    "joined inputs": (lambda w, x: x @ jnp.concatenate([w, w]), weight(4, 6)),
}
SUMMED: dict[str, tuple[Callable[[Any, Any], Any], LowRank]] = {
    "element by element": (lambda w, x: x @ (w * w), weight(8, 6)),
    "lookup": (lambda w, x: w[jnp.array([0, 3])], weight(8, 6)),
    "inputs and outputs joined": (lambda w, x: x[0] @ w.reshape(8, 4)[:, :2], weight(4, 8)),
    "carry": (lambda w, x: jax.lax.scan(lambda w, _: (w + 1, None), w, None, 2)[0], weight(8, 6)),
    "with itself": (lambda w, x: w @ w.T, weight(8, 6)),
    "branch": (lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ (2 * w)), weight(8, 6)),
    "custom derivative": (lambda w, x: jax.nn.relu(w).sum(), weight(8, 6)),
}


def results(function: Callable[[Any, Any], Any], w: LowRank) -> tuple[Any, Any, int]:
    """Value and gradients of the adapter: through the program, and of the sum; and the number of sums."""
    traced = with_inlined(jax.make_jaxpr(function)(w.w, X))
    count = itertools.count()

    def through(a: Any, b: Any) -> Any:
        run = LowRankRun(opened(traced), getattr(traced, "consts", ()))
        with pytest.MonkeyPatch.context() as patch:
            plain = LowRank.merged
            patch.setattr(LowRank, "merged", lambda self: (next(count), plain(self))[1])
            (out,) = run.run([LowRank(w.w, a, b, w.a_dims, w.b_dims, w.scale), X])
            out = out.merged() if isinstance(out, LowRank) else out
        return (jnp.sin(out.astype(jnp.float32))).sum(), out

    def summed(a: Any, b: Any) -> Any:
        out = function(LowRank(w.w, a, b, w.a_dims, w.b_dims, w.scale).merged(), X)
        return (jnp.sin(out.astype(jnp.float32))).sum(), out

    grad = lambda f, *ab: jax.value_and_grad(f, (0, 1), has_aux=True)(*ab)
    mine, theirs = jax.jit(lambda *ab: (grad(through, *ab), grad(summed, *ab)))(w.a, w.b)
    return mine, theirs, next(count)


@pytest.mark.parametrize("name", few([*FOLLOWED, *SUMMED], 7))
def test_value_and_gradients_are_those_of_the_sum(name: str) -> None:
    function, w = (FOLLOWED | SUMMED)[name]
    mine, theirs, count = results(function, w)
    tolerance = 0.3 if name == "cast" else 1e-5
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance)
    assert (count > 0) == (name in SUMMED)


def test_a_followed_product_has_no_gradient_of_the_size_of_the_weight() -> None:
    w = weight(8, 6)
    traced = jax.make_jaxpr(lambda w, x: x @ w)(w.w, X)
    run = lambda a, b: LowRankRun(opened(traced)).run([LowRank(w.w, a, b, w.a_dims, w.b_dims, w.scale), X])[0].sum()
    made = [eqn.outvars[0].aval.shape for eqn in equations(jax.make_jaxpr(jax.grad(run, (0, 1)))(w.a, w.b).jaxpr)]
    assert not {(8, 6), (6, 8)} & set(made)
    assert (8, 2) in made or (2, 8) in made


def test_a_product_with_the_weight_on_the_left_is_followed() -> None:
    w, x = weight(8, 6), normal(6, 5)
    out = jax.ShapeDtypeStruct((8, 5), "float32")
    added = low_rank.product(x, w, (((1,), (0,)), ((), ())), True, out, None)
    np.testing.assert_allclose(w.w @ x + added, w.merged() @ x, rtol=1e-5, atol=1e-5)


def test_what_is_no_product_of_two_is_not_followed() -> None:
    w = weight(8, 6)
    other = jax.ShapeDtypeStruct((5,), "float32")
    assert low_rank.product(X[:, :6] @ np.ones((6, 8)), w, (((0, 1), (1, 0)), ((), ())), False, other, None) is None
    across = low_rank.transposed(weight(6, 8), normal(8, 6), (1, 0))
    assert low_rank.concatenated([w, across], normal(16, 6), 0) is None
    assert low_rank.reshaped(weight(0, 6), np.zeros((6, 0))) is None
    assert low_rank.reshaped(w, normal(2, 24)) is None
    row = low_rank.reshaped(w, normal(1, 8, 6, 1))
    assert row is not None and row.merged().shape == (1, 8, 6, 1)
    added = row.merged() - row.w
    np.testing.assert_allclose(added[0, :, :, 0], w.merged() - w.w, rtol=1e-5, atol=1e-5)


LAYOUT = {"batch": "data", "embed": None, "mlp": "model", "params": {"embed": "data"}}


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], 1))
def test_sharded_products_and_gathers_are_followed(dtype: str) -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), jp.Rules.from_dict(LAYOUT))
    up, gate, down = weight(8, 12), weight(8, 12, rank=1), weight(12, 8)

    def loss(model: Any, batch: Any) -> Any:
        names = ("embed", "mlp")
        g, u = jp.sharded_dot(batch["x"], (model["gate"], names), (model["up"], names), dtype=jnp.dtype(dtype))
        return ((g * u) @ jp.gather_weight(model["down"], "mlp", "embed", dtype=jnp.dtype(dtype))).mean()

    dims = {"up": ("embed", "mlp"), "gate": ("embed", "mlp"), "down": ("mlp", "embed")}
    weights = {"up": up, "gate": gate, "down": down}
    make = lambda key: {name: jp.tag(jnp.asarray(w.w), *dims[name]) for name, w in weights.items()}
    state = jp.init(layout, jp.lora.adapt(make, jp.lora.LoraConfig(rank=2)), optax.sgd(1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LowRank, "merged", lambda self: pytest.fail("a weight was summed"))
        step = jp.train_step(layout, loss, donate=False, return_grads=True)
        x = normal(8, 8).astype(dtype)
        _, metrics = step(state, {"x": x})
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(metrics["grads"]))
    assert float(jnp.abs(metrics["grads"]["up"]["lora_b"]).max()) > 0
