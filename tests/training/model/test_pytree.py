"""Tests models that are plain pytrees: tags, training states, and errors."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from jax.sharding import PartitionSpec as P
from profiles import few

import jaxpar as jp
from jaxpar.errors import AnnotationError, LayoutError, ModelError
from jaxpar.training.model import build_shapes

TX = optax.sgd(0.1)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_state_is_laid_out_by_the_tags_and_holds_plain_arrays(mlp: Any) -> None:
    state = jp.init(mlp.layout(), mlp.make, optax.adam(0.1))
    want = {
        "block": {"up": P("data", None), "down": P(None, "data"), "bias": P(None)},
        "square": P("data", None),
        "temperature": P(),
    }
    specs = lambda tree: jax.tree.map(lambda x: x.sharding.spec, tree)
    assert specs(state.params) == specs(state.opt_state[0].mu) == specs(state.opt_state[0].nu) == want
    assert specs((state.step, state.key)) == (P(), P())
    assert state.model == state.params
    assert int(state.step) == 0


def test_a_program_may_forbid_the_import_of_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flax.nnx", "flax.linen"):
        monkeypatch.setitem(sys.modules, name, None)
    assert build_shapes(lambda key: {"w": jnp.zeros((2, 3))}).params["w"].shape == (2, 3)


def test_abstract_state_promises_what_init_makes(mlp: Any) -> None:
    made, promised = (f(mlp.layout(), mlp.make, optax.adam(0.1)) for f in (jp.init, jp.abstract_state))
    assert jax.tree.structure(promised.params) == jax.tree.structure(made.params)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(promised), strict=True):
        assert (got.shape, got.dtype, got.sharding) == (want.shape, want.dtype, want.sharding)
    nowhere = jp.abstract_state(mlp.layout(mesh=jp.MeshSpec(data=16).abstract()), mlp.make, TX)
    assert nowhere.params["block"]["up"].sharding.shard_shape((16, 24)) == (1, 24)


def test_the_seed_decides_the_parameters_in_every_layout_alike(mlp: Any) -> None:
    a, b = (jax.device_get(jp.init(place, mlp.make, TX, seed=3).params) for place in (mlp.layout(), mlp.one_device))
    chex.assert_trees_all_equal(a, b)
    other = jp.init(mlp.one_device, mlp.make, TX, seed=4).params
    assert not np.array_equal(other["square"], a["square"])


@pytest.mark.parametrize("features", few([24, 32, 40], 1))
def test_random_initial_values_are_bitwise_equal_however_small_the_shards(features: int, mlp: Any) -> None:
    def make(key: jax.Array) -> Any:
        draw = (jax.random.normal, jax.random.gumbel, lambda key, shape: jax.random.truncated_normal(key, -2, 2, shape))
        return [jp.tag(f(key, (106, features)), "mlp", "embed") for f in draw]

    a, b = (jax.device_get(jp.init(place, make, TX).params) for place in (mlp.layout(), mlp.one_device))
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize(
    ("make", "paths"),
    few(
        [
            (lambda w: w, [""]),
            (lambda w: Pair(w, {"b": w}), ["first", "second/b"]),
            (lambda w: [w, (w, w)], ["0", "1/0", "1/1"]),
        ],
        2,
        names=2,
    ),
    ids=["an array", "a named tuple", "lists"],
)
def test_any_pytree_is_a_model(make: Any, paths: list[str], mlp: Any, spec_of: Any) -> None:
    state = jp.init(mlp.layout(), lambda key: make(jp.tag(jnp.ones((16, 3)), "embed", "mlp")), optax.adam(0.1))
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    assert [jax.tree_util.keystr(k, simple=True, separator="/") for k, _ in leaves] == paths
    loss = lambda model, batch: sum(jnp.sum(x**2) for x in jax.tree.leaves(model))
    state, _ = jp.train_step(mlp.layout(), loss)(state, None)
    assert {spec_of(x) for x in jax.tree.leaves((state.params, state.opt_state[0].mu))} == {P("data", None)}


def test_beside_params_collections_are_carried_and_not_trained(mlp: Any) -> None:
    def make(key: jax.Array) -> Any:
        return {"params": jp.tag(jnp.ones(8), "embed"), "buffers": {"table": jp.tag(jnp.arange(8), "embed")}}

    loss = lambda model, batch: jnp.sum(model["params"] * model["buffers"]["table"])
    state, _ = jp.train_step(mlp.layout(), loss)(jp.init(mlp.layout(), make, TX), None)
    np.testing.assert_allclose(state.params, 1 - 0.1 * np.arange(8), rtol=1e-6)
    np.testing.assert_array_equal(state.variables["buffers"]["table"], np.arange(8))
    assert state.variables["buffers"]["table"].sharding.spec == P("data")


def test_unannotated_replicate_allows_what_carries_no_dims(mlp: Any) -> None:
    rules = jp.Rules(batch="data", unannotated="replicate")
    assert jp.init(mlp.layout(rules), lambda key: jnp.ones((16, 3)), TX).params.sharding.spec == P(None, None)


def test_over_places_what_nobody_annotated(mlp: Any) -> None:
    rules = jp.Rules(batch="data", unannotated="replicate", params=jp.over("data", min_bytes=0))
    assert jp.init(mlp.layout(rules), lambda key: jnp.ones((3, 16)), TX).params.sharding.spec == P(None, "data")


def test_a_layout_error_lists_every_tensor_that_does_not_fit(mlp: Any) -> None:
    def make(key: jax.Array) -> Any:
        return {"a": jp.tag(jnp.ones(12), "embed"), "b": jp.tag(jnp.ones(8), "embd"), "c": jnp.ones(3)}

    with pytest.raises(LayoutError) as error:
        jp.init(mlp.layout(), make, optax.adam(0.1))
    assert [problem.split(" ")[0] for problem in error.value.problems] == ["params/a", "params/b", "params/c"]


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (lambda key: {}, ModelError, "make_model returned"),
        (lambda key: {"table": jp.tag(jnp.arange(8), "embed")}, ModelError, "params/table"),
        (lambda key: {"name": "llama"}, ModelError, "params/name"),
        ({"w": 1.0}, ModelError, "PRNG"),
        (lambda key: {"w": jp.tag({"a": jnp.ones(8)}, "embed")}, AnnotationError, "params/w"),
        (lambda key: {"w": jp.tag(jnp.ones(8), 0)}, AnnotationError, "tag()"),
        (lambda key: {"w": jnp.ones((8, 8))}, LayoutError, "[8"),
    ],
    ids=["nothing", "integers", "no array", "no function", "a tag around a dict", "a bad name", "not annotated"],
)
def test_what_cannot_be_trained_is_refused(make: Any, kind: Any, name: str, mlp: Any) -> None:
    with raises(kind, name):
        jp.init(mlp.layout(), make, TX)
