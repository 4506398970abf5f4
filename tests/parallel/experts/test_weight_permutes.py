"""``experts(overlap=True)``: weights that are gathered as permutes, against a dense loop over experts."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import covering

import jaxpar as jp
from jaxpar.parallel.zero.gather import all_but_gathered

E = 4
IN, OUT = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
DIMS = {"router": (None, None), "gate": IN, "up": IN, "down": OUT}
RULES = jp.Rules(
    batch=("data", "expert"), seq=None, embed=None, experts="expert", expert_mlp=None, params={"embed": "data"}
)


def problem(embed: int, rows: int) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(embed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]))
    shapes = {"router": (embed, E), "gate": (E, embed, 5), "up": (E, embed, 5), "down": (E, 5, embed)}
    return {name: normal(*shape) for name, shape in shapes.items()}, normal(rows, 4, embed)


def mixture(w: dict[str, jax.Array], x: jax.Array, **options: Any) -> jax.Array:
    routing = jp.moe.Router(E, 2)(x @ w["router"])
    return jp.experts(x, routing, *((w[name], DIMS[name]) for name in ("gate", "up", "down")), **options)[0]


def dense(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    routing = jp.moe.Router(E, 2)(x @ w["router"])
    shares = jnp.sum(jax.nn.one_hot(routing.experts, E, dtype=x.dtype) * routing.weights[..., None], -2)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w["gate"])) * jnp.einsum("bsd,edf->bsef", x, w["up"])
    return jnp.einsum("bsef,efd,bse->bsd", hidden, w["down"], shares)


def gradients(f: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda w, x: jnp.mean(jnp.sin(f(w, x)) ** 2), (0, 1)))


def layout(data: int, expert: int) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=data, expert=expert).build(jax.devices()[: data * expert]), RULES)


SIZES = [(4, 2, 12), (4, 2, 4), (3, 2, 12), (2, 4, 10), (2, 2, 16)]
"""Data, expert, embed: the last is 3, 1, 4, 5 or 8 on a device."""


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dtype"), covering(SIZES, [np.float32, np.float64], keep=1, strength=1), ids=str)
def test_values_and_gradients_are_those_of_a_dense_loop(sizes: tuple[int, int, int], dtype: Any) -> None:
    data, expert, embed = sizes
    with jax.enable_x64(True):
        w, x = problem(embed, data * expert)
        value, grads = jax.tree.map(np.asarray, gradients(dense)(w, x))
        here = layout(data, expert)
        narrow = lambda a, dims, role: jax.device_put(a.astype(dtype), here.sharding(dims, a.shape, role=role))
        with here:
            w = {name: narrow(a, DIMS[name], "params") for name, a in w.items()}
            x = narrow(x, ("batch", "seq", "embed"), "activations")
            run = gradients(lambda w, x: mixture(w, x, overlap=True))
            assert "ppermute" in str(jax.make_jaxpr(run)(w, x))
            got_value, got = run(w, x)
    bound = 1e-6 if dtype == np.float32 else 1e-13
    assert abs(float(got_value) - float(value)) <= bound * float(value)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(grads), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= bound * np.linalg.norm(b)


@pytest.mark.parametrize(("data", "does"), [(4, True), (8, False)])
def test_weights_travel_as_permutes_over_few_devices(data: int, does: bool) -> None:
    w, x = jax.eval_shape(lambda: problem(32, 16))
    with jp.Layout(jp.MeshSpec(data=data, expert=16 // data).on("v5e:4x4"), RULES):
        text = str(jax.make_jaxpr(jax.grad(lambda w, x: mixture(w, x, overlap=True, dispatch="gather").sum()))(w, x))
    assert ("ppermute" in text) is does
    assert bool(re.search(r"all_gather\[[^\]]*axis_name=\('data',\)", text, re.DOTALL)) is not does


def test_a_policy_that_gathers_again_keeps_no_gathered_weight() -> None:
    w, x = problem(12, 8)

    def kept(overlap: bool) -> int:
        run = jax.checkpoint(lambda w, x: mixture(w, x, overlap=overlap).sum(), policy=all_but_gathered)
        backward = jax.eval_shape(lambda w, x: jax.vjp(run, w, x)[1], w, x)
        return sum(a.size for a in jax.tree.leaves(backward))

    with layout(4, 2):
        assert kept(True) == kept(False)
