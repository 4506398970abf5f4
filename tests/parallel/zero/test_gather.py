"""``sharded_dot`` and the embedding lookup equal one device, with weights gathered in complete heads."""

from __future__ import annotations

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covers import covering
from error_texts import raises
from jax.sharding import PartitionSpec as P
from profiles import few

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.models.embedding import lookup
from jaxpar.parallel.collectives import hierarchical

TABLE: dict[str, Any] = {
    "batch": "data",
    "embed": None,
    "heads": "model",
    "kv_heads": "model",
    "head_dim": None,
    "params": {"embed": "data"},
    "gradients": {"embed": "data"},
}
RULES = {
    "all alike": jp.Rules(**TABLE),
    "queries split": jp.Rules(**TABLE | {"kv_heads": None}),
    "every head split": jp.Rules(**TABLE | {"heads": None, "kv_heads": None, "head_dim": "model"}),
    "key heads that do not divide": jp.Rules(**TABLE, indivisible={"kv_heads": "replicate"}),
    "gradients of some split": jp.Rules(**TABLE | {"gradients": {"embed": "data", "kv_heads": None}}),
    "nothing split": jp.Rules(**dict.fromkeys(("batch", "embed", "heads", "kv_heads", "head_dim"))),
}
MESH = jp.MeshSpec(data=2, model=4)
Q, KV = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")


def inputs(kv_heads: int) -> tuple[np.ndarray, list[np.ndarray]]:
    random = np.random.default_rng(0)
    shapes = [(6, 8, 4), (6, kv_heads, 4), (6, kv_heads, 4)]
    return random.normal(size=(2, 5, 6)).astype(np.float32), [random.normal(size=s).astype(np.float32) for s in shapes]


def traced(name: str, kv_heads: int, **options: Any) -> str:
    x, ws = inputs(kv_heads)
    with jp.Layout(MESH.build(), RULES[name]):
        return str(
            jax.make_jaxpr(lambda x, *ws: jp.sharded_dot(x, *zip(ws, (Q, KV, KV), strict=True), **options))(x, *ws)
        )


CASES = [(name, 2 if name == "key heads that do not divide" else 4) for name in RULES]


def in_two_rounds(mesh: Any, axes: Any) -> tuple[int, ...]:
    """Two rounds, as over a closed 3-D torus, which 8 devices cannot form."""
    devices = math.prod(mesh.shape[axis] for axis in axes)
    return (devices // 2, 2)


@pytest.mark.parametrize(("rounds", "case"), covering([False, True], CASES, keep=3, strength=1))
def test_projections_and_their_gradients_equal_plain_products(
    rounds: bool, case: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kv_heads = case
    if rounds:
        monkeypatch.setattr(hierarchical, "gather_rounds", in_two_rounds)
    x, ws = inputs(kv_heads)

    def weighted(x: jax.Array, *ws: jax.Array) -> tuple[jax.Array, Any]:
        ys = jp.sharded_dot(x, *zip(ws, (Q, KV, KV), strict=True))
        return sum(jnp.sum(jnp.sin(y) * (i + 1)) for i, y in enumerate(ys)), ys

    def plain(x: jax.Array, *ws: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(jnp.einsum("BSE,EHD->BSHD", x, w)) * (i + 1)) for i, w in enumerate(ws))

    with jp.Layout(MESH.build(), RULES[name]), jax.default_matmul_precision("highest"):
        grads, ys = jax.jit(jax.grad(weighted, argnums=(0, 1, 2, 3), has_aux=True))(x, *ws)
    for y, w in zip(ys, ws, strict=True):
        np.testing.assert_allclose(y, np.einsum("BSE,EHD->BSHD", x, w), rtol=1e-5, atol=1e-5)
    for got, want in zip(grads, jax.grad(plain, argnums=(0, 1, 2, 3))(x, *ws), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "kv_heads", "matmuls", "matrix"),
    [
        ("all alike", 4, 1, "f32[6,4,16]"),  # 4 shards, each with the columns of 2 + 1 + 1 heads
        ("nothing split", 4, 1, "f32[6,1,64]"),
        ("queries split", 4, 2, "f32[6,1,32]"),  # keys and values replicated, queries separate
        ("gradients of some split", 4, 2, "f32[6,4,8]"),
        (
            "key heads that do not divide",
            2,
            2,
            "f32[6,1,16]",
        ),  # 2 heads stay replicated, though their 8 columns would divide
        ("every head split", 4, 3, "f32[6,8,4]"),  # no common matrix: each weight as it is stored
    ],
)
def test_weights_that_lie_alike_are_one_matrix(name: str, kv_heads: int, matmuls: int, matrix: str) -> None:
    text = traced(name, kv_heads)
    assert text.count("dot_general") == matmuls and matrix in text


def test_each_gradient_lies_as_its_rules_say() -> None:
    x, ws = inputs(4)

    def total(*ws: jax.Array) -> jax.Array:
        return sum(y.sum() for y in jp.sharded_dot(x, *zip(ws, (Q, KV, KV), strict=True)))

    with jp.Layout(MESH.build(), RULES["all alike"]):
        grads = jax.grad(total, argnums=(0, 1, 2))(*ws)
    for grad in grads:
        want = jax.sharding.NamedSharding(MESH.build(), P("data", "model", None))
        assert grad.sharding.is_equivalent_to(want, 3)


def test_weights_whose_columns_are_sharded_where_they_are_stored() -> None:
    """FSDP along the last dim: the gradient of a joined matrix would have blocks that the matrix does not have."""
    rng = np.random.default_rng(0)
    x, up, gate = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 6), (6, 8), (6, 16)))
    layout = jp.Layout(
        jp.MeshSpec(data=8).build(), jp.Rules(batch="data", mlp=None, embed=None, params={"embed": "data"})
    )
    dims = ("mlp", "embed")

    def loss(x: Any, *ws: Any, parallel: bool) -> Any:
        found = jp.sharded_dot(x, *((w, dims) for w in ws)) if parallel else [x @ w for w in ws]
        return sum((y**3).sum() for y in found)

    expected = jax.grad(lambda *ws: loss(x, *ws, parallel=False), (0, 1))(up, gate)
    with layout:
        stored = [jax.device_put(w, layout.sharding(dims, w.shape, role="params")) for w in (up, gate)]
        grads = jax.jit(jax.grad(lambda *ws: loss(x, *ws, parallel=True), (0, 1)))(*stored)
    for found, own, w in zip(grads, expected, stored, strict=True):
        np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-4)
        assert found.sharding.is_equivalent_to(w.sharding, 2)


def test_weights_of_different_dtypes_meet_in_the_compute_dtype() -> None:
    x, (q, k, v) = inputs(4)
    pairs = ((q, Q), (jnp.asarray(k, jnp.bfloat16), KV), (v, KV))
    with jp.Layout(MESH.build(), RULES["all alike"]):
        ys = jp.sharded_dot(jnp.asarray(x, jnp.bfloat16), *pairs, dtype=jnp.bfloat16)
        own = jp.sharded_dot(x, *pairs)
    assert [y.dtype for y in ys] == [jnp.bfloat16] * 3
    np.testing.assert_allclose(own[0], np.einsum("BSE,EHD->BSHD", x, q), rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_divide_are_refused_as_the_weight_alone_would_be() -> None:
    x, w = np.ones((2, 6), np.float32), jnp.ones((6, 3, 4))  # 3 heads over 4 devices, though the matrix has 12 columns
    with jp.Layout(MESH.build(), RULES["all alike"]):
        with raises(LayoutError, "'heads'", "model=4") as projected:
            jp.sharded_dot(x, (w, Q))
        with raises(LayoutError, "'heads'", "model=4") as alone:
            jp.gather_weight(w, *Q)
    problems = {
        error.value.problems[0].partition(": ")[2] for error in (projected, alone)
    }  # after the name of the call
    assert len(problems) == 1


def test_a_weight_of_another_width_is_refused() -> None:
    with jp.Layout(MESH.build(), RULES["all alike"]), raises(LayoutError, "sharded_dot()", "head_dim"):
        jp.sharded_dot(jnp.ones((2, 5, 6)), (jnp.ones((8, 4, 4)), Q))


LOOKUP = jp.Rules(
    batch=("data",),
    seq=None,
    residual_seq=None,
    vocab=None,
    embed=None,
    params={"embed": "data"},
    gradients={"embed": "data"},
)


def embedding_gradient(layout: jp.Layout, table: jax.Array, tokens: np.ndarray, weight: np.ndarray) -> Any:
    """The gradient of a lookup with weighted rows, and the program's text."""

    def total(table: jax.Array) -> jax.Array:
        return jnp.sum(lookup(table, tokens, table.dtype) * weight)

    with layout:
        step = jax.jit(jax.grad(total)).lower(table).compile()
        return step(table), step.as_text()


@pytest.mark.parametrize("tokens", [(8, 7), (8, 517), (16, 513)], ids=["few", "one piece and a bit", "three pieces"])
def test_an_exchanged_lookup_adds_up_gradients_as_one_device_does(tokens: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    layout = jp.Layout(jp.MeshSpec(data=8).build(), LOOKUP)
    place = layout.sharding(("vocab", "embed"), (2048, 16), role="params")
    table = jax.device_put(random.normal(size=(2048, 16)).astype(np.float32), place)
    ids = random.integers(-2, 2050, tokens)  # some ids are outside the vocabulary
    weight = random.normal(size=(*tokens, 16)).astype(np.float32)
    grad, text = embedding_gradient(layout, table, ids, weight)
    want = np.zeros((2048, 16))
    np.add.at(want, np.clip(ids, 0, 2047).ravel(), weight.reshape(-1, 16))
    assert "all-to-all" in text  # otherwise the other kind of lookup was tested
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "rules"),
    [
        ({"data": 2, "context": 4}, {}),
        ({"context": 2, "ulysses": 4}, {}),
        ({"data": 2, "context": 2, "model": 2}, {"vocab": "model", "residual_seq": ("context", "ulysses", "model")}),
    ],
    ids=["some of the axes are the batch's", "none of them", "vocabulary and residual stream split too"],
)
def test_a_table_over_the_axes_of_the_sequence_is_exchanged_too(sizes: dict[str, int], rules: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    over, seq = ("data", "context", "ulysses"), ("context", "ulysses")
    table: dict[str, Any] = {"batch": "data", "seq": seq, "residual_seq": seq, "vocab": None, "embed": None}
    split = {"params": {"embed": over}, "gradients": {"embed": over}}
    layout = jp.Layout(jp.MeshSpec(**sizes).build(), jp.Rules(**table | rules | split))
    place = layout.sharding(("vocab", "embed"), (512, 16), role="params")
    weight, words = random.normal(size=(2, 24, 16)).astype(np.float32), random.normal(size=(512, 16)).astype(np.float32)
    ids = random.integers(0, 512, (2, 24))
    grad, text = embedding_gradient(layout, jax.device_put(words, place), ids, weight)
    want = np.zeros((512, 16))
    np.add.at(want, ids.ravel(), weight.reshape(-1, 16))
    assert "all-to-all" in text
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-5)
    with layout:
        np.testing.assert_array_equal(jax.jit(lambda x: lookup(x, ids, x.dtype))(words), words[ids])


@pytest.mark.parametrize("over", few([("data",), ()], 1), ids=["split over columns too", "over words alone"])
def test_a_table_that_is_gathered_by_hand_gives_the_same(over: tuple[str, ...]) -> None:
    random = np.random.default_rng(0)
    rules = {"batch": "data", "seq": None, "residual_seq": None, "vocab": "pipeline", "embed": None}
    split = {"params": {"embed": over or None}, "gradients": {"embed": over or None}}
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=4).build(), jp.Rules(**rules | split))
    # There are more words than a device has tokens; with fewer, the table would be exchanged by columns.
    count = 9_000
    words, ids = random.normal(size=(count, 16)).astype(np.float32), random.integers(-2, count + 2, (16, 2100))
    weight = random.normal(size=(16, 2100, 16)).astype(np.float32)
    place = layout.sharding(("vocab", "embed"), words.shape, role="params")
    total = lambda table: (jnp.sum((x := lookup(table, ids, table.dtype, by_hand=True)) * weight), x)
    with layout:
        step = jax.jit(jax.grad(total, has_aux=True)).lower(jax.device_put(words, place)).compile()
    want, at = np.zeros(words.shape), np.clip(ids, 0, count - 1)
    np.add.at(want, at.ravel(), weight.reshape(-1, 16))
    grad, rows = step(jax.device_put(words, place))
    np.testing.assert_array_equal(rows, words[at])
    np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-4)
    assert "all-to-all" not in step.as_text() and ("all-gather" in step.as_text()) is bool(over)


def test_a_word_that_stands_everywhere_gets_its_whole_gradient_in_half_precision() -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).build(), LOOKUP)
    place = layout.sharding(("vocab", "embed"), (1024, 8), role="params")
    table = jax.device_put(jnp.zeros((1024, 8), jnp.bfloat16), place)
    grad, text = embedding_gradient(layout, table, np.full((8, 600), 3), np.ones((8, 600, 8), np.float32))
    assert "all-to-all" in text
    # Summed in bfloat16, ones would stop counting at 256.
    np.testing.assert_array_equal(np.asarray(grad[3], np.float32), np.float32(jnp.bfloat16(4800)))


def test_a_weight_gathered_in_rounds_is_gathered_where_it_was_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gathers instead of one send the same bytes and a few more; the gradient is unchanged."""
    rules = jp.Rules(embed=None, mlp="model", params={"embed": "data"}, gradients={"embed": "data"})
    mesh = jp.MeshSpec(data=4, model=2)
    x, w = np.ones((4, 8), np.float32), np.arange(8 * 16, dtype=np.float32).reshape(8, 16)

    def report() -> tuple[jp.Audit, Any]:
        with jp.Layout(mesh.build(), rules) as layout:
            placed = jax.device_put(w, layout.sharding(("embed", "mlp"), w.shape, role="params"))
            fn = lambda w: jnp.sum(jnp.square(x @ jp.gather_weight(w, "embed", "mlp")))
            step = jax.jit(jax.value_and_grad(fn)).lower(placed).compile()
            return jp.audit(step, mesh=layout.mesh), jax.device_get(step(placed))

    once, values = report()
    monkeypatch.setattr(hierarchical, "gather_rounds", in_two_rounds)
    rounds, others = report()
    assert (once.count("all-gather"), rounds.count("all-gather")) == (1, 2)
    # In one round, 3 of 4 parts come from other devices. In two rounds, 1 of 2 parts does, and then 2 of 4.
    assert once.wire_bytes("all-gather") == 8 * 8 * 4 * 3 / 4
    assert rounds.wire_bytes("all-gather") == 4 * 8 * 4 * 1 / 2 + 8 * 8 * 4 * 1 / 2
    chex.assert_trees_all_equal(values, others)
