"""Integers and scales are those of NumPy, bitwise equal in every layout, and no weight is gathered for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from profiles import few, few_pairs

import jaxpar as jp
from jaxpar.compression import QuantizeConfig, QuantizedArray, bytes_of, dequantize, quantize
from jaxpar.errors import ConfigError
from jaxpar.parallel.precision.quantized_array import quantize_sharded

RANDOM = np.random.default_rng(0)
PARAMS = {
    "attention": {"q": RANDOM.normal(size=(3, 24, 4, 8)), "o": RANDOM.normal(size=(3, 4, 8, 24))},
    "mlp": {"up": RANDOM.normal(size=(24, 56)), "down": RANDOM.normal(size=(96, 24))},
    "norm": RANDOM.normal(size=24),
}
PARAMS = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
AXIS = {"attention/q": -3, "attention/o": (-3, -2), "mlp/*": -2}
SPECS = {
    "attention": {"q": (None, "data", "model"), "o": (None, "model", None, "data")},
    "mlp": {"up": ("data", "model"), "down": (("model", "data"),)},
    "norm": (),
}


def config(bits: int, group: int | None, *targets: str, **options: Any) -> QuantizeConfig:
    return QuantizeConfig(targets or ("attention/*", "mlp/*"), bits, group, AXIS, **options)


def sharded(data: int, model: int) -> Any:
    mesh = jp.MeshSpec(data=data, model=model).build(jax.devices()[: data * model])
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    return jax.tree.map(put, PARAMS, SPECS, is_leaf=lambda x: isinstance(x, tuple))


def by_numpy(w: np.ndarray, dims: tuple[int, ...], bits: int, group: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The integers, and what they stand for: groups of neighbors along the joined ``dims``."""
    order = [d for d in range(w.ndim) if d not in dims] + list(dims)
    rows = w.transpose(order).reshape(*(w.shape[d] for d in order[: w.ndim - len(dims)]), -1)
    groups = rows.reshape(*rows.shape[:-1], -1, group or rows.shape[-1])
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(2 ** (bits - 1) - 1)).astype(np.float32)
    back = lambda x: x.reshape([w.shape[d] for d in order]).transpose(np.argsort(order))
    values = np.round(groups * (1 / scale))
    return back(values), back(values * scale)


DIMS = {"q": (1,), "o": (1, 2), "up": (0,), "down": (0,)}


@pytest.mark.parametrize(("bits", "group"), few([(8, None), (4, 8), (4, 4), (8, 12), (4, 24), (4, None)], 2, names=2))
def test_integers_are_those_of_numpy(bits: int, group: int | None) -> None:
    targets = ("attention/q", "mlp/up", "mlp/down") if group in (12, 24) else ("attention/*", "mlp/*")
    made = quantize(PARAMS, config(bits, group, *targets))
    count = 0
    for path, x in jax.tree_util.tree_leaves_with_path(made, is_leaf=lambda x: isinstance(x, QuantizedArray)):
        name = path[-1].key
        if not isinstance(x, QuantizedArray):
            assert name == "norm" or group in (12, 24)
            continue
        w = np.asarray(PARAMS[path[0].key][name])
        values, stands_for = by_numpy(w, DIMS[name], bits, group)
        assert x.values.dtype == {8: jnp.int8, 4: jnp.int4}[bits] and x.shape == w.shape
        np.testing.assert_array_equal(np.asarray(x.values, np.float32), values)
        np.testing.assert_allclose(x.astype(jnp.float32), stands_for, rtol=1e-6)
        per_scale = group or math.prod(w.shape[d] for d in DIMS[name])
        assert x.scales.size * per_scale == w.size
        count += 1
    assert count == (3 if group in (12, 24) else 4)


@pytest.mark.parametrize(
    ("devices", "how"), few_pairs([(4, 2), (2, 4), (8, 1)], [(8, None), (4, 8), (4, 4), (8, 2)], 1)
)
def test_values_are_bitwise_those_of_one_device(devices: tuple[int, int], how: tuple[int, int | None]) -> None:
    """Shards hold whole groups, parts of one, or parts of several."""
    params = sharded(*devices)
    made, alone = (quantize(tree, config(*how)) for tree in (params, PARAMS))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for part, name in (("attention", "q"), ("attention", "o"), ("mlp", "up"), ("mlp", "down")):
        assert made[part][name].values.sharding.is_equivalent_to(params[part][name].sharding, params[part][name].ndim)


def test_scales_are_sharded_like_the_dims_that_they_keep() -> None:
    made = quantize(sharded(2, 2), config(4, 8, "mlp/up", "attention/q", "mlp/down"))
    spec = lambda x: (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
    assert spec(made["attention"]["q"].scales) == (None, None, "model", None)  # 12 rows of a device: 1.5 groups
    assert spec(made["mlp"]["down"].scales) == (("model", "data"), None)
    made = quantize(sharded(2, 2), config(8, None, "mlp/up", "attention/o"))
    assert spec(made["mlp"]["up"].scales) == (None, "model")
    assert spec(made["attention"]["o"].scales) == (None, None, None, "data")


@pytest.mark.parametrize(("group", "kinds"), [(3, set()), (8, {"all-reduce"}), (48, {"all-reduce"})])
def test_no_weight_is_gathered(group: int, kinds: set[str]) -> None:
    mesh = jp.MeshSpec(data=8).build()
    x = jax.ShapeDtypeStruct((48, 512), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    run = jax.jit(lambda x: quantize_sharded(x, (group, 1), (("data",), ()), mesh, bits=4))
    found = jp.audit(run.lower(x).compile(), mesh=mesh).collectives
    assert {c.kind for c in found} == kinds
    assert sum(c.result_bytes for c in found) <= 4 * 512 * (48 // group)


def test_the_pytrees_of_flax() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Linear(16, 24, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.up(x)

    x = jnp.asarray(RANDOM.normal(size=(4, 16)), jnp.float32)
    model = Model(nnx.Rngs(0))
    graph, state = nnx.split(model)
    made = quantize(state, QuantizeConfig(("up/kernel",), bits=8))
    # The integers have the model's path, and what they stand for runs in the model itself.
    near = nnx.merge(graph, dequantize(made))(x)
    assert 0 < np.abs(near - model(x)).max() < 0.05
    dense = linen.Dense(24)
    variables = dense.init(jax.random.key(0), x)
    made = quantize(variables, QuantizeConfig(("kernel",), bits=8))
    assert isinstance(made["params"]["kernel"], QuantizedArray)
    assert 0 < np.abs(dense.apply(dequantize(made), x) - dense.apply(variables, x)).max() < 0.05


def test_stacked_vectors_are_not_quantized() -> None:
    """A stack of layers makes two dims of a norm's scale and of a bias."""
    blocks = {"kernel": jnp.ones((2, 8, 8)), "q_bias": jnp.ones((2, 2, 4)), "norm": {"scale": jnp.ones((2, 8))}}
    made = quantize({"blocks": blocks}, QuantizeConfig(("blocks/*",)))["blocks"]
    assert isinstance(made["kernel"], QuantizedArray)
    assert not isinstance(made["q_bias"], QuantizedArray) and not isinstance(made["norm"]["scale"], QuantizedArray)
    named = quantize({"blocks": blocks}, QuantizeConfig(("blocks/q_bias",)))["blocks"]
    assert isinstance(named["q_bias"], QuantizedArray)


def test_bytes_and_a_checkpoint(tmp_path: Path) -> None:
    params = sharded(2, 2)
    made = quantize(params, config(4, 8, scales="bfloat16"))
    numbers = sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(PARAMS) if path[-1].key != "norm")
    assert bytes_of(PARAMS) == 4 * (numbers + 24) and bytes_of(made) == numbers // 2 + numbers // 8 * 2 + 4 * 24
    layout = jp.Layout(jp.MeshSpec(data=2, model=2).build(jax.devices()[:4]), jp.Rules())
    jp.save(tmp_path / "one", {"params": made}, layout=layout)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), made)
    again = jp.restore(tmp_path / "one", {"params": like})["params"]
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(made), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_quantizing_again_changes_no_integer() -> None:
    made = quantize(PARAMS, config(4, 8))
    again = quantize(dequantize(made), config(4, 8))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-7)
    zeros = quantize({"w": jnp.zeros((8, 4))}, QuantizeConfig(("w",), bits=4, group=4))["w"]
    assert not np.asarray(zeros.astype(jnp.float32)).any()


CASES: list[tuple[Any, str]] = [
    (lambda: config(4, 5), "quantize: attention"),
    (lambda: config(4, 48, "mlp/up"), "48"),
    (lambda: config(8, None, "mlp/upp"), "mlp/upp"),
    (lambda: QuantizeConfig(("mlp/up",), axis=-3), "[-3]"),
    (lambda: config(6, None), "quantize: bits"),
    (lambda: config(4, 0), "quantize: group"),
    (lambda: config(4, 8, scales="float16"), "quantize: scales"),
    (
        lambda: QuantizeConfig("mlp/*"),  # type: ignore[arg-type]
        "mlp/*",
    ),
]


@pytest.mark.parametrize(("make", "name"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_settings_that_do_not_fit_are_errors(make: Any, name: str) -> None:
    with raises(ConfigError, name):
        quantize(PARAMS, make())


def test_integers_are_not_quantized_again() -> None:
    made = quantize(PARAMS, config(8, None))
    with raises(ConfigError, "quantize: attention", "quantized"):
        quantize(made, config(8, None))
