"""int8 collectives: the quantization error, the data sent, and exact results where nothing is rounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.collectives import gather_reduce, quantized
from jaxpar.parallel.collectives.gather_reduce import precision_scope

INT8 = {"gather": "int8", "reduce": "int8"}
FSDP: dict[str, Any] = {
    "batch": ("replica", "data"),
    "embed": None,
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "params": {"embed": "data"},
    "gradients": {"embed": "data"},
}
MESHES = {
    "8 ways": jp.MeshSpec(data=8),
    "beside tensor parallelism": jp.MeshSpec(data=4, model=2),
    "in groups": jp.MeshSpec(replica=2, data=4),
}


@examples(10)
@given(
    rows=st.integers(1, 3),
    n=st.integers(1, 700),
    block=st.integers(1, 300),
    power=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_no_number_is_off_by_more_than_half_a_step_of_its_block(
    rows: int, n: int, block: int, power: int, seed: int
) -> None:
    x = (np.random.default_rng(seed).normal(size=(rows, n)) * 2.0**power).astype(np.float32)

    @jax.jit
    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        packed = quantized.pack(x, block)
        return packed.scales, quantized.unpack(packed)

    scales, back = there_and_back(x)
    size = quantized.block_of(n, block)
    assert n % size == 0
    assert scales.shape == (rows, n // size)
    most = np.abs(x.reshape(rows, -1, size)).max(-1, keepdims=True) / 254
    off = np.abs(np.asarray(back) - x).reshape(rows, -1, size)
    # The quotient (up to 127 steps), the product and the scale are rounded, and a quotient may be a product with a
    # reciprocal. Each rounding adds up to 127 eps of half a step.
    assert (off / np.where(most == 0, 1, most)).max() <= 1 + 4 * 127 * np.finfo(np.float32).eps


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_zeros_stay_zeros(bad: float) -> None:
    x = np.zeros((3, 64), np.float32)
    x[1, 7] = bad
    back = np.asarray(quantized.unpack(quantized.pack(jnp.asarray(x))))
    assert not np.isfinite(back[1]).all()
    assert (back[[0, 2]] == 0).all()


def on_eight(f: Callable[..., jax.Array], x: np.ndarray, out: P) -> np.ndarray:
    """``f`` applied to each device's row of ``x``."""
    with jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data")):
        one = jax.shard_map(lambda x: f(x[0]), in_specs=P("data"), out_specs=out, check_vma=False)
        return np.asarray(jax.jit(one)(x))


@pytest.mark.parametrize("shape", few([(24, 16, 3), (16, 24), (5, 7)], 1), ids=str)
def test_sums_in_int8_are_off_by_the_roundings_alone(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    most = np.abs(x).max() / 254
    summed = on_eight(lambda x: quantized.sum_packed(x, "data"), x, P())
    # Each of eight parts is rounded once, and their sum once more.
    assert np.abs(summed - x.sum(0)).max() <= 8 * most + np.abs(x.sum(0)).max() / 254 + 8 * most / 254
    if shape[0] % 8 == 0:
        parts = on_eight(lambda x: quantized.scatter_packed(x, "data", dim=0), x, P("data"))
        assert np.abs(parts - x.sum(0)).max() <= 8 * most
        whole = on_eight(lambda x: quantized.gather_packed(x, "data", dim=1, dtype=jnp.float32), x, P())
        assert np.abs(whole - np.concatenate(x, 1)).max() <= most


def product_and_grads(
    mesh: jp.MeshSpec, devices: int = 8, reshard_after_forward: Any = True, **precision: Any
) -> tuple[Any, str]:
    """Products with several weights and with one summed over two dims; their gradients; the jaxpr."""
    random = np.random.default_rng(1)
    x = random.normal(size=(16, 3, 16)).astype(np.float32)
    q, k, o = (random.normal(size=s).astype(np.float32) for s in ((16, 4, 6), (16, 4, 6), (4, 6, 16)))

    def loss(x: jax.Array, q: jax.Array, k: jax.Array, o: jax.Array) -> jax.Array:
        with precision_scope(jp.Precision.of(precision)):
            kv = ("embed", "kv_heads", "head_dim")
            a, b = jp.sharded_dot(
                x, (q, ("embed", "heads", "head_dim")), (k, kv), reshard_after_forward=reshard_after_forward
            )
            (y,) = jp.sharded_dot(
                jnp.sin(a) * b,
                (o, ("heads", "head_dim", "embed")),
                summed=2,
                reshard_after_forward=reshard_after_forward,
            )
            return jnp.sum(y * jnp.cos(x))

    with jp.Layout(mesh.build(jax.devices()[:devices]), jp.Rules(**FSDP)), jax.default_matmul_precision("highest"):
        run = jax.value_and_grad(loss, (0, 1, 2, 3))
        return jax.device_get(jax.jit(run)(x, q, k, o)), str(jax.make_jaxpr(run)(x, q, k, o))


@pytest.fixture(scope="module")
def product_on_one_device() -> Any:
    return product_and_grads(jp.MeshSpec(data=1), 1)[0]


@pytest.mark.parametrize("mesh", few(reversed(MESHES), 1))
def test_groups_that_keep_a_part_change_no_number(mesh: str, product_on_one_device: Any) -> None:
    value, grads = product_on_one_device
    (got, others), text = product_and_grads(MESHES[mesh], reshard_after_forward=2)
    assert "axis_index_groups=((0, 1)" in text
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(others, grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", few(MESHES, 1))
def test_products_in_int8_are_near_and_alike_whatever_is_kept(mesh: str, product_on_one_device: Any) -> None:
    _, grads = product_on_one_device
    found = {r: product_and_grads(MESHES[mesh], reshard_after_forward=r, **INT8) for r in (True, 2, False)}
    for (_, others), text in found.values():
        assert "i8[" in text
        for a, b, c in zip(others, grads, found[True][0][1], strict=True):
            gap = np.linalg.norm(a - b) / np.linalg.norm(b)
            # Rounding to int8 dominates: with other instruction sets, gaps change by less than 1 %.
            assert 1e-6 < gap < 0.06  # two products and a sine in sequence
            np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5 * np.abs(c).max())


RULES = {
    name: None
    for name in ("seq", "residual_seq", "embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers")
}
SHARDED = jp.Rules(batch="data", **RULES, params={"embed": "data"})
WAYS: dict[str, tuple[jp.Rules, dict[str, Any]]] = {
    "stage 0": (jp.Rules(batch="data", **RULES), {}),
    "stage 1": (jp.Zero(stage=1, min_bytes=1024).rules(jp.Rules(batch="data", **RULES)), jp.Zero(stage=1).step),
    "stage 2": (jp.Zero(stage=2, min_bytes=1024).rules(jp.Rules(batch="data", **RULES)), jp.Zero(stage=2).step),
    "stage 3": (SHARDED, {}),
}
TINY = LlamaConfig(vocab=64, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96, remat="full")


def step_of(rules: jp.Rules, devices: int, precision: Any, **options: Any) -> tuple[Any, str]:
    """Loss and gradients of a tiny Llama, and the program's text."""
    layout = jp.Layout(jp.MeshSpec(data=-1).build(jax.devices()[:devices]), rules)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    with jax.default_matmul_precision("highest"):
        state = jp.init(layout, make_llama(TINY), optax.sgd(0.1), precision=precision)
        lowered = jp.train_step(layout, next_token_loss, precision=precision, return_grads=True, **options).lower(
            state, batch
        )
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        return jax.device_get(step(state, batch)[1]), step.as_text()


@pytest.fixture(scope="module")
def exact() -> Any:
    return step_of(WAYS["stage 0"][0], 1, None)[0]


def apart(got: Any, want: Any) -> list[float]:
    """The relative norm of each tensor's difference: unlike the largest entry, one rounding hardly changes it."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("way", few(WAYS, 1))
def test_every_stage_can_send_int8(way: str, exact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_reduce, "SMALL", 1024)  # the model's largest weights are below 64 KiB
    rules, options = WAYS[way]
    asked = {"reduce": "int8"} if way == "stage 0" else INT8
    found, text = step_of(rules, 8, asked, **options)
    gaps = apart(found["grads"], exact["grads"])
    assert abs(found["loss"] - exact["loss"]) < 2e-3
    # Rounding to int8 dominates: with other instruction sets, gaps change by less than 1 %.
    assert 1e-6 < max(gaps) < 0.04
    sent = re.findall(r"= \(?(\w+)\[[\d,]+\]\S* .*?(all-gather|all-to-all|all-reduce|reduce-scatter)\(", text)
    assert ("s8", "all-to-all") in sent
    assert way == "stage 0" or ("s8", "all-gather") in sent


@pytest.mark.slow
def test_a_step_with_matmuls_in_fp8_is_near_one_without(exact: Any) -> None:
    found, _ = step_of(SHARDED, 8, {"matmul": "fp8"})
    assert 1e-6 < abs(found["loss"] - exact["loss"]) < 1e-2
    # Rounding to fp8 dominates: with other instruction sets, gaps change by less than 1 %.
    assert 1e-3 < max(apart(found["grads"], exact["grads"])) < 0.3


@pytest.mark.parametrize("mesh", MESHES)
def test_an_fp8_product_has_one_scale_in_every_layout(mesh: str) -> None:
    random = np.random.default_rng(2)
    x, w, c = (random.normal(size=s).astype(np.float32) for s in ((16, 3, 16), (16, 4, 6), (16, 3, 4, 6)))

    def of(spec: jp.MeshSpec, devices: int) -> Any:
        with (
            jp.Layout(spec.build(jax.devices()[:devices]), jp.Rules(**FSDP)),
            precision_scope(jp.Precision(matmul="fp8")),
        ):
            one = lambda x, w: jp.sharded_dot(x, (w, ("embed", "heads", "head_dim")))[0]
            return jax.device_get(jax.jit(lambda x, w: jax.vjp(one, x, w)[1](c))(x, w))

    for a, b in zip(of(MESHES[mesh], 8), of(jp.MeshSpec(data=1), 1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("way", few(["by the compiler", "by hand"], 1))
def test_fp8_products_and_their_gradients(way: str, product_on_one_device: Any) -> None:
    _, grads = product_on_one_device
    asked = {"matmul": "fp8"} if way == "by the compiler" else {"matmul": "fp8", **INT8}
    (_, others), text = product_and_grads(MESHES["beside tensor parallelism"], **asked)
    assert "f8_e4m3fn" in text and "f8_e5m2" in text
    for a, b in zip(others, grads, strict=True):
        # Rounding to fp8 dominates: with other instruction sets, gaps change by less than 1 %.
        assert 1e-3 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.2


def test_fp8_has_a_short_name_and_no_other() -> None:
    assert jp.Precision.of("fp8") == jp.Precision.of({"compute": "fp8"}) == jp.Precision(compute="bf16", matmul="fp8")
    with raises(ConfigError, "precision: matmul", "fp4"):
        jp.Precision(matmul="fp4")


@pytest.mark.slow
def test_a_weight_that_is_not_a_number_is_not_hidden() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), SHARDED)
    state = jp.init(layout, make_llama(TINY), optax.sgd(0.1))
    state.params["blocks"]["mlp"]["up"] = state.params["blocks"]["mlp"]["up"].at[0, 0, 0].set(jnp.nan)
    batch = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "targets")}
    _, metrics = jp.train_step(layout, next_token_loss, precision=INT8)(state, batch)
    assert metrics["skipped"]


def test_a_model_that_hands_nothing_over_is_told_so() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), jp.Rules(batch="data", embed="data", mlp=None))
    make = lambda key: {"w": jp.tag(jnp.ones((16, 4)), "embed", "mlp")}
    state = jp.init(layout, make, optax.sgd(0.1))
    for name, dtype in (("gather", "int8"), ("reduce", "int8"), ("matmul", "fp8")):
        with raises(ConfigError, "jaxpar.sharded_dot"):
            jp.train_step(layout, lambda model, x: jnp.mean(x @ model["w"]), precision={name: dtype})(
                state, np.ones((8, 16), np.float32)
            )


@pytest.mark.parametrize("group", [3, 0, -2, 16])
def test_groups_that_do_not_divide_are_named(group: int) -> None:
    with raises(ConfigError, "reshard_after_forward", "'embed'"):
        product_and_grads(jp.MeshSpec(data=8), reshard_after_forward=group)
