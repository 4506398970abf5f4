"""Parameters in host memory: equal results, the placement of arrays, one layer at a time, and refused inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.offload.placement import on_host
from jaxpar.training.state import abstract_state, shape_state

LAYERS, LR = 3, 1e-2
RULES = {
    "replicated": jp.Rules(batch="data", layers=None, embed=None, mlp=None),
    "fsdp": jp.Rules(batch="data", layers=None, embed=None, mlp=None, params={"embed": "data"}),
    "tp": jp.Rules(batch="data", layers=None, embed=None, mlp="model"),
}
pytestmark = pytest.mark.filterwarnings("ignore:offload. simulated CPU devices use host memory:UserWarning")


def layout_of_rules(name: str) -> jp.Layout:
    spec = jp.MeshSpec(data=4, model=2) if name == "tp" else jp.MeshSpec(data=8)
    return jp.Layout(spec.build(), RULES[name])


def make(key: jax.Array) -> dict[str, Any]:
    up, down, last = jax.random.split(key, 3)
    return {
        "up": jp.tag(jax.random.normal(up, (LAYERS, 16, 24)) / 4, "layers", "embed", "mlp"),
        "down": jp.tag(jax.random.normal(down, (LAYERS, 24, 16)) / 5, "layers", "mlp", "embed"),
        "scale": jp.tag(jnp.ones((LAYERS, 16)), "layers", "embed"),
        "last": jp.tag(jax.random.normal(last, (16, 8)), "embed", None),
    }


def loss(model: dict[str, Any], x: jax.Array) -> jax.Array:
    """A plain scan: the model does not know about host memory."""

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        up, down, scale = w
        return x + jnp.einsum("bf,fe->be", jnp.tanh(x @ up), down) * scale, None

    x, _ = jax.lax.scan(layer, x, (model["up"], model["down"], model["scale"]))
    return jnp.mean((x @ model["last"]) ** 2)


def batch(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(16, 16)).astype(np.float32)


def after(tx: Any, rules: str, bad: int | None = None, **options: Any) -> tuple[jp.TrainState, list[Any]]:
    """The state after three steps (batch ``bad`` is not finite), and each step's skip flag and gradients."""
    layout, seen = layout_of_rules(rules), []
    state = jp.init(layout, make, tx)
    step = compiled(jp.train_step(layout, loss, return_grads=True, **options), state, batch(0))
    for i in range(3):
        state, metrics = step(state, batch(i) * (np.nan if i == bad else 1))
        seen.append((bool(metrics["skipped"]), jax.tree.map(np.asarray, metrics["grads"])))
    return state, seen


def compiled(step: Any, *given: Any) -> Any:
    """Compile without optimization, which takes half the time."""
    return step.lower(*given).compile(compiler_options={"xla_backend_optimization_level": 0})


def near(found: Any, expected: Any, rtol: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(1e-3, np.abs(b[np.isfinite(b)]).max(initial=0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "name", "options"),
    few(
        [
            ("fsdp", "adamw", {}),
            ("replicated", "lion", {"grad_accum_steps": 2}),
            ("tp", "sgd", {"clip_norm": 0.1, "precision": "bf16"}),
        ],
        1,
        names=3,
    ),
    ids=["fsdp", "replicated", "tp"],
)
def test_steps_are_the_same_and_one_of_them_is_skipped(rules: str, name: str, options: dict[str, Any]) -> None:
    make_tx = getattr(optax, name)
    expected, before = after(make_tx(LR), rules, bad=1, **options)
    found, seen = after(jp.offload.to_host(make_tx(LR), parameters=True, min_bytes=0), rules, bad=1, **options)
    assert [skipped for skipped, _ in seen] == [skipped for skipped, _ in before] == [False, True, False]
    near((found.params, found.opt_state), (expected.params, expected.opt_state), 1e-6)
    near(seen[0][1], before[0][1], 1e-6)
    kinds = {path: x.sharding.memory_kind for path, x in found.params.items()}
    assert kinds == {"up": "pinned_host", "down": "pinned_host", "scale": "device", "last": "device"}
    assert all(
        a.sharding.is_equivalent_to(b.sharding.with_memory_kind(a.sharding.memory_kind), a.ndim)
        for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True)
    )


@pytest.mark.slow
def test_a_llama_holds_against_one_device(layout_of: Callable[..., jp.Layout]) -> None:
    config = preset("tiny", layers=2, embed=32, heads=2, kv_heads=2, head_dim=16, mlp=64, vocab=64)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 17))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    parts, whole = layout_of("fsdp_tp"), layout_of("fsdp_tp").on_one_device()
    state = jp.init(parts, make_llama(config), jp.offload.to_host(optax.sgd(LR), parameters=True, min_bytes=0))
    plain = abstract_state(whole, make_llama(config), optax.sgd(LR))
    on_one = jax.tree.unflatten(jax.tree.structure(plain), [*map(_copied, jax.tree.leaves(state))])
    steps = [jp.train_step(layout, next_token_loss, return_grads=True, donate=False) for layout in (parts, whole)]
    (_, found), (_, expected) = (
        compiled(step, s, data)(s, data) for step, s in zip(steps, (state, on_one), strict=True)
    )
    near((found["grads"], found["loss"]), (expected["grads"], expected["loss"]), 2e-5)


def _copied(x: jax.Array) -> Any:
    return (
        jax.random.wrap_key_data(_copied(jax.random.key_data(x)))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else np.asarray(x)
    )


def shapes(layout: jp.Layout, tx: Any, make_model: Callable[..., Any] = make) -> tuple[Any, Any]:
    return abstract_state(layout, make_model, tx), jax.ShapeDtypeStruct((8, 16), "float32")


def moves(jaxpr: Any) -> list[tuple[tuple[int, ...], bool, bool]]:
    """Each transfer from or to host memory, at any depth: its shape, whether it starts there, whether it ends there."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            ends = [str(v.aval.memory_space) for v in (equation.invars[0], equation.outvars[0])]
            if any(end.endswith("Host") for end in ends):
                found.append((tuple(equation.outvars[0].aval.shape), *(end.endswith("Host") for end in ends)))
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                found += moves(inner) if hasattr(inner, "eqns") else []
    return found


def test_one_layer_comes_at_a_time_forward_backward_and_in_the_update() -> None:
    layout, tx = layout_of_rules("replicated"), jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes=2000)
    found = moves(jp.train_step(layout, loss).trace(*shapes(layout, tx)).jaxpr.jaxpr)
    stacks = [move for move in found if move[0] in ((16, 24), (24, 16), (1, 16, 24), (1, 24, 16))]
    assert stacks == found  # no complete stack moves
    assert sorted(shape for shape, there, _ in found if there and len(shape) == 2) == [(16, 24)] * 2 + [(24, 16)] * 2
    assert (
        len([shape for shape, there, _ in found if there and len(shape) == 3]) == 6
    )  # weights and moments of two matrices
    assert len([shape for shape, _, back in found if back]) == 6


@pytest.mark.slow
def test_a_state_goes_on_from_a_copy_of_it() -> None:
    layout, tx = layout_of_rules("fsdp"), jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes=0)
    step = jp.train_step(layout, loss, donate=False)
    state, _ = step(jp.init(layout, make, tx), batch(0))
    copy = jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x), like.sharding),
        (state.params, state.opt_state),
        (
            state.params,
            state.opt_state,
        ),
    )
    again = jp.TrainState(state.step, *copy, state.variables, state.key, state.metadata)
    for a, b in zip(jax.tree.leaves(step(state, batch(1))[0].params), jax.tree.leaves(step(again, batch(1))[0].params)):
        np.testing.assert_array_equal(a, b)


def test_a_weight_that_waits_is_used_like_an_array() -> None:
    layout = layout_of_rules("fsdp")
    tx = jp.offload.to_host(optax.sgd(LR), parameters=True, min_bytes=0)
    state = jp.init(layout, make, tx)

    def unrolled(model: dict[str, Any], x: jax.Array) -> jax.Array:
        assert (model["up"].ndim, model["up"].dtype) == (3, jnp.float32)
        for i in range(LAYERS):
            up, down = model["up"][i], jp.offload.to_device(model["down"][i])
            assert up.shape == (16, 24)
            x = x + jnp.tanh((up.astype(jnp.float32).T @ x.T).T) @ down * model["scale"][i]
            x += 0 * (jnp.ones((1, 16)) @ up[:, :1]) + 0 * (up @ jnp.ones((24, 1))).sum()
        return jnp.mean((x @ model["last"]) ** 2)

    _, metrics = jp.train_step(layout, unrolled, return_grads=True, donate=False)(state, batch(0))
    expected = jax.jit(jax.grad(loss))({name: np.asarray(w) for name, w in state.params.items()}, batch(0))
    near(metrics["grads"], expected, 1e-5)
    assert not any(map(on_host, jax.tree.leaves(metrics["grads"])))


def test_explain_says_what_waits_and_why_the_rest_does_not() -> None:
    tx = jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes=0)
    given = jp.tag(jax.ShapeDtypeStruct((8, 16), "float32"), "batch", "embed")
    found = jp.explain(layout_of_rules("fsdp"), make, tx, batch=given, loss_fn=loss)
    plain = jp.explain(layout_of_rules("fsdp"), make, optax.adam(LR), batch=given, loss_fn=loss)
    rows = {row.path: row for row in found.rows if row.part == "params"}
    assert rows["params/up"].device_bytes == rows["params/down"].device_bytes == 0
    assert rows["params/up"].why[-1] == "in host memory, 576 B per device"
    assert rows["params/scale"].why[-1] == "stays on the device: a stack of vectors, not of matrices"
    assert rows["params/last"].why[-1] == "stays on the device: not a stack of layers"
    moved = 2 * 4 * LAYERS * 16 * 24 // 8
    assert plain.total("params").device_bytes - found.total("params").device_bytes == moved
    large = jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes="1MiB")
    missing = jp.explain(layout_of_rules("fsdp"), make, large)
    text = (
        "offload: parameters are to be stored in host memory, but none is a stack of layers (first logical dim "
        "'layers', three dims or more, 1048576 bytes or more). Remedy: stack the layers, as nnx.vmap with "
        "jaxpar.nnx.stacked('layers') does, use a smaller min_bytes, or leave parameters out."
    )
    assert missing.problems == (text,)
    assert (
        next(row for row in missing.rows if row.path == "params/up").why[-1] == "stays on the device: below min_bytes"
    )
    with raises(ConfigError, "layers", "1048576 bytes or"):
        jp.init(layout_of_rules("fsdp"), make, large)
    assert shape_state(layout_of_rules("fsdp"), make, large).params["up"].shape == (LAYERS, 16, 24)


@pytest.mark.parametrize(
    ("options", "tx", "name"),
    [
        ({"grad_reduction": "per_step"}, optax.adam, "grad_reduction='per_step'"),
        ({"weight_gather": "per_step"}, optax.adam, "weight_gather='per_step'"),
        ({}, lambda lr: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr)), "reduce_sum"),
    ],
    ids=["once", "step", "clipped"],
)
def test_what_wants_all_parameters_at_once_is_refused(options: Any, tx: Any, name: str) -> None:
    layout = layout_of_rules("replicated")
    step = jp.train_step(layout, loss, **options)
    with raises(ConfigError, name):
        step.trace(*shapes(layout, jp.offload.to_host(tx(LR), parameters=True, min_bytes=0)))


def test_stacks_of_other_lengths_and_states_that_lie_elsewhere_are_refused() -> None:
    def two(key: jax.Array) -> dict[str, Any]:
        return make(key) | {"more": jp.tag(jnp.ones((2, 16, 24)), "layers", "embed", "mlp")}

    tx, layout = jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes=0), layout_of_rules("replicated")
    with raises(ConfigError, "offload: params", "16"):
        jp.train_step(layout, loss).trace(*shapes(layout, tx, two))
    rules = jp.Rules(batch="data", layers=None, embed=None, mlp=None, optimizer={"embed": "data"})
    elsewhere = jp.Layout(layout.mesh, rules)
    with raises(ConfigError, "data", "offload"):
        jp.train_step(elsewhere, loss).trace(*shapes(elsewhere, tx))


def test_what_is_fetched_is_fetched_again_where_all_else_is_kept(layout_of: Callable[..., jp.Layout]) -> None:
    config = preset("tiny", layers=2, embed=32, heads=2, kv_heads=2, head_dim=16, mlp=64, vocab=64, remat="none")
    layout, tx = layout_of("fsdp"), jp.offload.to_host(optax.sgd(LR), parameters=True, min_bytes=0)
    data = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((8, 16), "int32"))
    traced = jp.train_step(layout, next_token_loss).trace(abstract_state(layout, make_llama(config), tx), data)
    layers = [shape for shape, there, _ in moves(traced.jaxpr.jaxpr) if there and shape[0] != 1]
    assert len(layers) == 2 * 7  # the weights of a layer, forward and backward


def test_a_part_of_a_stack_is_not_taken_out_of_the_hosts_memory(layout_of: Callable[..., jp.Layout]) -> None:
    config = preset("tiny", layers=2, embed=32, heads=2, kv_heads=2, head_dim=16, mlp=64, vocab=64)
    config = type(config)(**{**vars(config), "remat": jp.RematPolicy("full", layers=(1,))})
    layout, tx = layout_of("fsdp"), jp.offload.to_host(optax.adam(LR), parameters=True, min_bytes=0)
    data = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((8, 16), "int32"))
    with raises(ConfigError, "offload: layers 0"):
        jp.train_step(layout, next_token_loss).trace(abstract_state(layout, make_llama(config), tx), data)
