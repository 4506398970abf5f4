"""Tests the train step: parity, metrics, clipping, skipping, keys, donation, layouts, and Explicit mesh axes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from profiles import few

import jaxpar as jp
from jaxpar.analysis.divergence import first_nonfinite
from jaxpar.errors import LayoutError, ModelError
from jaxpar.training.step import eval_step

TX = optax.adam(1e-2)


@pytest.fixture(scope="module")
def first_state(mlp: Any) -> Any:
    return jp.init(mlp.layout(), mlp.make, TX)


@pytest.fixture
def state(first_state: Any) -> Any:
    """A copy, because most steps donate their state."""
    return jax.tree.map(lambda x: x.copy(), first_state)


def by_hand(mlp: Any, tx: Any, steps: int) -> Any:
    """Returns the parameters after ``steps`` steps of a plain JAX loop on one device."""
    with mlp.one_device:
        params = jax.device_get(jp.init(mlp.one_device, mlp.make, tx).params)
        opt_state = tx.init(params)

        @jax.jit
        def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
            updates, opt_state = tx.update(jax.grad(mlp.loss)(params, batch), opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        for i in range(steps):
            params, opt_state = step(params, opt_state, mlp.batch(i))
    return params


def assert_close(got: Any, want: Any) -> None:
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", few([0.1, None, 1e6], 1))
def test_steps_equal_the_loop_by_hand_and_clip_norm_equals_optax(clip_norm: float | None, mlp: Any) -> None:
    plain = optax.sgd(0.1, momentum=0.9)
    tx = plain if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), plain)
    state, step = jp.init(mlp.layout(), mlp.make, plain), jp.train_step(mlp.layout(), mlp.loss, clip_norm=clip_norm)
    for i in range(3):
        state, metrics = step(state, mlp.batch(i))
    assert int(state.step) == 3
    assert float(metrics["grad_norm"]) > 0.1  # The norm is reported before clipping.
    assert_close(jax.device_get(state.params), by_hand(mlp, tx, 3))


@pytest.mark.slow
def test_clipping_a_zero_gradient_leaves_it_zero(state: Any, mlp: Any) -> None:
    loss = lambda model, batch: 0.0 * jnp.sum(model["square"])
    new, metrics = jp.train_step(mlp.layout(), loss, clip_norm=1.0, donate=False)(state, mlp.batch())
    assert metrics["grad_norm"] == 0
    chex.assert_trees_all_equal(new.params, state.params)


@pytest.mark.parametrize("options", few([{"clip_norm": 1.0}, {}, {"grad_reduction": "per_step"}], 1), ids=str)
def test_a_step_that_is_not_finite_changes_nothing(options: Any, mlp: Any) -> None:
    """Every layout skips the same steps, and training continues as if the step had not been taken."""
    poisoned = np.where(np.arange(8)[:, None] == 5, np.inf, mlp.batch())  # on one device of eight
    rules = jp.Rules(batch="data", embed=None, mlp=None) if options.get("grad_reduction") else mlp.rules
    layout = mlp.layout(rules)
    state = jp.init(layout, mlp.make, TX)
    step = jp.train_step(layout, mlp.loss, donate=False, **options)
    state, metrics = step(state, mlp.batch())
    assert not metrics["skipped"]
    after, metrics = step(state, poisoned)
    assert metrics["skipped"]
    assert not np.isfinite(float(metrics["loss"]))
    assert int(after.step) == int(state.step) + 1
    chex.assert_trees_all_equal((after.params, after.opt_state), (state.params, state.opt_state))
    went_on, _ = step(after, mlp.batch(1))
    straight, _ = step(state, mlp.batch(1))
    chex.assert_trees_all_equal(went_on.params, straight.params)


@pytest.mark.parametrize(
    ("change", "batch", "where"),
    [
        ({"square": np.nan}, 1.0, "the parameter square is not finite before the step"),
        ({}, np.inf, r"Mlp.loss \(conftest.py:\d+\) \(batch, mlp\), call 1"),
        ({"temperature": 1e30}, 1.0, "the loss; every activation is finite"),
        ({}, 1e15, "the norm of the gradients, which overflows; each of them is finite"),
    ],
)
def test_where_a_step_stops_to_be_finite(change: Any, batch: float, where: str, state: Any, mlp: Any) -> None:
    params = state.params | {name: jnp.full_like(state.params[name], value) for name, value in change.items()}
    found = first_nonfinite(mlp.layout(), replace(state, params=params), mlp.batch() * batch, mlp.loss)
    assert re.fullmatch(where, found), found


def test_an_overflow_of_the_compute_dtype_is_looked_for_in_it(state: Any, mlp: Any) -> None:
    """The output of the layer is some 1e6, beyond fp16 and within fp32, like all that follows."""
    large = replace(state, params=state.params | {"square": state.params["square"] * 1e6})
    wide, narrow = (
        first_nonfinite(mlp.layout(), large, mlp.batch(), mlp.loss, jp.Precision.of(name)) for name in ("fp32", "fp16")
    )
    assert wide == "the norm of the gradients, which overflows; each of them is finite"
    assert re.fullmatch(r"Mlp.loss \(conftest.py:\d+\) \(batch, embed\), call 1", narrow), narrow


def test_a_gradient_that_is_not_finite_is_named(state: Any, mlp: Any) -> None:
    loss = lambda model, batch: jnp.sqrt(jnp.sum(model["square"] * 0)) + mlp.loss(model, batch)
    assert first_nonfinite(mlp.layout(), state, mlp.batch(), loss) == (
        "the gradient of square; every activation and the loss are finite"
    )


def test_a_step_that_is_not_finite_passes_where_it_is_told_to(state: Any, mlp: Any) -> None:
    step = jp.train_step(mlp.layout(), mlp.loss, skip_nonfinite=False)
    new, metrics = step(state, np.full((8, 16), np.nan, np.float32))
    assert "skipped" not in metrics
    assert np.isnan(jax.device_get(new.params["square"])).all()


@pytest.mark.parametrize("values", [2, 3])
def test_metrics_stand_beside_the_loss(values: int, state: Any, mlp: Any) -> None:
    loss_fn = lambda model, batch: (mlp.loss(model, batch), {"rows": len(batch)}, None)[:values]
    _, metrics = jp.train_step(mlp.layout(), loss_fn)(state, mlp.batch())
    assert metrics.keys() == {"loss", "grad_norm", "skipped", "rows"}
    assert metrics["rows"] == 8


def test_anything_but_a_dict_beside_the_loss_is_named_aux(state: Any, mlp: Any) -> None:
    _, metrics = jp.train_step(mlp.layout(), lambda m, b: (mlp.loss(m, b), jnp.max(b)))(state, mlp.batch())
    assert metrics["aux"] == mlp.batch().max()


@pytest.mark.slow
def test_kept_gradients_are_those_before_clipping(state: Any, mlp: Any, spec_of: Any) -> None:
    step = jp.train_step(mlp.layout(), mlp.loss, clip_norm=0.1, return_grads=True)
    _, metrics = step(state, mlp.batch())
    assert optax.tree.norm(metrics["grads"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)
    assert spec_of(metrics["grads"]["square"]) == P("data", None)


def test_gradients_lie_as_their_role_says(mlp: Any, spec_of: Any) -> None:
    rules = jp.Rules(batch="data", embed=None, mlp=None, gradients={"mlp": "data"})
    layout = mlp.layout(rules)
    state, step = jp.init(layout, mlp.make, TX), jp.train_step(layout, mlp.loss, return_grads=True)
    state, metrics = step(state, mlp.batch())
    trees = (metrics["grads"], state.params, state.opt_state[0].mu)
    assert [spec_of(tree["block"]["up"]) for tree in trees] == [P(None, "data"), P(None, None), P(None, None)]


def test_the_old_state_is_donated_unless_asked_otherwise(state: Any, mlp: Any) -> None:
    kept, _ = jp.train_step(mlp.layout(), mlp.loss, donate=False)(state, mlp.batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    jp.train_step(mlp.layout(), mlp.loss)(kept, mlp.batch())
    assert all(x.is_deleted() for x in jax.tree.leaves((kept.params, kept.opt_state)))


def test_a_key_differs_by_step_and_by_seed_and_not_by_layout(mlp: Any) -> None:
    make = lambda key: {"w": jp.tag(jnp.ones((16, 8)), "embed", "mlp")}
    loss_fn = lambda model, batch, key: (jnp.mean(batch @ model["w"]), {"drawn": jax.random.normal(key)})

    def draws(layout: jp.Layout, *seeds: int) -> list[list[float]]:
        step, drawn = jp.train_step(layout, loss_fn), []
        for seed in seeds:
            state = jp.init(layout, make, optax.sgd(0.1), seed=seed)
            drawn.append([])
            for _ in range(3):
                state, metrics = step(state, mlp.batch())
                drawn[-1].append(float(metrics["drawn"]))
        return drawn

    first, second = draws(mlp.layout(), 0, 1)
    assert len({*first, *second}) == 6
    assert draws(mlp.one_device, 0) == [pytest.approx(first, abs=1e-6)]


def test_a_step_runs_inside_and_outside_its_layout_and_compiles_once(mlp: Any) -> None:
    layout, traced = mlp.layout(), []

    def loss_fn(model: Any, batch: Any) -> Any:
        traced.append(None)
        return mlp.loss(model, batch)

    step, outcomes = jp.train_step(layout, loss_fn, donate=False), []
    state = jp.init(layout, mlp.make, TX)
    outcomes.append(step(state, mlp.batch()))
    with layout:
        outcomes.append(step(jp.init(layout, mlp.make, TX), mlp.batch()))
    calls = len(traced)
    for _ in range(3):
        step(state, mlp.batch())
    chex.assert_trees_all_equal(jax.device_get(outcomes[0][0].params), outcomes[1][0].params)
    assert len(traced) == calls


def test_under_another_layout_a_step_and_an_init_refuse(state: Any, mlp: Any) -> None:
    step = jp.train_step(mlp.layout(), mlp.loss)
    with mlp.one_device:
        with pytest.raises(LayoutError, match="leave the 'with'"):
            step(state, mlp.batch())
        with pytest.raises(LayoutError, match="leave the 'with'"):
            jp.init(mlp.layout(), mlp.make, TX)


def test_a_step_lowers_and_compiles_from_shapes_alone(mlp: Any) -> None:
    abstract = jp.abstract_state(mlp.layout(), mlp.make, TX)
    batch = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=mlp.layout().sharding(("batch", "embed")))
    compiled = jp.train_step(mlp.layout(), mlp.loss).lower(abstract, batch).compile()
    (place, _), _ = compiled.input_shardings
    assert place.params["square"] == abstract.params["square"].sharding
    state, _metrics = compiled(jp.init(mlp.layout(), mlp.make, TX), jax.device_put(mlp.batch(), batch.sharding))
    assert_close(jax.device_get(state.params), by_hand(mlp, TX, 1))


@pytest.mark.slow
def test_an_explicit_mesh_trains_to_the_same_values(mlp: Any) -> None:
    def loss_fn(model: Any, batch: jax.Array) -> jax.Array:
        # Under Explicit axes, types carry shardings, so sharded parameters are gathered before they meet the batch.
        whole = jax.tree.map(lambda w: jp.hint(w, *(None,) * w.ndim), model)
        return mlp.loss(whole, jp.hint(batch, "batch", "embed"))

    layout = jp.Layout(jp.MeshSpec(data=-1).build(axis_type=AxisType.Explicit), mlp.rules, explicit=True)
    state, step = jp.init(layout, mlp.make, TX), jp.train_step(layout, loss_fn)
    for i in range(3):
        state, _ = step(state, mlp.batch(i))
    assert jax.typeof(state.params["square"]).sharding.spec == P("data", None)
    assert_close(jax.device_get(state.params), by_hand(mlp, TX, 3))


def test_evaluation_gives_the_loss_and_its_metrics_and_keeps_the_state(state: Any, mlp: Any) -> None:
    loss_fn = lambda model, batch: (mlp.loss(model, batch), {"top": jnp.max(batch)})
    metrics = eval_step(mlp.layout(), loss_fn)(state, mlp.batch())
    _, trained = jp.train_step(mlp.layout(), loss_fn)(state, mlp.batch())
    assert metrics.keys() == {"loss", "top"}
    assert float(metrics["loss"]) == pytest.approx(float(trained["loss"]), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (jnp.ones(3), "(3,)"),
        (1, "loss_fn"),
        (jnp.ones((), int), "int32"),
        (None, "NoneType"),
        ([1.0, {}], "loss_fn"),
        ((1.0,), "1"),
        ((1.0, {}, {}, {}), "4"),
        ((1.0, {"loss": 2.0, "grad_norm": 1.0, "mine": 0.0}), "grad_norm"),
        ((1.0, {}, {"cache": 1.0}), "cache"),
    ],
    ids=lambda x: str(x)[:20] if not isinstance(x, str) else "",
)
def test_a_loss_that_is_none_is_refused(value: Any, name: str, state: Any, mlp: Any) -> None:
    with raises(ModelError, name):
        jp.train_step(mlp.layout(), lambda model, batch: value)(state, mlp.batch())


def test_an_optimizer_that_changes_a_shape_is_refused(mlp: Any) -> None:
    tx = optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.ones((2, *g.shape)), grads))
    with raises(ModelError, "params/block/bias"):
        jp.train_step(mlp.layout(), mlp.loss)(jp.init(mlp.layout(), mlp.make, tx), mlp.batch())


def test_a_loss_that_changes_a_carried_array_is_refused(mlp: Any) -> None:
    make = lambda key: {"params": jp.tag(jnp.ones(8), "embed"), "stats": {"mean": jnp.ones(8)}}
    loss_fn = lambda model, batch: (jnp.sum(model["params"]), {}, {"stats": {"var": jnp.ones(8)}})
    with raises(ModelError, "loss_fn", "variables/stats/mean"):
        jp.train_step(mlp.layout(), loss_fn)(jp.init(mlp.layout(), make, TX), None)


def test_a_step_is_traced_once(state: Any, mlp: Any) -> None:
    loss_fn = chex.assert_max_traces(mlp.loss, n=1)
    step = jp.train_step(mlp.layout(), loss_fn)
    for i in range(3):
        state, _ = step(state, mlp.batch(i))
    assert int(state.step) == 3
