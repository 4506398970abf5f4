"""int8 weights and caches: quantization error, equal tokens in every layout, bytes stored and sent, and errors."""

from __future__ import annotations

from typing import Any

import generators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from generators import TIED as CONFIG
from generators import one_device
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError, JaxparError, LayoutError
from jaxpar.inference.kv_cache import init_cache
from jaxpar.models.llama import make_llama
from jaxpar.models.llama.decode import cached_llama

RULES = generators.RULES.replace(seq="context", residual_seq="context", layers=None)
PROMPTS, MOST = generators.PROMPTS[:3], generators.MOST[:3]
BOTH = {"weights": "int8", "cache": "int8"}


def generator(mesh: Any, **kept: str) -> jp.Generator:
    return generators.generator(mesh, RULES, CONFIG, kept)


@pytest.fixture(scope="module")
def params() -> Any:
    return jp.init(jp.Layout(one_device(), RULES), make_llama(CONFIG), optax.identity()).params


@pytest.fixture(scope="module")
def made(params: Any) -> list[list[int]]:
    one = generator(one_device(), **BOTH)
    return one.generate(one.prepare(params), PROMPTS, most=MOST)


@pytest.mark.parametrize("summed", few([[0], [-1], [0, 1], [1, 2]], 2), ids=str)
def test_no_number_is_off_by_more_than_half_a_step(summed: list[int]) -> None:
    x = jax.random.normal(jax.random.key(0), (6, 10, 7)) * jnp.arange(7)
    kept = jp.inference.Int8.of(x, summed)
    assert kept.values.dtype == jnp.int8 and kept.shape == x.shape
    assert kept.scales.shape == tuple(size for dim, size in enumerate(x.shape) if dim not in [d % 3 for d in summed])
    most = np.abs(x).max(tuple(summed), keepdims=True)
    # Half a step is most / 254. The margin allows for the rounding of quotient and product.
    assert (np.abs(kept.astype(jnp.float32) - x) / np.where(most == 0, 1, most / 253)).max() <= 1
    assert np.abs(kept.values).max() == 127
    assert not np.isfinite(jp.inference.Int8.of(x.at[0, 0, 0].set(jnp.inf), summed).astype(jnp.float32)).all()


def test_a_product_with_the_integers_is_one_with_the_array() -> None:
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 3, 6), (6, 4, 5)]))
    kept, names = jp.inference.Int8.of(w, [0]), ("embed", "heads", "head_dim")
    with jp.Layout(jp.MeshSpec(data=4, model=2).build(), RULES.replace(params={"embed": None})):
        (y,) = jp.sharded_dot(x, (kept, names))
        both = jp.sharded_dot(x, (kept, names), (w, names))
    want = np.tensordot(x, kept.astype(jnp.float32), 1)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(both[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(both[1], np.tensordot(x, w, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", few([{"model": 4, "context": 2}, {"model": 2, "context": 4}], 1), ids=str)
def test_attention_to_a_cache_in_int8_is_attention_to_what_it_stands_for(mesh: dict[str, int]) -> None:
    """Key heads are replicated where query heads are sharded, and slots are sharded."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 1, n, 4)).astype(np.float32) for n in (8, 4, 4))
    at = np.array([0, 7, 15], np.int32)
    kept = {
        n: jp.inference.Int8.of(jnp.asarray(rng.normal(size=(2, 3, 4, 16, 4)), jnp.float32), [-1])
        for n in ("keys", "values")
    }
    rules = jp.Rules(batch=None, heads="model", kv_heads=None, head_dim=None, cache_seq="context")
    with jp.Layout(jp.MeshSpec(**mesh).build(), rules):
        o, after = jax.jit(jp.inference.cached_attention)(q, k, v, kept, 1, at)
    for name, new in (("keys", k), ("values", v)):
        want = np.array(kept[name].astype(jnp.float32))
        rounded = jp.inference.Int8.of(jnp.asarray(new[:, 0]), [-1]).astype(jnp.float32)
        for row, last in enumerate(at):
            want[1, row, :, last] = rounded[row]
        np.testing.assert_allclose(after[name].astype(jnp.float32), want, rtol=1e-6)
    keys, values = (np.array(after[name].astype(jnp.float32)) for name in ("keys", "values"))
    for row, last in enumerate(at):
        for head in range(8):
            scores = keys[1, row, head // 2, : last + 1] @ q[row, 0, head] / 2
            p = np.exp(scores - scores.max())
            want = p / p.sum() @ values[1, row, head // 2, : last + 1]
            np.testing.assert_allclose(o[row, 0, head], want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_tokens_are_those_of_one_device_and_gathers_are_of_int8(params: Any, made: list[list[int]]) -> None:
    """Greedy, fp32: tied embeddings, weights sharded over data and heads, a cache over data, context and model."""
    one, many = generator(one_device(), **BOTH), generator(jp.MeshSpec(data=2, context=2, model=2).build(), **BOTH)
    spread = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, many.params)
    kept = many.prepare(spread)
    assert [x.sharding for x in jax.tree.leaves(kept)] == [x.sharding for x in jax.tree.leaves(many.prepared)]
    alone = one.prepare(params)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(a, b)
    assert many.generate(kept, PROMPTS, most=MOST) == made
    assert len({token for tokens in made for token in tokens}) > 3, "tokens that say something"

    program = many.decode.lower(many.prepared, many.abstract).compile()
    audit = jp.audit(program, mesh=many.layout.mesh)
    gathers = [c for c in audit.collectives if c.kind == "all-gather"]
    # Every matrix of a layer, on each of the two model shards. All other gathered arrays are scales.
    matrices = 2 * 32 * 4 * 8 + 2 * 32 * 2 * 8 + 3 * 32 * 48
    in_int8 = sum(c.result_bytes * c.count for c in gathers if c.dtype == "s8")
    assert CONFIG.layers * matrices // 2 <= in_int8 <= (CONFIG.layers * matrices + 2 * 64 * 32) // 2, gathers
    assert sum(c.result_bytes * c.count for c in gathers if c.dtype != "s8") < in_int8 // 10, gathers
    cache = 2 * CONFIG.layers * 4 * CONFIG.kv_heads * 32 * (CONFIG.head_dim + 4) // 8
    assert many.explain().total("cache").device_bytes == cache
    assert audit.memory["argument"] < many.explain().total("params", "cache").device_bytes + 200


@pytest.mark.slow
def test_over_a_pipeline_in_int8(params: Any, made: list[list[int]]) -> None:
    """Each stage holds its layers' integers, scales and cache; requests take turns, and some end before others."""
    mesh = jp.MeshSpec(pipeline=2, model=2).build(jax.devices()[:4])
    rules = RULES.replace(layers="pipeline", vocab=("pipeline", "model"))
    model = jp.Generator(jp.Layout(mesh, rules), make_llama(CONFIG), cached_llama(CONFIG, **BOTH), batch=2, slots=32)
    assert model.explain()["cache/values/scales"].spec == (("pipeline",), (), ("model",), ())
    kept = model.prepare(jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, model.params))
    assert model.generate(kept, PROMPTS, most=MOST) == made
    steps = list(model.stream(kept, PROMPTS[:2], most=MOST[:2]))
    assert [[step[row] for step in steps] for row in (0, 1)] == [made[0], made[1] + [-1] * 3]


def test_everything_is_explained() -> None:
    report = generator(jp.MeshSpec(data=2, context=2, model=2).abstract(8), **BOTH).explain()
    assert report["params/blocks/attention/q/values"].spec == ((), ("data",), ("model",), ())
    assert report["params/blocks/attention/q/scales"].spec == ((), ("model",), ())
    assert report["params/blocks/attention/o/scales"].spec == ((), ("data",))
    assert report["params/embedding/scales"].dtype == "float32"
    assert report["params/norm/scale"].dtype == "float32"
    assert report["cache/keys/values"].dtype == "int8"
    assert report["cache/keys/scales"].spec == ((), ("data",), ("model",), ("context",))


def test_a_cache_of_shapes() -> None:
    kept = init_cache(2, 4, 2, 16, 8, "int8")["keys"]
    assert (kept.values.value.dtype, kept.scales.value.shape) == (jnp.int8, (2, 4, 2, 16))
    assert init_cache(2, 4, 2, 16, 8, "bfloat16")["values"].value.dtype == jnp.bfloat16


def _project(kept: jp.inference.Int8) -> Any:
    with jp.Layout(one_device(), RULES):
        return jp.sharded_dot(jnp.ones((2, 6)), (kept, ("embed", "mlp")))


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: jp.inference.Int8.of(jnp.ones((2, 3)), [2]), ConfigError, "Int8.of()"),
        (lambda: cached_llama(CONFIG, cache="int4"), ConfigError, "cached_llama: cache"),
        (lambda: _project(jp.inference.Int8.of(jnp.ones((6, 4)), [1])), LayoutError, "sharded_dot()"),
    ],
)
def test_what_cannot_be(make: Any, error: type[JaxparError], name: str) -> None:
    with raises(error, name):
        make()


def test_parameters_that_were_not_prepared(params: Any) -> None:
    model = generator(one_device(), weights="int8")
    with raises(ConfigError, "Generator", "keeps 8"):
        model.generate(params, PROMPTS, most=MOST)
