"""In every implementation, padding influences nothing, and a row without keys is 0 with gradients of 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import MESHES, Arrays, arrays, assert_close, compiled, layout, reference, sees
from covers import covering
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import LayoutError
from jaxpar.inference.kv_cache import cached_attention
from jaxpar.parallel.attention.kernels.select import find
from jaxpar.parallel.attention.options import read
from jaxpar.parallel.attention.tiled.padding import FILL, pad_segments

SEQ = 12
POISONS = (np.nan, np.inf, -np.inf)


def documents(rng: np.random.Generator, seq: int = SEQ) -> np.ndarray:
    """Documents with padding after, before and between them; one row is only padding."""
    ids = np.sort(rng.integers(0, 3, (3, seq)), axis=1).astype(np.int32)
    ids[0, seq - 3 :], ids[1, rng.integers(0, seq, 4)], ids[2] = -1, -7, -1
    return ids


def poisoned(x: Arrays, ids: np.ndarray, poison: float) -> Arrays:
    """``x`` with ``poison`` in all padded places."""
    return [np.where((ids < 0)[:, :, None, None], np.float32(poison), a) for a in x]


WORDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "sinks": {"causal": False, "softcap": 0.8, "sinks": np.ones(4, np.float32)},
}


@pytest.mark.parametrize(("name", "impl"), covering(WORDS, MESHES, keep=1, strength=1))
def test_what_stands_in_padding_changes_no_bit(name: str, impl: str) -> None:
    """NaN and inf in padding give bitwise the same results as zeros there; the gradients of padding are 0."""
    rng, words = np.random.default_rng(1), WORDS[name]
    run = compiled(impl, **words, **({"q_offset": 0} if impl == "split_kv" else {}), block=5)
    ids = documents(rng)
    x, gradient = arrays(rng, SEQ, SEQ, batch=3)
    *x, gradient = poisoned([*x, gradient], ids, 0)
    want = run(x, gradient, segment_ids=ids)
    assert all(np.isfinite(a).all() and (a[ids < 0] == 0).all() for a in want)
    for poison in POISONS:
        *bad, bad_gradient = poisoned([*x, gradient], ids, poison)
        for a, b in zip(run(bad, bad_gradient, segment_ids=ids), want, strict=True):
            np.testing.assert_array_equal(a, b)
    if not words:
        seen = (
            sees(jp.Mask(), np.arange(SEQ), np.arange(SEQ)) & (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
        )
        assert_close(want, reference(x, gradient, seen))


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["ring", "gather", "ulysses", "dense"], 2))
def test_what_stands_in_padding_changes_no_bit_of_a_sequence_that_is_filled_up(impl: str) -> None:
    rng = np.random.default_rng(2)
    run, ids = compiled(impl, pad=True, block=3), documents(rng, 11)
    x, gradient = arrays(rng, 11, 11, batch=3)
    *x, gradient = poisoned([*x, gradient], ids, 0)
    *bad, bad_gradient = poisoned([*x, gradient], ids, np.nan)
    for a, b in zip(run(bad, bad_gradient, segment_ids=ids), run(x, gradient, segment_ids=ids), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["ring", "ring_self_attention", "ulysses"], 2))
def test_what_stands_in_padding_changes_no_bit_in_the_local_form(impl: Any) -> None:
    rng, spec = np.random.default_rng(3), jax.sharding.PartitionSpec(None, "context")
    ids = documents(rng)
    x, gradient = arrays(rng, SEQ, SEQ, batch=3)

    @jax.jit
    def both(x: Any, gradient: Any) -> Any:
        local = lambda q, k, v, ids: jp.context.attention_local(q, k, v, impl=impl, segment_ids=ids)
        mapped = jax.shard_map(local, mesh=layout("ring").mesh, in_specs=(spec,) * 4, out_specs=spec)
        o, back = jax.vjp(lambda *x: mapped(*x, ids), *x)
        return o, back(gradient)

    results = []
    for number in (0, np.nan):
        *given, seed = poisoned([*x, gradient], ids, number)
        results.append([np.asarray(leaf) for leaf in jax.tree.leaves(both(given, seed))])
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("impl", few(sorted(MESHES, key=lambda impl: impl != "flash"), 1))
def test_a_row_without_keys_is_zero(impl: str) -> None:
    """Values and gradients with a bias that hides all keys of some rows, for each number in common use for that."""
    rng = np.random.default_rng(4)
    run = compiled(impl, block=5, causal=False)
    x, gradient = arrays(rng, SEQ, SEQ)
    for number in (-np.inf, np.finfo(np.float32).min, float(jnp.finfo(jnp.bfloat16).min), -1e30, -2e30):
        bias = rng.normal(size=(1, 4, SEQ, SEQ)).astype(np.float32)
        bias[:, :, [0, 7]], bias[:, :, 3, :9], bias[:, 1, 5], bias[:, :, :, 2] = number, number, number, number
        want = reference(x, gradient, np.ones((1, SEQ, SEQ), bool), bias)
        assert (want[0][:, [0, 7]] == 0).all() and (want[1][:, [0, 7]] == 0).all()
        assert_close(run(x, gradient, bias=bias), want)


@pytest.mark.parametrize("impl", few(MESHES, 1))
def test_a_row_whose_scores_a_finite_bias_lowers_is_a_softmax(impl: str) -> None:
    """Such scores round to one number, so a softmax in fp32 gives all keys the same weight."""
    rng = np.random.default_rng(9)
    x, gradient = arrays(rng, SEQ, SEQ)
    bias = rng.normal(size=(1, 4, SEQ, SEQ)).astype(np.float32)
    bias[:, :, [0, 7]], bias[:, :, 3, :9], bias[:, 1, 5] = -1e9, -9e29, -1e9

    def softmax(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        k, v = (jnp.repeat(a, 2, axis=2) for a in (k, v))
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2 + bias)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    o, back = jax.vjp(softmax, *x, bias)
    np.testing.assert_allclose(o[:, 0], np.repeat(x[2].mean(1), 2, axis=1), rtol=0, atol=1e-6)
    found = compiled(impl, block=5, causal=False)(x, gradient, bias=bias)
    assert_close(found, [np.asarray(leaf) for leaf in (o, *back(gradient))])


@pytest.mark.parametrize("impl", few(["ring", "dense", "flash"], 1))
def test_a_row_without_keys_is_zero_beside_sinks_and_masks(impl: str) -> None:
    """The mask hides the keys that the bias leaves. A sink then takes all the weight, and a sink of -inf is no sink."""
    rng = np.random.default_rng(5)
    x, gradient = arrays(rng, SEQ, SEQ)
    bias = np.zeros((2, 1, SEQ, SEQ), np.float32)
    bias[:, :, 4, :5] = -np.inf
    run = compiled(impl, block=5, sinks=np.array([0.5, 0, -np.inf, 1], np.float32))
    o, dq, *_, db = run(x, gradient, bias=bias)
    assert (o[:, 4] == 0).all() and (dq[:, 4] == 0).all() and (db[:, :, 4] == 0).all()
    assert np.isfinite(o).all() and np.isfinite(db).all() and (o[:, 5] != 0).all()


@pytest.mark.parametrize("impl", few(["ring", "dense", "flash", "ring_self_attention"], 1))
def test_a_nan_in_a_token_is_seen(impl: str) -> None:
    """Only padding is replaced, so a NaN in any other token must reach the result."""
    x, gradient = arrays(np.random.default_rng(6), SEQ, SEQ)
    bias = np.zeros((1, 1, SEQ, SEQ), np.float32)
    run = compiled(impl, causal=False)
    for n in range(3):
        bad = [a.copy() for a in x]
        bad[n][0, 3] = np.nan
        assert np.isnan(run(bad, gradient, bias=bias)[0][0]).any()


def test_cached_attention_does_not_look_at_slots_that_are_not_seen() -> None:
    """Slots that are not seen, also those of another device, change nothing; a row that sees no slot is 0."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(2, 1, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    at = np.array([5, 2], np.int32)
    slots = {name: rng.normal(size=(1, 2, 2, 8, 4)).astype(np.float32) for name in ("keys", "values")}
    rules = jp.Rules(batch=None, heads=None, kv_heads=None, head_dim=None, cache_seq="context", layers=None)
    attend = jax.jit(lambda *x: cached_attention(*x[:3], x[3], 0, x[4])[0])
    with jp.Layout(jp.MeshSpec(context=2).build(jax.devices()[:2]), rules):
        want = np.asarray(attend(q, k, v, slots, at))
        for poison in POISONS:
            bad = {
                name: np.where(np.arange(8)[:, None] > at[None, :, None, None, None], np.float32(poison), x)
                for name, x in slots.items()
            }
            np.testing.assert_array_equal(attend(q, k, v, bad, at), want)
        none = np.asarray(attend(q, k, v, slots, np.array([-1, 2], np.int32)))
    assert (none[0] == 0).all()
    np.testing.assert_array_equal(none[1], want[1])


BIG = np.array([[0, 0, 1, 1, 2**31, 2**32, 2**32 + 1, -1, 2**40, 2**31 - 1, 0, 2**62]])


@pytest.mark.parametrize("kind", [np.int64, np.uint64, list, jnp.asarray])
def test_an_id_beyond_int32_is_an_error(kind: Any) -> None:
    ids = np.where(BIG < 0, 0, BIG).repeat(2, 0)
    ids[0] = 0
    x, _ = arrays(np.random.default_rng(0), SEQ, SEQ)
    with jax.enable_x64(True), layout("dense"), raises(LayoutError, "attention: segment_ids", "2147483648"):
        jp.attention(*x, segment_ids=ids.tolist() if kind is list else kind(ids))
    small = np.zeros((2, SEQ), np.int32)
    with layout("flash"), raises(LayoutError, "attention: segment_ids", "-1099511627776"):
        jp.attention(*x, segment_ids=(small, small - np.array([[0], [2**40]])))


@pytest.mark.slow
@pytest.mark.parametrize("impl", few(["dense", "flash", "ring", "hybrid"], 2))
def test_traced_ids_of_64_bits_are_compared_as_they_are(impl: str) -> None:
    rng = np.random.default_rng(8)
    x, gradient = arrays(rng, SEQ, SEQ)
    ids = np.stack([BIG[0], rng.permutation(BIG[0])])
    seen = sees(jp.Mask(), np.arange(SEQ), np.arange(SEQ)) & (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    with jax.enable_x64(True):
        assert_close(compiled(impl, block=5)(x, gradient, segment_ids=ids), reference(x, gradient, seen))
        if impl == "flash":
            run, unsigned = compiled(impl), np.where(ids < 0, 7, ids % 2**32).astype(np.uint32)
            assert_close(
                run(x, gradient, segment_ids=unsigned), run(x, gradient, segment_ids=unsigned.astype(np.int64))
            )


def test_traced_ids_that_no_integer_holds_are_an_error() -> None:
    x, _ = arrays(np.random.default_rng(0), 4, 4)
    ids = np.zeros((2, 4))
    attend = jax.jit(lambda ids: jp.attention(*x, segment_ids=ids))
    with layout("dense"):
        with raises(LayoutError, "attention: segment_ids", "uint32"):
            attend(ids.astype(np.uint32))
        with jax.enable_x64(True), raises(LayoutError, "attention: segment_ids", "uint64"):
            attend(ids.astype(np.uint64))
        for kind in (np.int8, np.uint8, np.int16, np.uint16):
            assert jax.eval_shape(attend, ids.astype(kind)).shape == (2, 4, 4, 3)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_ids_of_64_bits_go_to_no_kernel(platform: str) -> None:
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def look(ids: Any) -> Any:
        rules, beside, offset = read(x, x, x, {"segment_ids": ids})
        found.append(find(platform, (x, x, x), rules, beside, offset))
        return ids

    found: list[Any] = []
    with jax.enable_x64(True):
        jax.eval_shape(look, jax.ShapeDtypeStruct((1, 128), jnp.int64))
    assert found[0].why == "the kernel compares segment_ids in int32, but they are traced int64"


def test_work_of_ids_of_any_size_is_counted() -> None:
    ids = np.array([0, 0, 2**62, 2**62, 2**31, 2**31, 2**32, 2**32, 0, 0, -1, -1])
    small = np.unique(ids, return_inverse=True)[1] - 1
    for mask in (jp.Mask(), jp.Mask(causal=False, window=3)):
        found, want = (jp.context.balance(mask, 12, 2, block=4, segment_ids=each) for each in (ids, small))
        assert found.visible.tolist() == want.visible.tolist() and found.visited.tolist() == want.visited.tolist()
    kinds = [
        jp.context.balanced_packing(each, 2, chunks=2).tolist()
        for each in (ids, small, np.where(ids < 0, 0, ids).astype(np.uint64))
    ]
    assert kinds[0] == kinds[1] and sorted(kinds[2]) == list(range(12))


def test_the_filler_of_a_block_is_of_no_document_and_no_padding_of_the_caller() -> None:
    ids = pad_segments(jnp.array([[0, 7, -1, -5], [3, 3, 3, 3]], jnp.int32), 6)
    assert ids.tolist() == [[0, 7, -1, -1, FILL, FILL], [3, 3, 3, 3, FILL, FILL]] and FILL < -1
    assert pad_segments(ids[:, :4], 4).tolist() == ids[:, :4].tolist()
