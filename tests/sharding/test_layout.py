"""Layouts: specs and shardings, the ambient layout as part of jit's cache key, constrain, hint and shard_array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from error_texts import raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Layout, MeshSpec, Rules, constrain, current_layout, hint, over, shard_array
from jaxpar.errors import ConfigError, JaxparError, LayoutError, MeshError, NoLayoutError
from jaxpar.sharding.layout import tracing_under
from jaxpar.utils.contexts import hint_observer

RULES = Rules(batch=("replica", "data"), embed=None, mlp="model", params={"embed": "data"}, optimizer=over("data"))
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def layout(rules: Rules = RULES, *, axis_type: AxisType | None = None, **sizes: int) -> Layout:
    mesh = MeshSpec(**(sizes or {"data": 4, "model": 2})).build(axis_type=axis_type)
    return Layout(mesh, rules, explicit=axis_type is AxisType.Explicit)


def square() -> jax.Array:
    return jnp.arange(64.0).reshape(8, 8)


def test_a_spec_follows_the_rules_of_its_role() -> None:
    assert layout().spec(("batch", "embed", "mlp"), (8, 3, 6)) == P("data", None, "model")
    assert layout().spec(("embed", "mlp"), (8, 6), role="params") == P("data", "model")
    assert layout(replica=2, data=2, model=2).spec(("batch", None)) == P(("replica", "data"), None)
    assert layout().spec((), ()) == P()


@pytest.mark.parametrize(
    ("dtype", "spec"), [(np.float32, P("data")), ("bfloat16", P(None)), (np.dtype("int64"), P("data"))]
)
def test_over_counts_the_bytes_of_the_dtype(dtype: Any, spec: P) -> None:
    assert layout().spec((None,), (16 * 1024,), role="optimizer", dtype=dtype) == spec


def test_a_prng_key_is_placed_like_any_array() -> None:
    with layout():
        keys = jax.jit(lambda key: constrain(jax.random.split(key, 8), "batch"))(jax.random.key(0))
    assert keys.sharding.spec == P("data")


def test_a_sharding_lies_on_the_mesh_of_the_layout() -> None:
    ours = layout()
    assert ours.sharding(("batch", "mlp"), (8, 8)) == NamedSharding(ours.mesh, P("data", "model"))
    assert ours.sharding(("batch", "mlp"), (8, 8)).shard_shape((8, 8)) == (2, 4)


def test_every_problem_of_a_tensor_is_listed() -> None:
    with raises(LayoutError, "batch", "mpl", "mlp", "data=4") as caught:
        layout().spec(("batch", "mpl", "mlp"), (2, 8, 3))
    assert len(caught.value.problems) == 3


def test_layouts_are_values() -> None:
    table = {layout(): "a", layout(Rules(batch="data")): "b", layout(data=8): "c"}
    assert len(table) == 3
    assert table[layout()] == "a"
    assert table[layout(data=8)] == "c"


@pytest.mark.parametrize(
    ("rules", "sizes"),
    [(Rules(batch="model", mlp="data"), {}), (RULES, {"data": 2, "model": 4}), (RULES, {"data": 8})],
)
def test_a_function_is_traced_once_per_layout_and_found_again(rules: Rules, sizes: dict[str, Any]) -> None:
    traces = 0

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        nonlocal traces
        traces += 1
        return constrain(2 * x, "batch", "mlp")

    for ours, expected in ((layout(), 1), (layout(rules, **sizes), 2), (layout(), 2)):
        with ours:
            y = double(np.arange(64.0, dtype=np.float32).reshape(8, 8))
        np.testing.assert_array_equal(y, 2 * square())
        assert y.sharding.is_equivalent_to(ours.sharding(("batch", "mlp")), y.ndim)
        assert traces == expected


def test_layouts_nest_and_are_restored_after_an_error() -> None:
    outer, inner = layout(), layout(data=8)
    with outer:
        with pytest.raises(ZeroDivisionError), inner, inner:
            assert current_layout() == inner
            assert jax.sharding.get_abstract_mesh().shape["data"] == 8
            raise ZeroDivisionError
        assert current_layout() == outer
        assert jax.sharding.get_abstract_mesh().shape["data"] == 4
        with inner:
            assert current_layout() == inner
        assert current_layout() == outer
    assert jax.sharding.get_abstract_mesh().empty
    with pytest.raises(NoLayoutError):
        current_layout()


@AXIS_TYPES
def test_constrain_places_inside_and_outside_jit(axis_type: AxisType) -> None:
    ours, x = layout(axis_type=axis_type), square()
    assert len(x.sharding.device_set) == 1

    def f(x: jax.Array) -> jax.Array:
        return 2 * constrain(x, "batch", "mlp")

    with ours:
        for run in (f, jax.jit(f)):
            assert run(x).sharding == ours.sharding(("batch", "mlp"))
            np.testing.assert_array_equal(run(x), 2 * x)
            np.testing.assert_array_equal(jax.grad(lambda x, run=run: (run(x) ** 2).sum())(x), 8 * x)


@AXIS_TYPES
@pytest.mark.parametrize(
    ("manual", "inside", "outside"),
    [
        ({"data"}, ((), ("model",)), P("data", "model")),
        ({"model"}, (("data",), ()), P("data", None)),
        ({"data", "model"}, ((), ()), P("data", None)),
    ],
)
def test_hint_leaves_manual_axes_out_and_keeps_the_others(
    axis_type: AxisType, manual: set[str], inside: tuple[Any, ...], outside: P
) -> None:
    ours = layout(axis_type=axis_type)
    part = P("data" if "data" in manual else None, None)
    places = []

    def shard(x: jax.Array) -> jax.Array:
        return 2 * hint(x, "batch", "mlp")

    with ours, hint_observer(lambda site, dims, x, resolved: places.append(resolved.axes)):
        x = jax.device_put(square(), NamedSharding(ours.mesh, part))
        f = jax.jit(jax.shard_map(shard, in_specs=part, out_specs=part, axis_names=manual))
        assert f(x).sharding.is_equivalent_to(NamedSharding(ours.mesh, outside), x.ndim)
        np.testing.assert_array_equal(f(x), 2 * square())
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x), 8 * square())
    assert set(places) == {inside}


@AXIS_TYPES
def test_constrain_refuses_a_manual_axis_and_accepts_the_others(axis_type: AxisType) -> None:
    def shard(verb: Any, dims: tuple[str, ...]) -> Any:
        f = jax.shard_map(lambda x: verb(x, *dims), in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        return jax.jit(f)(shard_array(layout(axis_type=axis_type), np.ones((8, 8)), "batch", "embed"))

    with layout(axis_type=axis_type):
        assert shard(constrain, ("embed", "mlp")).sharding.spec == P("data", "model")
        with raises(LayoutError, "shard_map", "constrain()"):
            shard(constrain, ("batch", "mlp"))
        with raises(LayoutError, "bach"):
            shard(hint, ("bach", "mlp"))


def test_an_observer_sees_problems_instead_of_an_error() -> None:
    seen = []
    with (
        layout(),
        hint_observer(
            lambda site, dims, x, resolved: seen.append((site.split(" ")[0], dims, x.shape, len(resolved.problems)))
        ),
    ):
        assert constrain(jnp.ones((3, 8)), "batch", "mlp").shape == (3, 8)
        hint(jnp.ones((4, 8)), "batch", "embed")
    name = "test_an_observer_sees_problems_instead_of_an_error"
    assert seen == [(name, ("batch", "mlp"), (3, 8), 1), (name, ("batch", "embed"), (4, 8), 0)]


def test_what_was_traced_under_an_observer_is_not_found_again() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return constrain(x, "batch")

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    seen: list[int] = []
    with layout():
        for _ in range(2):
            with hint_observer(lambda site, dims, x, resolved: seen.append(len(resolved.problems))):
                jax.eval_shape(lambda x: inner(x), x)
        assert seen == [1, 1]
        with pytest.raises(LayoutError):
            jax.eval_shape(lambda x: inner(x), x)


def test_tracing_under_accepts_its_own_layout_and_refuses_another() -> None:
    with layout(), tracing_under(layout()):
        assert current_layout() == layout()
    with raises(LayoutError, "'with'"), layout(), tracing_under(layout(data=8)):
        pass
    with raises(LayoutError, "'model': 2}", "other"), layout(), tracing_under(layout(Rules())):
        pass


@AXIS_TYPES
def test_an_abstract_layout_traces_without_devices(axis_type: AxisType) -> None:
    mesh = MeshSpec(data=-1, model=8).abstract(4096, axis_type=axis_type)
    ours = Layout(mesh, RULES, explicit=axis_type is AxisType.Explicit)
    x = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
    with ours:
        y = jax.eval_shape(lambda x: constrain(2 * x, "batch", "mlp"), x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if axis_type is AxisType.Explicit:
            assert y.sharding.spec == P("data", "model")
        with raises(LayoutError, "data=512"):
            jax.eval_shape(lambda x: constrain(x, "batch", "mlp"), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))


def test_from_yaml_reads_mesh_and_rules(tmp_path: Path) -> None:
    file = tmp_path / "tp.yaml"
    file.write_text("mesh: {data: -1, model: 2}\nrules: {batch: data, mlp: model, optimizer: {over: data}}\n")
    rules = Rules(batch="data", mlp="model", optimizer=over("data"))
    assert Layout.from_yaml(file) == layout(rules)
    assert Layout.from_yaml(file, devices=jax.devices()[:4]).sizes["data"] == 2
    assert Layout.from_yaml(str(file), devices=4096) == Layout(MeshSpec(data=2048, model=2).abstract(), rules)
    file.write_text("mesh:\nrules:\n")
    assert Layout.from_yaml(file, devices=1).sizes == dict.fromkeys(layout().sizes, 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mesh: {dta: 1}\nrules: {}", MeshError),
        ("mesh: {data: -1}\nrules: {batch: dta}", LayoutError),
        ("mesh: {data: -1}", ConfigError),
    ],
)
def test_errors_of_from_yaml_name_the_file(tmp_path: Path, text: str, error: type[JaxparError]) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(text)
    with raises(error, "layout.yaml"):
        Layout.from_yaml(file)


@AXIS_TYPES
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, bool])
def test_put_keeps_values_and_shards_them(axis_type: AxisType, dtype: Any) -> None:
    ours = layout(axis_type=axis_type)
    x = np.arange(64).reshape(8, 8).astype(dtype)
    y = shard_array(ours, x, "batch", "mlp")
    assert y.dtype == dtype
    assert y.sharding == ours.sharding(("batch", "mlp"))
    np.testing.assert_array_equal(y, x)
    for shard in y.addressable_shards:
        assert shard.data.shape == (2, 4)
        np.testing.assert_array_equal(shard.data, x[shard.index])
