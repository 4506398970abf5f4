"""The NNX adapter: names that survive Flax's transforms, Flax's metadata, and state that a step carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import AnnotationError, LayoutError, ModelError
from jaxpar.nnx import axes, stacked

TX = optax.sgd(0.1)
RULES = jp.Rules(batch="data", embed=None, mlp="model", layers=None, params={"embed": "data"})
NORMAL = nnx.initializers.normal(0.5)


@pytest.fixture(scope="module")
def layout() -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=4, model=2).build(), RULES)


def linear(rngs: nnx.Rngs, init: Callable[..., Any] | None = None) -> nnx.Linear:
    return nnx.Linear(8, 6, use_bias=False, kernel_init=init or axes(NORMAL)("embed", "mlp"), rngs=rngs)


def specs(layout: jp.Layout, make_model: Callable[[jax.Array], Any]) -> dict[str, P]:
    """Path → spec of each parameter; ``init`` must give the shardings of ``abstract_state``."""
    state = jp.init(layout, make_model, TX)
    promised = jp.abstract_state(layout, make_model, TX)
    jax.tree.map(lambda got, want: np.testing.assert_equal(got.sharding, want.sharding), state, promised)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): x.sharding.spec
            for k, x in jax.tree_util.tree_leaves_with_path(state.params)}  # fmt: skip


class Stack(nnx.Module):
    """Two layers made by one transform and run by another."""

    def __init__(self, rngs: nnx.Rngs, metadata: dict[str, Any], init: Callable[..., Any] | None = None):
        make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: linear(rngs, init), transform_metadata=metadata))
        self.blocks = make(rngs)
        self.metadata = metadata

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = lambda block, x: block(x)[..., [0, 1, 2, 3, 4, 5, 0, 1]]
        return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=self.metadata)(
            self.blocks, x
        )


def squares(model: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def test_names_are_metadata_that_eval_shape_keeps_inside_and_outside_a_layout(layout: jp.Layout) -> None:
    names = lambda: nnx.eval_shape(lambda: linear(nnx.Rngs(0))).kernel.get_metadata()["logical_dims"]
    assert names() == ("embed", "mlp")
    with layout:
        assert names() == ("embed", "mlp")
        assert linear(nnx.Rngs(0)).kernel.get_metadata()["logical_dims"] == ("embed", "mlp")


def test_vmap_and_scan_keep_the_names_and_add_their_own(layout: jp.Layout) -> None:
    make = lambda key: Stack(nnx.Rngs(key), stacked("layers"))
    with layout:
        assert specs(layout, make) == {"blocks/kernel": P(None, "data", "model")}
    promised = jp.abstract_state(layout, make, TX)
    assert promised.params["blocks"]["kernel"].sharding.spec == P(None, "data", "model")
    seen = set()

    def loss_fn(model: Stack, batch: jax.Array) -> jax.Array:
        loss = squares(model, batch)
        seen.add(model.blocks.kernel.get_metadata()["logical_dims"])
        return loss

    jax.eval_shape(jp.train_step(layout, loss_fn), promised, jax.ShapeDtypeStruct((8, 8), np.float32))
    assert seen == {("layers", "embed", "mlp")}


@pytest.mark.parametrize("names", [("embed", "mlp"), P("embed", "mlp")], ids=["tuple", "PartitionSpec"])
def test_metadata_of_flax_itself_works_unchanged(names: Any, layout: jp.Layout) -> None:
    init = nnx.with_partitioning(NORMAL, names)
    one = jp.abstract_state(layout, lambda key: linear(nnx.Rngs(key), init), TX)
    assert one.params["kernel"].sharding.spec == P("data", "model")
    metadata = {nnx.PARTITION_NAME: "layers"}
    with layout:
        state = jp.init(layout, lambda key: Stack(nnx.Rngs(key), metadata, init), TX)
        assert state.params["blocks"]["kernel"].sharding.spec == P(None, "data", "model")
        state, _ = jp.train_step(layout, squares)(state, jnp.ones((8, 8)))
    assert state.params["blocks"]["kernel"].sharding.spec == P(None, "data", "model")


class Noisy(nnx.Module):
    """A module with running statistics and a stream of random numbers."""

    def __init__(self, rngs: nnx.Rngs):
        norm = axes(nnx.initializers.ones)("embed")
        self.norm = nnx.BatchNorm(8, scale_init=norm, bias_init=axes(NORMAL)("embed"), momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = linear(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.dropout(self.norm(x)))


def trained(layout: jp.Layout, batch: np.ndarray) -> tuple[list[Any], list[float]]:
    state = jp.init(layout, lambda key: Noisy(nnx.Rngs(key)), TX)
    step, rests, losses = jp.train_step(layout, squares), [jax.device_get(state.variables["norm"])], []
    for _ in range(3):
        state, metrics = step(state, batch)
        rests.append(jax.device_get(state.variables["norm"]))
        losses.append(float(metrics["loss"]))
    assert int(state.variables["dropout"]["rngs"]["count"]) == 3
    return rests, losses


def test_running_statistics_and_dropout_are_carried_by_the_step(layout: jp.Layout) -> None:
    batch = np.random.default_rng(0).normal(3.0, 2.0, (8, 8)).astype(np.float32)
    rests, losses = trained(layout, batch)
    mean, var = np.zeros(8), np.ones(8)
    for rest in rests:
        np.testing.assert_allclose(rest["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(rest["var"], var, rtol=1e-5)
        mean, var = (mean + batch.mean(0)) / 2, (var + batch.var(0)) / 2
    one_device, on_one = trained(jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), RULES), batch)
    chex.assert_trees_all_close(rests, one_device, rtol=1e-5)
    np.testing.assert_allclose(losses, on_one, rtol=1e-5)
    still = lambda model, batch: squares(nnx.view(model, deterministic=True, use_running_average=True), batch)
    state = jp.init(layout, lambda key: Noisy(nnx.Rngs(key)), TX)
    after, _ = jp.train_step(layout, still, donate=False)(state, batch)
    chex.assert_trees_all_equal(after.variables["norm"], state.variables["norm"])


def test_the_model_of_a_state_is_the_module_again(layout: jp.Layout) -> None:
    state = jp.init(layout, lambda key: Noisy(nnx.Rngs(key)), TX)
    assert isinstance(state.model, Noisy)
    np.testing.assert_array_equal(state.model.linear.kernel[...], state.params["linear"]["kernel"])


def test_what_a_loss_assigns_to_parameters_holds_for_that_call_only(layout: jp.Layout) -> None:
    def loss_fn(model: nnx.Linear, batch: jax.Array) -> jax.Array:
        model.kernel[...] = 2 * model.kernel[...]
        return squares(model, batch)

    state = jp.init(layout, lambda key: linear(nnx.Rngs(key)), optax.sgd(0.0))
    before = jax.device_get(state.params)
    state, metrics = jp.train_step(layout, loss_fn)(state, jnp.ones((8, 8)))
    chex.assert_trees_all_equal(state.params, before)
    assert float(metrics["loss"]) == pytest.approx(np.mean((2 * before["kernel"].sum(0)) ** 2), rel=1e-5)


def more(model: Any, batch: jax.Array) -> jax.Array:
    model.seen = nnx.Variable(batch)
    return squares(model, batch)


def fewer(model: Any, batch: jax.Array) -> jax.Array:
    del model.dropout
    return squares(model.linear, batch)


NO_STACK = "[2"


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(key)), ModelError, "nnx.Param"),
        (linear(nnx.Rngs(0)), ModelError, "PRNG"),
        (lambda key: linear(nnx.Rngs(key), NORMAL), LayoutError, "[8"),
        (
            lambda key: linear(nnx.Rngs(key), nnx.with_metadata(NORMAL, out_sharding="embed")),
            AnnotationError,
            "params/kernel: out_sharding",
        ),
        (
            lambda key: linear(nnx.Rngs(key), nnx.with_partitioning(NORMAL, (("embed", "mlp"), None))),
            AnnotationError,
            "(('embed'",
        ),
        (lambda key: Stack(nnx.Rngs(key), {}).blocks, LayoutError, NO_STACK),
    ],
    ids=["no parameters", "a module", "not annotated", "no tuple", "no name", "not stacked"],
)
def test_a_model_that_cannot_be_laid_out_is_refused(make: Any, kind: Any, name: str, layout: jp.Layout) -> None:
    with raises(kind, name):
        jp.init(layout, make, TX)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (lambda model, batch: (squares(model, batch), {}, {"norm": {}}), "loss_fn returned"),
        (more, "seen"),
        (fewer, "dropout/rngs/count"),
    ],
    ids=["updates", "more", "fewer"],
)
def test_a_loss_that_changes_what_is_carried_is_refused(loss_fn: Any, name: str, layout: jp.Layout) -> None:
    state = jp.abstract_state(layout, lambda key: Noisy(nnx.Rngs(key)), TX)
    with raises(ModelError, name):
        jax.eval_shape(jp.train_step(layout, loss_fn), state, jax.ShapeDtypeStruct((8, 8), np.float32))
