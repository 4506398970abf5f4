"""Models with adapters compute W + alpha / rank * A B, in every layout, and nothing else is trained."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from flax import nnx

import jaxpar as jp
from jaxpar.analysis.divergence import first_nonfinite
from jaxpar.errors import ConfigError, LayoutError, ModelError, StateError
from jaxpar.lora import LoraConfig, adapt
from jaxpar.sharding.layout import tracing_under
from jaxpar.utils.jaxprs import equations

RULES = jp.Rules(
    batch="data", embed=None, mlp="model", heads="model", head_dim=None, layers=None, params={"embed": "data"}
)
CONFIG = LoraConfig(rank=3, alpha=12, targets=("*",))
X = np.random.default_rng(0).normal(size=(8, 6, 16)).astype("float32")
named = lambda *dims: {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), dims)}


def layout_of(data: int = 1, model: int = 1, rules: jp.Rules = RULES) -> jp.Layout:
    return jp.Layout(jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model]), rules)


class Block(nnx.Module):
    """A layer as a user of Flax writes it, without a word of jaxpar."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=16, decode=False, use_bias=False, **named("embed", "heads", "head_dim"), rngs=rngs
        )
        out = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("heads", "head_dim", "embed"))
        self.attention.out = nnx.LinearGeneral((4, 4), 16, axis=(-2, -1), use_bias=False, kernel_init=out, rngs=rngs)
        self.up = nnx.Linear(16, 32, use_bias=False, **named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, **named("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return x + self.down(jax.nn.gelu(self.up(x)))


class Decoder(nnx.Module):
    """Layers in a scan, with recomputation, and one weight that is used transposed."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})(
            rngs.split(2)
        )
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (24, 16)) / 4, out_sharding=("mlp", "embed"), eager_sharding=False
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nnx.scan(nnx.remat(lambda block, x: block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return jnp.tanh(layer(self.blocks, x)) @ self.table[...].T


class Convolutions(nn.Module):
    """Linen, with statistics that are carried."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        init = lambda *dims: nn.with_logical_partitioning(nn.initializers.lecun_normal(), dims)
        x = nn.Conv(16, (3,), kernel_init=init(None, "embed", "mlp"), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, use_scale=False, use_bias=False)(x)
        return nn.Dense(4, kernel_init=init("mlp", None), use_bias=False)(jnp.tanh(x))


def make_nnx(key: jax.Array) -> Any:
    return Decoder(nnx.Rngs(key))


def nnx_loss(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) ** 2).mean(), {"top": model(batch["x"]).max()}


def make_linen(key: jax.Array) -> Any:
    return Convolutions().init(key, jnp.ones((1, 6, 16)))


def linen_loss(model: Any, batch: Any) -> Any:
    y, updates = Convolutions().apply(model, batch["x"], mutable=["batch_stats"])
    return (y**2).mean(), {}, updates


def trained(state: Any) -> Any:
    """The state with both matrices of each adapter random, equal in every layout."""
    rng, leaves = np.random.default_rng(1), jax.tree.leaves(state.params)
    values = [jax.device_put(rng.normal(size=x.shape).astype(x.dtype) / 8, x.sharding) for x in leaves]
    return dataclasses.replace(state, params=jax.tree.unflatten(jax.tree.structure(state.params), values))


def by_hand(state: Any, name: str, shape: tuple[int, ...], split: int, stacked: int = 0) -> np.ndarray:
    """W + alpha / rank * A B as matrices, in NumPy."""
    find = lambda tree: functools.reduce(lambda t, key: t[key], name.split("/"), tree)
    w, adapter = find(state.variables["frozen_params"]), find(state.params)
    a, b = (np.asarray(adapter[k], np.float64) for k in ("lora_a", "lora_b"))
    layers, rank = shape[:stacked], a.shape[-1]
    a = a.reshape(*layers, -1, rank)
    b = b.reshape(*layers, rank, -1)
    return np.asarray(w + (12 / 3 * (a @ b)).reshape(shape), np.float32)


@functools.cache
def reference(make: Any, loss: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients of the adapters on one device: those of a model whose weights are replaced by the sums."""
    layout = layout_of()
    state = trained(jp.init(layout, adapt(make, CONFIG), optax.sgd(0.1)))
    kind = state.metadata.kind

    def run(params: Any) -> Any:
        with tracing_under(layout):
            value = loss(kind.merge(params, state.variables), {"x": X})
        return value[0]

    return state, *jax.jit(jax.value_and_grad(run))(state.params)


CASES = {
    "one": ({}, {}),
    "fsdp x tp": ({"data": 4, "model": 2}, {}),
    "accumulated": ({"data": 2, "model": 2}, {"grad_accum_steps": 2}),
    "zero 1": ({"data": 4}, {"grad_reduction": "per_step", "weight_gather": "per_step"}),
    "zero 2": ({"data": 4}, {"grad_reduction": "per_microbatch", "weight_gather": "per_step"}),
}


MODELS = {"nnx": (make_nnx, nnx_loss), "linen": (make_linen, linen_loss)}
RUNS = [
    ("linen", "fsdp x tp"),  # not in microbatches, which have other statistics
    *(
        pytest.param("nnx", case, marks=pytest.mark.slow)
        for case in ("fsdp x tp", "one", "accumulated", "zero 1", "zero 2")
    ),
    *(pytest.param("linen", case, marks=pytest.mark.slow) for case in ("one", "zero 2")),
]


@pytest.mark.parametrize(("model", "case"), RUNS)
def test_values_and_gradients_are_those_of_summed_weights(model: str, case: str) -> None:
    (make, loss), (sizes, options) = MODELS[model], CASES[case]
    _, value, grads = reference(make, loss)
    layout = layout_of(**sizes)
    state = trained(jp.init(layout, adapt(make, CONFIG), optax.sgd(0.1)))
    step = jp.train_step(layout, loss, return_grads=True, **options)
    before = jax.tree.map(np.asarray, state.variables["frozen_params"])
    after, metrics = step(state, {"x": X})
    assert abs(float(metrics["loss"]) - float(value)) < 1e-5 * max(1, float(value))
    for mine, theirs in zip(jax.tree.leaves(metrics["grads"]), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=0, atol=1e-5)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, after.variables["frozen_params"]))


@pytest.mark.slow
def test_merged_weights_are_w_plus_alpha_over_rank_a_b() -> None:
    state, _, _ = reference(make_nnx, nnx_loss)
    merged = jp.lora.merge(state)
    shapes = {
        "blocks/attention/query/kernel": ((2, 16, 4, 4), 1),
        "blocks/attention/out/kernel": ((2, 4, 4, 16), 2),
        "blocks/up/kernel": ((2, 16, 32), 1),
    }
    for name, (shape, split) in shapes.items():
        got = functools.reduce(lambda t, key: t[key], name.split("/"), merged)
        np.testing.assert_allclose(np.asarray(got), by_hand(state, name, shape, split, stacked=1), rtol=0, atol=1e-6)
        adapter = functools.reduce(lambda t, key: t[key], name.split("/"), state.params)
        inputs, outputs = shape[1 : 1 + split], shape[1 + split :]
        assert (adapter["lora_a"].shape, adapter["lora_b"].shape) == ((2, *inputs, 3), (2, 3, *outputs))
    table = np.asarray(by_hand(state, "table", (24, 16), 1))
    np.testing.assert_allclose(np.asarray(merged["table"]), table, rtol=0, atol=1e-6)


def test_adapters_are_sharded_by_the_rules_of_their_weight() -> None:
    layout = layout_of(4, 2)
    state = jp.abstract_state(layout, adapt(make_nnx, CONFIG), optax.adam(1e-3))
    spec = lambda leaf: tuple(leaf.sharding.spec)
    up, out = state.params["blocks"]["up"]["kernel"], state.params["blocks"]["attention"]["out"]["kernel"]
    frozen = state.variables["frozen_params"]["blocks"]["up"]["kernel"]
    assert spec(frozen) == (None, "data", "model")
    assert (spec(up["lora_a"]), spec(up["lora_b"])) == ((None, "data", None), (None, None, "model"))
    assert (spec(out["lora_a"]), spec(out["lora_b"])) == ((None, "model", None, None), (None, None, "data"))
    moments = state.opt_state[0].mu["blocks"]["up"]["kernel"]["lora_a"]
    assert spec(moments) == (None, "data", None)


def test_frozen_weights_have_no_optimizer_state_and_no_gradients() -> None:
    layout = layout_of(2, 2)
    state = jp.abstract_state(layout, adapt(make_nnx, CONFIG), optax.adam(1e-3))
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    assert count(state.opt_state) == 2 * count(state.params) + 1
    assert count(state.params) < count(state.variables["frozen_params"]) / 2

    def sizes(make: Any) -> set[tuple[int, ...]]:
        """The shapes of everything that the step computes in the shape of a weight of one layer, or of all."""
        state = jp.abstract_state(layout, make, optax.adam(1e-3))
        jaxpr = jax.make_jaxpr(jp.train_step(layout, nnx_loss, donate=False))(state, {"x": X}).jaxpr
        made = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
        return {tuple(sorted(eqn.outvars[0].aval.shape)) for eqn in made}

    weight = tuple(sorted((16, 32)))  # of `up` and `down`: their gradient is a product of this shape
    assert weight in sizes(make_nnx)
    assert weight not in sizes(adapt(make_nnx, CONFIG))


@pytest.mark.slow
def test_initial_adapters_change_nothing_and_initial_weights_are_those_of_the_model() -> None:
    layout = layout_of(2, 2)
    state = jp.init(layout, adapt(make_linen, CONFIG), optax.sgd(0.1), seed=3)
    plain = jp.init(layout, make_linen, optax.sgd(0.1), seed=3)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, jp.lora.frozen_params(state), plain.params)
    jax.tree.map(same, jp.lora.merge(state), plain.params)
    a = np.asarray(state.params["Conv_0"]["kernel"]["lora_a"])
    assert a.shape == (3, 16, 3)
    bound = 48**-0.5  # uniform, as in PEFT: the bound is 1 / sqrt(number of inputs)
    assert 0.95 * bound < np.abs(a).max() <= bound
    assert 0.5 * bound < a.std() < 0.65 * bound


@pytest.mark.slow
def test_given_weights_make_the_state_that_init_makes_with_them() -> None:
    layout, make, tx = layout_of(2, 2), adapt(make_linen, CONFIG), optax.adam(0.1)
    state = jp.init(layout, make, tx, seed=3)
    given = jp.lora.init_from(layout, make, tx, jp.lora.frozen_params(state), seed=3)
    assert jax.tree.structure(given) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(state), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            assert a.sharding == b.sharding
    with raises(ModelError, "init_from()"):
        jp.lora.init_from(layout, make, tx, {"w": jnp.ones(3)})


def test_given_weights_are_not_copied_and_named_when_a_step_has_taken_them_over() -> None:
    make = adapt(lambda key: {"up": jp.tag(jax.random.normal(key, (8, 4)), "embed", "mlp")}, CONFIG)
    layout, tx = layout_of(), optax.sgd(0.1)
    like = jp.lora.frozen_params(jp.abstract_state(layout, make, tx))
    given = jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape, "f4"), leaf.sharding), like)
    step = jp.train_step(layout, lambda model, x: jnp.mean((x @ model["up"]) ** 2))
    copied, _ = step(jp.lora.init_from(layout, make, tx, jax.tree.map(jnp.copy, given)), np.ones((2, 8), "f4"))
    state, _ = step(jp.lora.init_from(layout, make, tx, given), np.ones((2, 8), "f4"))
    for name, call in (
        ("init_from", lambda: jp.lora.init_from(layout, make, tx, given)),
        ("with_frozen", lambda: jp.lora.with_frozen(jp.lora.without_frozen(state), given)),
    ):
        with raises(StateError, f"{name}()"):
            call()
    again = jp.lora.init_from(layout, make, tx, jp.lora.frozen_params(state))
    np.testing.assert_array_equal(jp.lora.frozen_params(again)["up"], jp.lora.frozen_params(copied)["up"])


def test_given_weights_have_one_digest_in_every_layout() -> None:
    make = adapt(lambda key: {"up": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}, CONFIG)
    digests = set()
    for layout in (layout_of(), layout_of(2)):
        like = jp.lora.frozen_params(jp.abstract_state(layout, make, optax.sgd(0.1)))
        given = jax.tree.map(lambda leaf: jax.device_put(np.arange(64, dtype="f4").reshape(16, 4), leaf.sharding), like)
        digests.add(jp.lora.digest_of(given))
    state = jp.lora.init_from(layout, make, optax.sgd(0.1), given, seed=3)
    assert jp.lora.frozen_params(state)["up"] is given["up"] and state.params["up"]["lora_a"].shape == (16, 3)
    (digest,) = digests
    swapped = {"up": given["up"].at[:2].set(given["up"][1::-1])}
    assert len(digest) == 12 and jp.lora.digest_of(swapped) != digest


@pytest.mark.slow
def test_a_checkpoint_of_the_adapters_alone_resumes_bitwise_in_another_layout(tmp_path: Path) -> None:
    make, tx = adapt(make_linen, CONFIG), optax.adam(1e-2)
    layout = layout_of(4, 2)
    step = jp.train_step(layout, linen_loss, donate=False)
    state, _ = step(jp.init(layout, make, tx), {"x": X})
    jp.save(tmp_path / "one", jp.lora.without_frozen(state), layout=layout)
    ahead, _ = step(state, {"x": X})
    stored = sum(f.stat().st_size for f in (tmp_path / "one").rglob("*") if f.is_file())
    assert not any("frozen" in str(f) for f in (tmp_path / "one").rglob("*"))
    assert stored < 200_000
    like = jp.lora.without_frozen(jp.abstract_state(layout, make, tx))
    again = jp.lora.with_frozen(jp.restore(tmp_path / "one", like), jp.lora.frozen_params(state))
    after, _ = step(again, {"x": X})
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, after.params, ahead.params)
    jax.tree.map(same, after.opt_state, ahead.opt_state)
    other = layout_of(2)
    moved = jp.restore(tmp_path / "one", jp.lora.without_frozen(jp.abstract_state(other, make, tx)))
    jax.tree.map(same, moved.params, state.params)


def test_a_bf16_step_casts_frozen_weights_too() -> None:
    layout = layout_of(2, 2)
    state = jp.abstract_state(layout, adapt(make_nnx, CONFIG), optax.sgd(0.1))
    jaxpr = jax.make_jaxpr(jp.train_step(layout, nnx_loss, donate=False, precision="bf16"))(
        state, {"x": X.astype(jnp.bfloat16)}
    ).jaxpr
    dots = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(dots) > 20
    assert {v.aval.dtype.name for eqn in dots for v in eqn.invars if v.aval.shape[-2:] in ((16, 32), (32, 16))} == {
        "bfloat16"
    }


def test_the_first_number_that_is_not_finite_is_found() -> None:
    layout = layout_of(2, 2)
    make = lambda key: {"up": jp.tag(jnp.ones((16, 4)), "embed", "mlp")}
    state = trained(jp.init(layout, adapt(make, CONFIG), optax.sgd(0.1)))
    loss = lambda model, batch: jnp.sum(jp.hint(batch["x"] @ model["up"], "batch", None, "mlp"))
    found = first_nonfinite(layout, state, {"x": X * np.nan}, loss)
    assert "is_found (test_adapters.py" in found and found.endswith("(batch, None, mlp), call 1")


def error_of(*targets: str, name: str, **options: Any) -> None:
    with raises(ConfigError, name):
        jp.abstract_state(layout_of(), adapt(make_nnx, LoraConfig(targets=targets, **options)), optax.sgd(0.1))


def test_a_pattern_that_matches_nothing_reports_the_nearest_paths() -> None:
    error_of("attention/quary/kernel", name="attention/quary/kernel")
    error_of("table", inputs={"up/kernel": 1}, name="up/kernel")


def test_numbers_that_fit_no_adapter_are_errors() -> None:
    for rank in (0, -1, True, 1.5):
        with raises(ConfigError, "lora: rank"):
            LoraConfig(rank=rank)  # type: ignore[arg-type]
    with raises(ConfigError, "lora: alpha"):
        LoraConfig(alpha=0)
    with raises(ConfigError, "lora: targets", "'q'"):
        LoraConfig(targets="q")  # type: ignore[arg-type]
    error_of("out/kernel", inputs={"out/kernel": 3}, name="blocks/attention/out/kernel")


def test_vectors_have_no_adapters() -> None:
    make = lambda key: {"w": jp.tag(jnp.ones((16, 4)), "embed", "mlp"), "bias": jp.tag(jnp.ones(4), "mlp")}
    state = jp.abstract_state(layout_of(), adapt(make, LoraConfig(targets=("*",))), optax.sgd(0.1))
    assert list(state.params) == ["w"]
    with raises(ConfigError, "bias", "lora"):
        jp.abstract_state(layout_of(), adapt(make, LoraConfig(targets=("bias",))), optax.sgd(0.1))


def test_a_model_is_adapted_once_and_other_states_have_no_frozen_weights() -> None:
    with raises(ModelError, "make_model", "already"):
        jp.abstract_state(layout_of(), adapt(adapt(make_nnx, CONFIG), CONFIG), optax.sgd(0.1))
    state = jp.abstract_state(layout_of(), make_nnx, optax.sgd(0.1))
    assert jp.lora.without_frozen(state) is state
    with raises(ModelError, "merge()"):
        jp.lora.merge(state)


def test_frozen_weights_without_names_are_an_error_as_parameters_are() -> None:
    make = lambda key: {"w": jnp.ones((16, 4)), "v": jp.tag(jnp.ones((16, 4)), "embed", "mlp")}
    with raises(LayoutError, "variables/frozen_params/w"):
        jp.abstract_state(layout_of(), adapt(make, LoraConfig(targets=("v",))), optax.sgd(0.1))


def test_frozen_weights_without_names_are_sharded_by_zero() -> None:
    rules = jp.Zero(stage=3, min_bytes=0).rules(jp.Rules(batch="data", unannotated="replicate"))
    make = lambda key: {"w": jnp.ones((16, 4))}
    state = jp.abstract_state(layout_of(4, rules=rules), adapt(make, LoraConfig(rank=1)), optax.sgd(0.1))
    assert tuple(state.variables["frozen_params"]["w"].sharding.spec) == ("data", None)
