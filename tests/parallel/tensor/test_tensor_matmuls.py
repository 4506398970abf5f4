"""Matmuls in two, 2.5 and three dimensions: values and gradients of one device, and the bytes of the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.ad_checkpoint import checkpoint_name

import jaxpar as jp
from jaxpar.parallel.tensor import local
from jaxpar.parallel.tensor.matmul import routes
from jaxpar.parallel.tensor.traffic import Matmuls
from tests.profiles import few

BASE = jp.Rules(batch="data", embed=None, mlp=None)
GRIDS = [
    ("2d", {"x": 2, "y": 4}),
    ("2d", {"x": 4, "y": 2}),
    ("2d", {"x": 8, "y": 1}),
    ("2.5d", {"x": 2, "y": 2, "z": 2}),
    ("2.5d", {"x": 2, "y": 4, "z": 1}),
    ("2.5d", {"x": 2, "y": 2, "data": 2}),
    ("2d", {"x": 2, "y": 2, "data": 2}),
    ("3d", {"x": 2, "y": 1, "z": 4}),
    ("3d", {"x": 1, "y": 2, "z": 2, "data": 2}),
    ("3d", {"x": 2, "y": 2, "z": 2}),
]
UP, DOWN = ("embed", "mlp"), ("mlp", "embed")
# Odd multiples of the grids.
BATCH, SEQ, EMBED, MLP = 8, 3, 24, 40


def layout_of(kind: Any, mesh: dict[str, int], rules: jp.Rules = BASE, **changes: Any) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(**mesh).build(), jp.tensor.rules(kind, rules).replace(**changes))


def arrays() -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(0)
    shapes = [(BATCH, SEQ, EMBED), (EMBED, MLP), (EMBED, MLP), (MLP, EMBED), (BATCH, SEQ, EMBED)]
    return tuple(random.normal(size=shape).astype(np.float32) for shape in shapes)


def mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A gated MLP: two weights share an input."""
    a, b = jp.sharded_dot(x, (gate, UP), (up, UP))
    (y,) = jp.sharded_dot(a * b, (down, DOWN))
    return jp.hint(y, "batch", None, "embed")


def pair(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two linear layers, whose communication the formulas count."""
    (u,) = jp.sharded_dot(x, (up, UP))
    (y,) = jp.sharded_dot(jp.hint(u, "batch", None, "mlp"), (down, DOWN))
    return jp.hint(y, "batch", None, "embed")


def put(layout: jp.Layout, *pairs: tuple[np.ndarray, tuple[str | None, ...], str]) -> list[jax.Array]:
    return [jax.device_put(x, layout.sharding(dims, x.shape, role=role)) for x, dims, role in pairs]


def placed(layout: jp.Layout, x: np.ndarray, *ws: np.ndarray) -> list[jax.Array]:
    dims = [UP if w.shape == (EMBED, MLP) else DOWN for w in ws]
    weights = [(w, names, "params") for w, names in zip(ws, dims, strict=True)]
    return put(layout, (x, ("batch", None, "embed"), "activations"), *weights)


def values_and_grads(f: Callable[..., jax.Array], weights: np.ndarray, *inputs: Any) -> tuple[np.ndarray, ...]:
    def loss(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = f(*inputs)
        return jnp.sum(y * weights), y

    argnums = tuple(range(len(inputs)))
    grads, y = jax.jit(jax.grad(loss, argnums=argnums, has_aux=True))(*inputs)
    return tuple(np.asarray(a) for a in (y, *grads))


def assert_close(got: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...], bound: float = 1e-6) -> None:
    for a, b in zip(got, expected, strict=True):
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize(("kind", "mesh"), few(GRIDS, 2, names=2))
def test_values_and_gradients_equal_one_device(kind: str, mesh: dict[str, int]) -> None:
    x, gate, up, down, weights = arrays()
    with jax.default_matmul_precision("highest"):
        expected = values_and_grads(lambda x, g, u, d: ((x @ g) * (x @ u)) @ d, weights, x, gate, up, down)
        layout = layout_of(kind, mesh)
        with layout:
            got = values_and_grads(mlp, weights, *placed(layout, x, gate, up, down))
    assert_close(got, expected)


def formula(kind: str, mesh: dict[str, int]) -> float:
    """Elements that one device sends in the forward pass of a pair of linear layers, h → e → h."""
    x, y, z = (mesh.get(axis, 1) for axis in "xyz")
    rows, h, e = BATCH * SEQ // mesh.get("data", 1), EMBED, MLP
    if kind == "2d":
        return 2 * rows * (e * (x - 1) + h * (y - 1)) / (x * y)
    if kind == "3d":
        return 2 * (rows * e * (x - 1) + rows * h * (y - 1) + h * e * (z - 1)) / (x * y * z)
    # SUMMA: inputs of h and e over y, two weights over x.
    return rows * (h + e) * (y - 1) / (x * y * z) + 2 * h * e * (x - 1) / (x * y)


@pytest.mark.parametrize(("kind", "mesh"), few(GRIDS, 4, names=2))
def test_the_compiled_program_sends_the_bytes_of_the_formula(kind: str, mesh: dict[str, int]) -> None:
    x, _, up, down, _ = arrays()
    layout = layout_of(kind, mesh)
    with layout:
        inputs = placed(layout, x, up, down)
        program = jp.audit(jax.jit(pair).lower(*inputs).compile())
        route = [routes(inputs[0], [(inputs[1], UP)], 1), routes(jnp.zeros((BATCH, SEQ, MLP)), [(inputs[2], DOWN)], 1)]
    assert sum(c.total_wire_bytes for c in program.collectives) == 4 * formula(kind, mesh)
    planned = [
        Matmuls.of(inputs[0], [inputs[1]], route[0] or ()),
        Matmuls.of(jnp.zeros((BATCH, SEQ, MLP)), [inputs[2]], route[1] or ()),
    ]
    sent = [one for matmuls in planned for one in matmuls.sent(layout.sizes) if not one.backward]
    assert sum(one.wire_bytes for one in sent) == 4 * formula(kind, mesh)


def test_one_dimension_sends_the_bytes_of_the_formula() -> None:
    x, _, up, down, _ = arrays()
    layout = layout_of("1d", {"model": 8})
    with layout:
        program = jp.audit(jax.jit(pair).lower(*placed(layout, x, up, down)).compile())
    assert sum(c.total_wire_bytes for c in program.collectives) == 4 * 2 * 7 * BATCH * SEQ * EMBED / 8


@pytest.mark.parametrize("depth", [1, 2])
def test_summa_has_the_bandwidth_of_colossal_ai(depth: int) -> None:
    """In units of a square matrix and with broadcasts that a row of q devices pays together, a layer's three products
    (result, gradient of input, gradient of weight) take 6 (q - 1) / q, and 3 (q - 1) (d + 1) / (d q) on depth d."""
    q, size = 2, 16
    layout = layout_of("2.5d", {"x": q, "y": q, "z": depth, "data": 8 // (q * q * depth)})
    x = np.ones((size, 1, size), np.float32)
    w = np.ones((size, size), np.float32)
    rules = layout.rules.replace(batch=("x", "z"))
    layout = jp.Layout(layout.mesh, rules)
    with layout:
        inputs = put(layout, (x, ("batch", None, "embed"), "activations"), (w, UP, "params"))
        f = lambda x, w: jp.sharded_dot(x, (w, UP))[0]
        step = lambda x, w, dy: jax.vjp(f, x, w)[1](dy) + (f(x, w),)
        dy = jax.device_put(x, layout.sharding(("batch", None, "mlp"), x.shape))
        program = jp.audit(jax.jit(step).lower(*inputs, dy).compile())
        (route,) = routes(inputs[0], [(inputs[1], UP)], 1) or ()
    planned = Matmuls.of(inputs[0], [inputs[1]], [route])
    sent = [one for one in planned.sent(layout.sizes) if one.kind != "all-reduce"]
    colossal = 6 * (q - 1) / q if depth == 1 else 3 * (q - 1) * (depth + 1) / (depth * q)
    assert sum(one.wire_bytes for one in sent) * q / (4 * size * size) == colossal
    # The program gathers input and weight once for both passes, because nothing is recomputed here.
    kinds = {c.kind for c in program.collectives}
    assert kinds == ({"all-gather", "reduce-scatter"} if depth == 1 else {"all-gather", "reduce-scatter", "all-reduce"})
    assert planned.input_bytes(layout.sizes) * depth * q * q == x.nbytes
    assert planned.weight_bytes(layout.sizes) * q * q == w.nbytes
    assert inputs[0].addressable_shards[0].data.nbytes * depth * q * q == x.nbytes


@pytest.mark.parametrize(
    ("kind", "mesh"), few([g for g in GRIDS if g[1].get("y", 1) > 1 and math.prod(g[1].values()) == 8], 2, names=2)
)
def test_the_backward_pass_sends_what_is_planned(kind: str, mesh: dict[str, int]) -> None:
    x, _, up, *_ = arrays()
    layout = layout_of(kind, mesh)
    with layout:
        inputs = placed(layout, x, up)
        f = lambda x, w: jp.sharded_dot(x, (w, UP))[0]
        dy = jax.device_put(np.ones((BATCH, SEQ, MLP), np.float32), layout.sharding(("batch", None, "mlp")))
        backward = lambda x, w, dy: jax.vjp(f, x, w)[1](dy)
        program = jp.audit(jax.jit(backward).lower(*inputs, dy).compile())
        found = routes(inputs[0], [(inputs[1], UP)], 1) or ()
    sent = [one for one in Matmuls.of(inputs[0], [inputs[1]], found).sent(layout.sizes) if one.backward]
    assert sum(c.total_wire_bytes for c in program.collectives) == sum(one.wire_bytes for one in sent)


def test_weights_and_gradients_of_zero_are_gathered_and_scattered_over_data() -> None:
    x, gate, up, down, weights = arrays()
    layout = layout_of("2d", {"x": 2, "y": 2, "data": 2}, params={"embed": ("x", "data"), "mlp": "y"})
    with jax.default_matmul_precision("highest"):
        expected = values_and_grads(lambda x, g, u, d: ((x @ g) * (x @ u)) @ d, weights, x, gate, up, down)
        with layout:
            inputs = placed(layout, x, gate, up, down)
            got = values_and_grads(mlp, weights, *inputs)
    assert inputs[1].sharding.spec == jax.P(("x", "data"), "y")
    assert_close(got, expected)


def test_few_key_heads_are_replicated_over_the_axes_that_do_not_divide_them() -> None:
    """Over y only, so the result is all-reduced over x and every device of x computes the same."""
    random = np.random.default_rng(1)
    x, w, weights = (random.normal(size=s).astype(np.float32) for s in ((4, 3, 16), (16, 2, 6), (4, 3, 2, 6)))
    rules = jp.Rules(batch="data", embed=None, kv_heads=None, head_dim=None)
    layout = layout_of("2d", {"x": 4, "y": 2}, rules)
    dims = ("embed", "kv_heads", "head_dim")
    with jax.default_matmul_precision("highest"):
        expected = values_and_grads(lambda x, w: jnp.einsum("BSE,EHD->BSHD", x, w), weights, x, w)
        with layout:
            inputs = put(layout, (x, ("batch", None, "embed"), "activations"), (w, dims, "params"))
            got = values_and_grads(lambda x, w: jp.sharded_dot(x, (w, dims))[0], weights, *inputs)
    assert_close(got, expected)


def test_rules_that_order_axes_against_the_product_are_an_error() -> None:
    layout = layout_of("2d", {"x": 2, "y": 4}, embed=("y", "x"))
    with layout, raises(jp.errors.LayoutError, "sharded_dot()", "dim 'embed'"):
        jp.sharded_dot(jnp.ones((4, 3, 24)), (jnp.ones((24, 40)), UP))


def test_int8_collectives_are_an_error() -> None:
    from jaxpar.parallel.collectives.gather_reduce import precision_scope

    layout = layout_of("2d", {"x": 2, "y": 4})
    with (
        layout,
        precision_scope(jp.Precision(gather="int8")),
        raises(jp.errors.ConfigError, "precision: gather", "support int8"),
    ):
        jp.sharded_dot(jnp.ones((4, 3, 24)), (jnp.ones((24, 40)), UP))


def test_blocks_of_columns_are_scattered_as_columns_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape for TPUs, in which a device keeps one block of columns."""
    x, gate, up, down, weights = arrays()
    found = []
    for blocks in (False, True):
        monkeypatch.setattr(local, "_is_all_reduced", lambda *_, blocks=blocks: blocks)
        layout = layout_of("2d", {"x": 2, "y": 4})
        with layout:
            found.append(values_and_grads(mlp, weights, *placed(layout, x, gate, up, down)))
    assert_close(*found, bound=0)


@pytest.mark.parametrize(
    ("recompute", "in_1d", "in_2d"),
    [
        (None, 0, 0),
        (jax.checkpoint_policies.nothing_saveable, 1, 1),
        (jax.checkpoint_policies.save_only_these_names("inner"), 0, 0),
        # In two dimensions a product is a shard_map, of which this policy keeps nothing.
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, 0, 1),
    ],
)
def test_remat_sends_the_sums_of_all_results_but_the_last_again(recompute: Any, in_1d: int, in_2d: int) -> None:
    shapes = {"down": (DOWN, (3, MLP, EMBED)), "up": (UP, (3, EMBED, MLP))}
    make = lambda key: {name: jp.tag(jnp.ones(shape), None, *dims) for name, (dims, shape) in shapes.items()}

    def step(x: jax.Array, ws: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        (inner,) = jp.sharded_dot(jnp.sin(x), (ws["down"], DOWN))
        inner = checkpoint_name(inner, "inner")
        return jp.sharded_dot(jnp.tanh(inner), (ws["up"], UP))[0], None

    run = step if recompute is None else jax.checkpoint(step, policy=recompute, prevent_cse=False)
    loss = lambda model, x: jnp.sum(jax.lax.scan(run, x, model)[0])
    batch = jax.ShapeDtypeStruct((BATCH, SEQ, MLP), jnp.float32)
    plans = jp.tensor.compare_tensor(make, optax.sgd(1.0), loss, batch, topology="v5e:2x2", layouts=BASE).plans
    found, size = {plan.name: plan for plan in plans}, 4 * BATCH * SEQ * EMBED
    # The first result is all-reduced over the four devices, or reduce-scattered over y.
    assert found["1d"].again_bytes == in_1d * size * 2 * 3 / 4
    assert found["2d"].again_bytes == in_2d * size * (2 - 1) / (2 * 2)
    assert found["2d"].forward_bytes == 4 * formula("2d", {"x": 2, "y": 2})
    assert found["2d"].sent_bytes == 2.5 * found["2d"].forward_bytes + found["2d"].again_bytes
