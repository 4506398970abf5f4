"""The Linen adapter: Flax's boxes stay unchanged, a step carries collections, Flax's constraints read the layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import linen as nn
from flax import struct
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import AnnotationError, ModelError, NoLayoutError
from jaxpar.linen import axes, flax_rules
from jaxpar.training.model import build_shapes

TX = optax.sgd(0.1)
RULES = jp.Rules(batch="data", embed=None, mlp="model", layers=None, params={"embed": "data"})
NORMAL = nn.initializers.normal(0.5)
EXAMPLE = jnp.zeros((1, 8))


@pytest.fixture(scope="module")
def layout() -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=4, model=2).build(), RULES)


def dense(features: int, init: Any) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=init)


def trained(layout: jp.Layout, module: nn.Module, steps: int = 1) -> tuple[Any, list[float]]:
    """The state after some steps on the mean square of the output, and the losses."""
    state = jp.init(layout, lambda key: module.init(key, EXAMPLE), TX)
    step = jp.train_step(layout, lambda variables, batch: jnp.mean(module.apply(variables, batch) ** 2))
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    return state, losses


def batch() -> np.ndarray:
    return np.random.default_rng(0).normal(3.0, 2.0, (8, 8)).astype(np.float32)


@pytest.mark.parametrize("annotate", [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxes_of_flax_itself_work_unchanged(annotate: Any, layout: jp.Layout) -> None:
    state, _ = trained(layout, dense(6, annotate(NORMAL, ("embed", "mlp"))))
    assert state.params["kernel"].sharding.spec == P("data", "model")


def test_axes_writes_the_box_that_flax_would() -> None:
    ours, theirs = axes(NORMAL)("embed", "mlp"), nn.with_logical_partitioning(NORMAL, ("embed", "mlp"))
    a, b = (init(jax.random.key(0), (8, 6)) for init in (ours, theirs))
    assert type(a) is type(b)
    assert a.names == b.names
    np.testing.assert_array_equal(a.unbox(), b.unbox())


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        h = dense(6, nn.with_logical_partitioning(NORMAL, ("embed", "mlp")))(x)
        return dense(8, nn.with_logical_partitioning(NORMAL, ("mlp", "embed")))(h), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(Layer, **options, metadata_params={nn.PARTITION_NAME: "layers"})()(x, None)[0]


@pytest.mark.slow
def test_a_scan_of_flax_itself_names_the_stacking_dim(layout: jp.Layout) -> None:
    state, losses = trained(layout, Stack(), steps=2)
    (up, down) = (state.params["ScanLayer_0"][name]["kernel"] for name in ("Dense_0", "Dense_1"))
    assert (up.shape, up.sharding.spec) == ((3, 8, 6), P(None, "data", "model"))
    assert (down.shape, down.sharding.spec) == ((3, 6, 8), P(None, "model", "data"))
    np.testing.assert_allclose(losses, trained(layout.on_one_device(), Stack(), steps=2)[1], rtol=1e-5)


class Normed(nn.Module):
    """A module with one collection that the forward pass updates and one that it does not."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        self.variable("constants", "shift", lambda: jnp.ones(()))
        x = nn.BatchNorm(momentum=0.5, use_running_average=not train, use_scale=False, use_bias=False)(x)
        return dense(6, axes(NORMAL)("embed", "mlp"))(x)


def test_the_third_value_of_a_loss_updates_the_collections_it_names(layout: jp.Layout) -> None:
    def loss_fn(variables: Any, batch: jax.Array) -> Any:
        out, updates = Normed().apply(variables, batch, train=True, mutable=["batch_stats"])
        return jnp.mean(out**2), {"top": jnp.max(out)}, updates

    state = jp.init(layout, lambda key: Normed().init(key, EXAMPLE), TX)
    step = jp.train_step(layout, loss_fn)
    mean, x = np.zeros(8), batch()
    for _ in range(3):
        stats = state.variables["batch_stats"]["BatchNorm_0"]
        np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
        mean = (mean + x.mean(0)) / 2
        state, metrics = step(state, x)
        assert set(metrics) == {"loss", "grad_norm", "skipped", "top"}
    assert state.variables["constants"]["shift"] == 1
    assert state.variables.keys() == {"batch_stats", "constants"}


class Constrained(nn.Module):
    """A module that constrains its activations with Flax's function."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(6, axes(NORMAL)("embed", "mlp"))(x)
        return nn.with_logical_constraint(jnp.tanh(x), ("batch", "mlp"))


def test_flax_rules_make_its_constraints_read_the_layout(layout: jp.Layout) -> None:
    def apply(variables: Any, x: jax.Array) -> jax.Array:
        with flax_rules():
            return Constrained().apply(variables, x)

    def replicated(variables: Any, x: jax.Array) -> jax.Array:
        return Constrained().apply(variables, x)

    variables = nn.unbox(Constrained().init(jax.random.key(0), EXAMPLE))
    with layout:
        (with_rules, without) = (jax.jit(f).lower(variables, batch()).compile() for f in (apply, replicated))
    wanted = layout.sharding(("batch", "mlp"))
    assert with_rules.output_shardings.is_equivalent_to(wanted, 2)
    assert not without.output_shardings.is_equivalent_to(wanted, 2)


def test_flax_rules_want_a_layout() -> None:
    with pytest.raises(NoLayoutError), flax_rules():
        pass


def test_flax_rules_take_the_first_option_of_a_first_of() -> None:
    rules = jp.Rules(batch=("replica", "data"), heads=jp.first_of("model", None), embed="context")
    with jp.Layout(jp.MeshSpec(replica=2, data=2, model=2).build(), rules), flax_rules():
        assert nn.logical_to_mesh_axes(("batch", "heads", "embed")) == P(("replica", "data"), "model", None)


@struct.dataclass
class Nameless(nn.meta.AxisMetadata[Any]):
    """A third-party box without dim names."""

    value: Any

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> Any:
        return self

    def remove_axis(self, index: int, params: Any) -> Any:
        return self


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (lambda key: dense(6, NORMAL), ModelError, "make_model"),
        (lambda key: {"params": {"kernel": Nameless(jnp.ones((8, 6)))}}, AnnotationError, "Nameless"),
        (
            lambda key: dense(6, nn.with_partitioning(NORMAL, (("embed", "mlp"), None))).init(key, EXAMPLE),
            AnnotationError,
            "embed",
        ),
    ],
    ids=["a module", "a nameless box", "no name"],
)
def test_variables_that_cannot_be_laid_out_are_refused(make: Any, kind: Any, name: str, layout: jp.Layout) -> None:
    with raises(kind, name):
        jp.init(layout, make, TX)


@pytest.mark.parametrize(("updates", "what"), [({"cache": {}}, "cache"), (1.0, "float")])
def test_updates_of_no_carried_collection_are_refused(updates: Any, what: str, layout: jp.Layout) -> None:
    state = jp.init(layout, lambda key: Normed().init(key, EXAMPLE), TX)
    with raises(ModelError, what):
        jp.train_step(layout, lambda v, x: (jnp.mean(Normed().apply(v, x)), {}, updates))(state, batch())


@pytest.mark.parametrize("impl", ["auto", "dense", "flash", "gather", "ring", "ulysses", "hybrid", "split_kv"])
def test_a_model_with_attention_over_a_split_sequence_is_built(impl: str) -> None:
    """Linen runs the model to build it: here on a short example, which the mesh does not divide."""

    class Attends(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            names, zeros = ("heads", "head_dim"), jp.linen.axes(nn.initializers.zeros_init())
            init = jp.linen.axes(nn.initializers.lecun_normal())("embed", *names)
            q = nn.DenseGeneral((4, 8), kernel_init=init, bias_init=zeros(*names))(x)
            return jp.attention(q, q, q, impl=impl, **({"heads_axis": "ulysses"} if impl == "hybrid" else {}))

    rules = jp.Rules(batch="data", seq=("context", "ulysses"), embed=None, heads=None, kv_heads=None, head_dim=None)
    layout = jp.Layout(jp.MeshSpec(data=2, context=2, ulysses=2).build(), rules)
    state = jp.abstract_state(layout, lambda key: Attends().init(key, jnp.ones((1, 6, 8))), optax.sgd(0.1))
    assert state.params["DenseGeneral_0"]["kernel"].shape == (8, 4, 8)


def test_fewer_names_than_dims_are_read_as_flax_reads_them() -> None:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed",))
    module = nn.Dense(8, kernel_init=init, use_bias=False)
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data"))
    make_model = lambda key: module.init(key, jnp.ones((1, 16)))
    state = jp.abstract_state(layout, make_model, optax.sgd(0.1))
    assert state.params["kernel"].sharding.spec == P("data", None)
    (row,) = [row for row in jp.explain(layout, make_model, optax.sgd(0.1)).rows if row.path == "params/kernel"]
    assert row.dims == ("embed", None)


def test_a_model_is_built_for_its_shapes_where_no_layout_is_active() -> None:
    """Linen runs the model to make its variables, with its constraints and its attention."""

    class Constrains(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = jp.hint(jp.constrain(nn.Dense(8)(x), "batch", "seq", "embed"), "batch", "seq", "embed")
            q = x.reshape(*x.shape[:2], 2, 4)
            return jp.attention(q, q, q)

    shapes = build_shapes(lambda key: Constrains().init(key, jnp.ones((1, 6, 8)))).params
    assert jax.tree.map(jnp.shape, shapes) == {"Dense_0": {"bias": (8,), "kernel": (8, 8)}}
