"""The implementation that attention ``auto`` selects and its explanation; replicated queries against split keys."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_reference import random
from error_texts import raises
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.models import llama
from jaxpar.models.losses import next_token_loss
from jaxpar.parallel.attention.cost_model import AttentionRequest, QKVSharding, cost, work
from jaxpar.parallel.attention.load_balance import balance
from jaxpar.parallel.attention.select import Choice, bytes_sent, select_impl
from jaxpar.sharding.hardware.accelerators import accelerator
from jaxpar.sharding.hardware.links import Links, likely_shape, links_of

RULES = jp.Rules(
    batch="data",
    q_seq=None,
    seq=("context", "ulysses"),
    heads="model",
    kv_heads=jp.first_of("model", None),
    head_dim=None,
)
Q, WHOLE, KV = (
    ("batch", "seq", "heads", "head_dim"),
    ("batch", "q_seq", "heads", "head_dim"),
    ("batch", "seq", "kv_heads", "head_dim"),
)
CAUSAL = jp.Mask(causal=True)
NEAR = jp.Mask(causal=True, window=4096)
QUICK = {"xla_backend_optimization_level": 0}


def took(
    mesh: Any,
    seq: int,
    heads: tuple[int, int],
    *,
    request: AttentionRequest | None = None,
    impl: str = "auto",
    dtype: Any = jnp.bfloat16,
    links: Links | None = None,
) -> Choice:
    layout = jp.Layout(mesh, RULES)
    q, k = (jax.ShapeDtypeStruct((1, seq, n, 128), dtype) for n in heads)
    spread = QKVSharding(layout.resolve(Q, q.shape).axes, layout.resolve(KV, k.shape).axes)
    return select_impl(impl, q, k, spread, layout.sizes, request=request, links=links or links_of(mesh))


@pytest.mark.parametrize(
    ("topology", "mesh", "seq", "heads", "asked", "impl"),
    [
        ("v5e:2x4", {"context": 8}, 131_072, (32, 8), AttentionRequest(free=True), "ring"),  # compute hides the hops
        ("v5e:2x4", {"context": 8}, 4096, (32, 8), AttentionRequest(free=True), "ulysses"),  # a ring would be exposed
        ("v5e:2x4", {"context": 8}, 131_072, (4, 4), AttentionRequest(free=True), "ring"),  # fewer heads than devices
        (
            "v5e:2x4",
            {"context": 8},
            4096,
            (4, 4),
            AttentionRequest(free=True),
            "gather",
        ),  # two links together instead of one
        (
            "v5e:2x4",
            {"context": 8},
            4096,
            (32, 1),
            AttentionRequest(free=True),
            "ring",
        ),  # one key head: the ring sends little
        (
            "v5e:2x4",
            {"context": 8},
            32_768,
            (32, 8),
            AttentionRequest(NEAR, "contiguous"),
            "ring",
        ),  # one hop instead of seven
        (
            "v5e:2x4",
            {"context": 8},
            32_768,
            (32, 8),
            AttentionRequest(NEAR, free=True),
            "ulysses",
        ),  # zigzag needs all seven hops
        ("v5e:2x4", {"context": 8}, 8192, (32, 8), AttentionRequest(free=True), "ulysses"),
        ("v5e:2x4", {"context": 8}, 8192, (32, 8), AttentionRequest(order="zigzag"), "gather"),  # already in zigzag
        (
            "h100:2x8",
            {"context": 16},
            65_536,
            (32, 8),
            AttentionRequest(free=True),
            "ulysses",
        ),  # a ring would cross the network
        ("h100:8", {"context": 8}, 65_536, (32, 8), AttentionRequest(free=True), "ring"),
        ("h100:2x8", {"context": 2, "ulysses": 8}, 65_536, (32, 8), AttentionRequest(free=True), "hybrid"),
    ],
)
def test_auto_takes_what_takes_the_least_time(
    topology: str, mesh: dict[str, int], seq: int, heads: tuple[int, int], asked: AttentionRequest, impl: str
) -> None:
    abstract = jp.MeshSpec(**mesh).on(topology)
    assert took(abstract, seq, heads, request=asked).impl == impl
    assert links_of(abstract).name == topology


def test_the_reason_has_the_figures_and_they_are_the_roofline() -> None:
    mesh = jp.MeshSpec(context=8).on("v5e:2x4")
    found = took(mesh, 131_072, (32, 8), request=AttentionRequest(free=True))
    parts = r"ring ([\d.]+) \(([\d.]+) compute, ([\d.]+) exposed while sending 1792 MiB\), ulysses ([\d.]+) \("
    figures = re.match("estimated ms, forward and backward, by the roofline of v5e:2x4: " + parts, found.why)
    assert figures is not None, found.why
    all_, compute, waiting, other = map(float, figures.groups())
    # Seven matmuls over half of the scores, and over the tiles on the diagonal.
    assert compute == pytest.approx(1e3 * 7 * 2 * 131_072**2 / 2 * 32 * 128 / 8 / 197e12, rel=0.01)
    # The gradients' last step is exposed: 16,384 tokens of 8 key and value heads in fp32 over a link.
    assert waiting == pytest.approx(1e3 * 16_384 * 2 * 8 * 128 * 4 / 50e9, rel=0.01)
    assert all_ == pytest.approx(compute + waiting, rel=0.01) and other > all_


def test_where_nothing_is_known_of_the_devices_bytes_decide() -> None:
    mesh = jp.MeshSpec(context=8).abstract()
    assert took(mesh, 32_768, (32, 8), request=AttentionRequest(free=True)) == Choice(
        "ulysses",
        "",
        "MiB sent per device, forward and backward: ulysses 140, ring 448; in plain JAX: no kernel was requested",
    )
    # In contiguous order a window leaves one hop of seven. Permuting into zigzag order and back is sent, too.
    assert took(mesh, 32_768, (32, 8), request=AttentionRequest(NEAR, "contiguous")).impl == "ring"
    laid, relayed = (
        took(mesh, 32_768, (32, 32), request=a).why for a in (AttentionRequest(free=True), AttentionRequest())
    )
    assert "ring 1792;" in laid and "ring 2072;" in relayed
    # 7/8 of 32 MiB for each of queries, result and their gradients, of 64 MiB of keys and values, and of the latter's
    # gradients in fp32.
    assert 2072 - 1792 == (4 * 32 + 64 * (1 + 2)) * 7 / 8
    double = took(jp.MeshSpec(context=8).on("v5e:2x4"), 4096, (32, 8), dtype=np.dtype("float64"))
    assert double.why.startswith("MiB sent per device")


def test_bytes_of_a_relay_count_what_leaves_a_device() -> None:
    layout = jp.Layout(jp.MeshSpec(context=4).abstract(), RULES)
    q = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    spread = QKVSharding(layout.resolve(Q, q.shape).axes, layout.resolve(KV, q.shape).axes)
    plain, relayed = (
        cost("ring", q, q, spread, layout.sizes, request=a) for a in (AttentionRequest(free=True), AttentionRequest())
    )
    # Each device has 16 tokens of q, k, v, o and their gradients. Three of four devices give each half away: 0→0, 1→2,
    # 2→3, 3→1 and 0→1, 1→3, 2→2, 3→0.
    assert relayed.sent - plain.sent == 8 * (16 * 2 * 8 * 4) * 3 / 4
    assert bytes_sent("ring", q, q, spread, layout.sizes) == plain.sent


@pytest.mark.parametrize("mask", [CAUSAL, jp.Mask(causal=True, window=1500), jp.Mask(causal=False, chunk=1024)])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
def test_work_is_that_of_the_tiles(mask: jp.Mask, order: Any) -> None:
    found = work(mask, (4096, 4096), 0, 4, order)
    np.testing.assert_array_equal(found, balance(mask, 4096, 4, order).visited)


def test_links_of_devices_that_are_here_are_read_from_their_places() -> None:
    assert links_of(jp.MeshSpec(context=8).build()) is None
    assert [likely_shape(accelerator(kind), n) for kind, n in (("v5e", 32), ("v5p", 64), ("h100", 8), ("v6e", 1))] == [
        (4, 8),
        (4, 4, 4),
        (8,),
        (1, 1),
    ]
    assert links_of(jp.MeshSpec(context=512).on("v5e:16x16*2")).name == "v5e:16x16*2"


def test_a_permute_waits_where_messages_share_a_link() -> None:
    around = [(i, (i + 1) % 4) for i in range(4)]
    across = [(i, (i + 2) % 4) for i in range(4)]
    line = Links(accelerator("v5e"), 1, (4, 4), 1, {"data": 4, "context": 4})
    assert line.permute(("context",), 1e9, around) == pytest.approx(1e9 / 50e9)
    assert line.permute(("context",), 1e9, across) == pytest.approx(2 * 1e9 / 50e9)
    switch = Links(accelerator("h100"), 1, (8,), 1, {"context": 8})
    assert switch.permute(("context",), 1e9, across) == pytest.approx(1e9 / 450e9)
    assert line.permute(("context",), 1e9, [(0, 0)]) == 0


def test_explain_says_what_attention_takes_once_for_each_call() -> None:
    config = llama.preset("tiny", layers=2)
    rules = {"batch": "data", "seq": "context", "residual_seq": "context", "mlp": "model", "vocab": "model"}
    rest = dict.fromkeys(("embed", "norm", "heads", "kv_heads", "head_dim", "layers"))
    layout = jp.Layout(jp.MeshSpec(data=2, context=2).abstract(), jp.Rules(**rules, **rest))
    ids = jp.tag(jax.ShapeDtypeStruct((4, 64), "int32"), "batch", "seq")
    asked = {"batch": {"tokens": ids, "targets": ids}, "loss_fn": next_token_loss}
    report = jp.explain(layout, llama.make_llama(config), optax.sgd(0.1), **asked)
    (note,) = report.notes
    assert re.sub(r"py:\d+", "py", note) == (
        "attention in WindowedAttention._attend (layers.py), 4 × 64 × 4 × 32 queries, 64 keys of 2 heads, float32: "
        "auto selects ulysses; MiB sent per device, forward and backward: ulysses 0.09375, ring 0.1875; in plain JAX: "
        "kernels run only on TPU and GPU, but the mesh has cpu devices"
    )
    assert note in report.remarks() and "auto selects ulysses" in report._repr_html_()


def decoded(mesh: dict[str, int], impl: str, options: dict[str, Any]) -> list[np.ndarray]:
    """The result of two queries against 24 keys, and the gradients."""
    spec, learned = jp.MeshSpec(**mesh), {name: options[name] for name in ("bias", "sinks", "alibi") if name in options}
    layout = jp.Layout(spec.build(jax.devices()[: spec.abstract().size]), RULES)
    x = random(2, 2, 4, 6), random(2, 24, 2, 6, seed=1), random(2, 24, 2, 5, seed=2)

    def loss(x: Any, learned: Any) -> Any:
        o = jp.attention(*x, impl=impl, q_dims=WHOLE, **options | learned)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    with layout:
        grads, o = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True), compiler_options=QUICK)(x, learned)
    return [np.asarray(leaf) for leaf in (o, *jax.tree.leaves(grads))]


LENGTHS = np.array([9, 17])
EVERYTHING: dict[str, Any] = {
    "mask": jp.Mask(causal=True, window=4),
    "q_offset": 3,
    "prefix": np.array([0, 14]),  # no query of the first sequence sees the keys of one device
    "segment_ids": (np.zeros((2, 2), np.int32), np.where(np.arange(24) < LENGTHS[:, None], 0, -1).astype(np.int32)),
    "softcap": 0.8,
    "sinks": random(4),
    "alibi": abs(random(4)),
    "bias": random(1, 4, 2, 24),
}


@pytest.mark.slow
def test_whole_queries_meet_split_keys() -> None:
    """All options together, as in decoding: caches of different lengths, and gradients."""
    want = decoded({"data": 1}, "dense", EVERYTHING)
    got = decoded({"context": 2, "model": 2, "data": 2}, "auto", EVERYTHING)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_no_keys_are_gathered_for_whole_queries() -> None:
    layout = jp.Layout(jp.MeshSpec(context=8).abstract(), RULES)
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 8), jnp.bfloat16) for n in (1, 4096))
    with layout:
        call = lambda q, k, v: jp.attention(q, k, v, q_dims=WHOLE, q_offset=4095)
        text = str(jax.make_jaxpr(call)(q, k, k))
    assert "all_gather" not in text and "ppermute" not in text
    assert text.count("psum") == 2 and text.count("pmax") == 1


@pytest.mark.slow
def test_merge_inside_a_map_that_keeps_count() -> None:
    x = random(2, 2, 4, 6), random(2, 24, 2, 6, seed=1), random(2, 24, 2, 5, seed=2)
    mesh = jp.MeshSpec(context=4).build(jax.devices()[:4])
    local = lambda q, k, v: jp.context.attention_local(q, k, v, impl="split_kv", q_offset=20)
    specs = P(), P(None, "context"), P(None, "context")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    def loss(*x: Any) -> Any:
        o = mapped(*x)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape)) + jnp.sum(o**2), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), compiler_options=QUICK)(*x)
    for a, b in zip((o, *grads), decoded({"data": 1}, "dense", {"q_offset": 20}), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(
    ("impl", "dims", "name"),
    [
        ("ring", WHOLE, "ring"),
        ("split_kv", Q, "split_kv"),
    ],
)
def test_a_split_that_does_not_fit_is_an_error(impl: Any, dims: Any, name: str) -> None:
    x = random(1, 16, 4, 8)
    layout = jp.Layout(jp.MeshSpec(context=4).abstract(), RULES)
    with layout, raises(LayoutError, name):
        jax.eval_shape(lambda x: jp.attention(x, x, x, impl=impl, q_dims=dims), x)


def test_a_given_order_is_filled_up() -> None:
    """21 tokens in any order over two devices are followed by three padding tokens that nothing sees."""
    order = np.random.default_rng(0).permutation(21).astype(np.int32)
    x = tuple(random(1, 21, 2, 4, seed=seed) for seed in range(3))
    ids = np.sort(np.random.default_rng(1).integers(0, 3, (1, 21)))

    one, two = (jp.Layout(jp.MeshSpec(context=n).build(jax.devices()[:n]), RULES) for n in (1, 2))
    with one:
        want = jp.attention(*x, impl="dense", segment_ids=ids)
    with two:
        call = lambda x, ids, order: jp.attention(*x, impl="gather", segment_ids=ids, order=order, pad=True)
        found = jax.jit(call, compiler_options=QUICK)(tuple(a[:, order] for a in x), ids[:, order], order)
    np.testing.assert_allclose(found, want[:, order], atol=1e-5)
    with two, raises(LayoutError, "attention", "has 21"):
        jax.eval_shape(lambda x: jp.attention(*x, impl="ring", order=order[:20], pad=True), x)


@pytest.mark.parametrize(("mask", "sent"), [(jp.Mask(causal=True, window=6), 1), (CAUSAL, 3)])
def test_a_known_order_ends_the_ring_where_nothing_more_is_seen(
    mask: jp.Mask, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six tokens per device, with halves swapped: the neighbour's tokens are the last that a window of six shows."""
    monkeypatch.setattr("jaxpar.parallel.attention.split.ring.UNROLLED", 4)
    order = np.arange(24).reshape(4, 2, 3)[:, ::-1].reshape(-1)
    x = jax.ShapeDtypeStruct((1, 24, 2, 4), jnp.float32)
    with jp.Layout(jp.MeshSpec(context=4).abstract(), RULES):
        text = str(jax.make_jaxpr(lambda x: jp.attention(x, x, x, impl="ring", mask=mask, order=order))(x))
        traced = lambda x, order: jp.attention(x, x, x, impl="ring", mask=mask, order=order)
        unknown = str(jax.make_jaxpr(traced)(x, order))
    assert text.count("ppermute[") == 2 * sent and unknown.count("ppermute[") == 2 * 3


@dataclass(frozen=True)
class Attending:
    """A model that attends over its tokens' rows of a table."""

    context: jp.context.Context
    table: np.ndarray

    def reorder_tokens(self, *arrays: Any, order_BS: Any = None) -> Any:
        q = jax.ShapeDtypeStruct((*arrays[0].shape, 2, 4), jnp.float32)
        return self.context.reorder_tokens(q, q, *arrays, order_BS=order_BS)

    def hidden(self, tokens: Any, positions: Any, order: Any, documents_BS: Any = None) -> Any:
        x = jnp.asarray(self.table)[tokens].reshape(*tokens.shape, 2, 4)
        return self.context(x, x, x, order, documents_BS).reshape(*tokens.shape, 8)

    def unembedding(self) -> Any:
        return jnp.asarray(self.table.T)


def packed() -> dict[str, np.ndarray]:
    ids = np.repeat([[0, 1, 2], [0, 1, 2]], [11, 16, 5], axis=1).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, 16, (2, 32)).astype(np.int32)
    order = np.tile(jp.context.balanced_packing(ids, 2, chunks=4), (2, 1))
    return {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": ids, "order": order}


@pytest.mark.slow
def test_a_batch_brings_the_order_of_its_documents() -> None:
    """The loss equals that of one device, where attention ignores the order."""
    table, rules = (
        random(16, 8),
        jp.Rules(**dict.fromkeys(("batch", "heads", "kv_heads", "head_dim", "embed", "vocab")), seq="context"),
    )

    def loss(ways: int, impl: Any) -> float:
        layout = jp.Layout(jp.MeshSpec(context=ways).build(jax.devices()[:ways]), rules)
        model = Attending(jp.context.Context(impl, load_balance="balanced"), table)
        with layout:
            return float(jax.jit(functools.partial(next_token_loss, model), compiler_options=QUICK)(packed()))

    assert loss(2, "ring") == pytest.approx(loss(1, "dense"), rel=1e-5)


def test_a_llama_hands_documents_and_their_order_to_every_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(
            {name: getattr(options[name], "shape", options[name]) for name in ("order", "segment_ids", "impl")}
        )
        return q

    monkeypatch.setattr("jaxpar.parallel.attention.context.attention", attention)
    config = llama.preset("tiny", layers=2, context=jp.context.Context("ring", load_balance="balanced"), remat="full")
    names = ("embed", "norm", "heads", "kv_heads", "head_dim", "layers", "mlp", "vocab")
    rules = jp.Rules(batch="data", seq="context", residual_seq="context", **dict.fromkeys(names))
    with jp.Layout(jp.MeshSpec(context=2).abstract(), rules):
        jax.eval_shape(lambda b: next_token_loss(llama.Llama(config, rngs=nnx.Rngs(0)), b), packed())
    assert given and all(g == {"order": (32,), "segment_ids": (2, 32), "impl": "ring"} for g in given)


def test_a_balanced_order_comes_with_the_batch_or_is_an_error() -> None:
    q, tokens = jax.ShapeDtypeStruct((2, 32, 2, 8), jnp.float32), np.zeros((2, 32), int)
    with jp.Layout(jp.MeshSpec(context=2).abstract(), RULES), raises(LayoutError, "context: load_balance"):
        jp.context.Context("ring", load_balance="balanced").reorder_tokens(q, q, tokens)
    with jp.Layout(jp.MeshSpec(ulysses=2).abstract(), RULES):
        assert jp.context.Context("ulysses", load_balance="balanced").reorder_tokens(q, q, tokens)[:2] == (None, None)
