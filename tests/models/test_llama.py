"""The Llama against a plain reference, its sizes, its loss, and the arrays that tensor parallelism must never
gather."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covers import covering
from error_texts import raises
from profiles import few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama import PRESETS, LlamaConfig, make_llama, preset
from jaxpar.models.llama.rope import RopeScaling
from jaxpar.models.losses import cross_entropy, linear_cross_entropy, next_token_loss

# Grouped queries, three rotary pairs per head, and a vocabulary size that no other dim has.
CONFIG = LlamaConfig(vocab=208, embed=24, layers=2, heads=4, kv_heads=2, head_dim=6, mlp=54)
SEQ = 10
VARIANTS = {
    "grouped queries": CONFIG,
    "one key head": replace(CONFIG, kv_heads=1),
    "a key head each": replace(CONFIG, kv_heads=4),
    "tied": replace(CONFIG, tie_embeddings=True),
    "window and biases": replace(CONFIG, sliding_window=4, qkv_bias=True),
    "long positions": replace(CONFIG, rope_theta=100.0, rope_scaling=RopeScaling(original_seq=40)),
    "remat full": replace(CONFIG, remat="full"),
    "remat dots": replace(CONFIG, remat="dots"),
    "remat save_outputs": replace(CONFIG, remat="save_outputs"),
}


def batch(config: LlamaConfig = CONFIG, rows: int = 8) -> dict[str, np.ndarray]:
    tokens, targets = np.random.default_rng(0).integers(0, config.vocab, (2, rows, SEQ))
    return {"tokens": tokens, "targets": targets}


@pytest.fixture(scope="module")
def one_device(layout_of: Any) -> jp.Layout:
    return layout_of("dp", jax.devices()[:1])


def frequencies(config: LlamaConfig) -> np.ndarray:
    """The angle per position of each rotary pair, by the published recipe of Llama 3.1, one frequency at a time."""
    result = []
    scaling = config.rope_scaling or RopeScaling(factor=1.0)
    for i in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > scaling.original_seq:
            frequency /= scaling.factor
        elif wavelength > scaling.original_seq / 4:
            smooth = (scaling.original_seq / wavelength - 1) / 3
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        result.append(frequency)
    return np.array(result)


def turn(x: jax.Array, config: LlamaConfig) -> jax.Array:
    """Rotary positions as a product of complex numbers."""
    low, high = x[..., : config.head_dim // 2], x[..., config.head_dim // 2 :]
    angle = np.arange(SEQ)[:, None] * frequencies(config)
    z = (low + 1j * high) * np.exp(1j * angle).astype(np.complex128)[:, None, :]
    return jnp.concatenate([z.real, z.imag], axis=-1)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale


def reference(params: Any, batch: dict[str, np.ndarray], config: LlamaConfig) -> jax.Array:
    """The mean loss, computed layer by layer and head by head."""
    x = params["embedding"][batch["tokens"]]
    for i in range(config.layers):
        block = jax.tree.map(lambda w, i=i: w[i], params["blocks"])
        attention, mlp = block["attention"], block["mlp"]
        h = norm(x, block["attention_norm"]["scale"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, attention[n]) + attention.get(f"{n}_bias", 0) for n in "qkv")
        q, k = turn(q, config), turn(k, config)
        for head in range(config.heads):
            group = head * config.kv_heads // config.heads
            scores = q[:, :, head] @ k[:, :, group].swapaxes(1, 2) / math.sqrt(config.head_dim)
            seen = np.tri(SEQ, dtype=bool) & ~np.tri(SEQ, k=-(config.sliding_window or SEQ), dtype=bool)
            scores = jnp.where(seen, scores, -jnp.inf)
            weights = jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
            x = x + weights @ v[:, :, group] @ attention["o"][head]
        h = norm(x, block["mlp_norm"]["scale"])
        gate = h @ mlp["gate"]
        x = x + gate / (1 + jnp.exp(-gate)) * (h @ mlp["up"]) @ mlp["down"]
    head_EV = params["embedding"].T if config.tie_embeddings else params["head"]
    probability = jax.nn.softmax(norm(x, params["norm"]["scale"]) @ head_EV)
    return -jnp.log(jnp.take_along_axis(probability, batch["targets"][..., None], axis=-1)).mean()


def drawn(layout: jp.Layout, config: LlamaConfig) -> jp.TrainState:
    """A state with random numbers for all parameters: norm scales of ones would hide a missing scale."""
    state, random = jp.abstract_state(layout, make_llama(config), optax.sgd(0.1)), np.random.default_rng(1)
    draw = lambda path, w: (random.normal(size=w.shape) / 4 + (getattr(path[-1], "key", "") == "scale")).astype(w.dtype)
    return replace(state, params=jax.tree_util.tree_map_with_path(draw, state.params))


@pytest.mark.parametrize("config", few(VARIANTS.values(), 1), ids=VARIANTS)
def test_loss_and_gradients_equal_the_reference(config: LlamaConfig, one_device: jp.Layout) -> None:
    """In fp64, so that rounding does not decide: only the model's rotary tables are fp32 (eps = 1.2e-7)."""
    config = replace(config, dtype="float64", param_dtype="float64")
    with jax.enable_x64(True):
        state = drawn(one_device, config)
        params, data = state.params, batch(config, rows=2)
        loss_fn = lambda p: next_token_loss(state.metadata.kind.merge(p, state.variables), data)
        with one_device:
            loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params)
        want, want_grads = jax.jit(jax.value_and_grad(lambda p: reference(p, data, config)))(params)
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max()), grads, want_grads)


@pytest.fixture(scope="module")
def logits(one_device: jp.Layout) -> Callable[..., jax.Array]:
    """The function ``logits(tokens, positions=None, dtype="float32")``, with the same parameters in every call."""

    @functools.cache
    def model(dtype: str) -> Callable[..., jax.Array]:
        state = drawn(one_device, replace(CONFIG, dtype=dtype))
        return jax.jit(lambda tokens, positions: state.model(tokens, positions))

    def compute(tokens: np.ndarray, positions: np.ndarray | None = None, dtype: str = "float32") -> jax.Array:
        with one_device:
            return model(dtype)(tokens, positions)

    return compute


@pytest.mark.slow
def test_a_token_changes_nothing_before_it(logits: Any) -> None:
    tokens = batch()["tokens"]
    changed = tokens.copy()
    changed[:, 6] = (changed[:, 6] + 1) % CONFIG.vocab
    apart = np.abs(logits(tokens) - logits(changed)).max(axis=(0, 2))
    assert apart[:6].tolist() == [0] * 6
    assert (apart[6:] > 1e-4).all()


def test_only_the_distance_of_positions_matters(logits: Any) -> None:
    tokens, positions = batch()["tokens"], np.broadcast_to(np.arange(SEQ), (8, SEQ))
    want = logits(tokens)
    np.testing.assert_allclose(logits(tokens, positions), want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits(tokens, positions + 7), want, rtol=0, atol=1e-4)
    assert np.abs(logits(tokens, positions * 2) - want).max() > 1e-2


def test_dtype_computes_and_param_dtype_is_stored(logits: Any, one_device: jp.Layout) -> None:
    tokens = batch()["tokens"]
    half = logits(tokens, dtype="bfloat16")
    assert half.dtype == jnp.bfloat16
    # The worst of 16,640 elements would depend on the processor; the norm of the difference does not. bf16 rounds to
    # 2**-9, and the errors of some 25 operations in sequence add up to sqrt(25) * 2**-9 = 0.01.
    whole = logits(tokens)
    assert 2**-9 < np.linalg.norm(half.astype(np.float32) - whole) / np.linalg.norm(whole) < 0.04
    stored = jp.abstract_state(one_device, make_llama(replace(CONFIG, param_dtype="bfloat16")), optax.sgd(0.1))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored.params)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(PRESETS["tiny"], None), (VARIANTS["window and biases"], None), (VARIANTS["tied"], None), (PRESETS["1b"], 1.10)]
    + [(PRESETS["llama3_1_8b"], 8.03), (PRESETS["llama3_1_70b"], 70.55)],
    ids=["tiny", "biases", "tied", "1b", "8b", "70b"],
)
def test_the_number_of_parameters_is_as_published(config: LlamaConfig, billions: float | None, layout_of: Any) -> None:
    params = jp.abstract_state(layout_of("dp", 8), make_llama(config), optax.sgd(0.1)).params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == config.params
    assert billions is None or round(config.params / 1e9, 2) == billions


# At this length gathering the table would be the cheaper exchange, and the compiler chooses it where it can.
LONG = 64


def shapes(layout: jp.Layout, config: LlamaConfig) -> set[tuple[int, ...]]:
    """Every shape in the program that each device runs for a train step."""
    abstract = jp.abstract_state(layout, make_llama(config), optax.adam(1e-3))
    tokens = jax.ShapeDtypeStruct((8, LONG), np.int32, sharding=layout.sharding(("batch", "seq")))
    step = jp.train_step(layout, next_token_loss)
    text = step.lower(abstract, {"tokens": tokens, "targets": tokens}).compile().as_text()
    return {tuple(map(int, found.split(","))) for found in re.findall(r"\w\[(\d+(?:,\d+)*)\]", text)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tied"), few([("tp", False), ("tp_sp", False), ("fsdp_tp", False), ("tp_sp", True)], 1, names=2)
)
def test_tensor_parallelism_never_makes_logits_or_table_whole(name: str, tied: bool, layout_of: Any) -> None:
    found = shapes(layout_of(name), replace(CONFIG, tie_embeddings=tied))
    assert {shape for shape in found if CONFIG.vocab in shape} == set()
    # The program holds one piece of the logits at a time, and all pieces of their gradient.
    half = CONFIG.vocab // 2
    assert {(2, 1, LONG // 8, half), (2, 1, 8, LONG // 8, half), (half, CONFIG.embed)} <= found
    # Between the blocks a device holds half the sequence under sequence parallelism, and only there.
    assert any(shape[-3:] == (2, LONG // 2, CONFIG.embed) for shape in found) is (name == "tp_sp")


@pytest.mark.slow
def test_without_tensor_parallelism_logits_and_table_are_whole(layout_of: Any) -> None:
    assert {(1, 1, LONG // 8, CONFIG.vocab), (CONFIG.vocab, CONFIG.embed)} <= shapes(layout_of("dp"), CONFIG)


@pytest.mark.parametrize(("masked", "dtype"), [(False, np.float32), (True, jnp.bfloat16)])
def test_cross_entropy_equals_optax(masked: bool, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x, labels = jnp.asarray(9 * rng.normal(size=(3, 5, 7)), dtype), rng.integers(0, 7, (3, 5))
    mask = rng.integers(0, 2, (3, 5)) if masked else None

    def theirs(x: jax.Array) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(x.astype(np.float32), labels)
        return each.mean() if mask is None else (each * mask).sum() / mask.sum()

    got, want = (jax.jit(jax.value_and_grad(f))(x) for f in (lambda x: cross_entropy(x, labels, mask), theirs))
    assert got[0].dtype == np.float32
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "seq"), covering(["dp", "tp_sp", "fsdp_tp"], [16, 10, 7], keep=1, strength=1))
def test_a_loss_in_pieces_equals_the_loss_of_whole_logits(name: str, seq: int, layout_of: Any) -> None:
    rng = np.random.default_rng(seq)
    x, head = (rng.normal(size=shape).astype(np.float32) for shape in ((8, seq, 12), (12, 26)))
    targets, mask = rng.integers(0, 26, (8, seq)), rng.uniform(0, 2, (8, seq)).astype(np.float32)
    in_fp64 = [np.float64(value) for value in (x, head, mask)]

    def whole(x: jax.Array, head: jax.Array, mask: jax.Array) -> jax.Array:
        return 3 * cross_entropy(x @ head, targets, mask)

    def in_pieces(x: jax.Array, head: jax.Array, mask: jax.Array) -> jax.Array:
        return 3 * linear_cross_entropy(x, head, targets, mask)

    with jax.enable_x64(True):
        want = jax.jit(jax.value_and_grad(whole, argnums=(0, 1, 2)))(*in_fp64)
    with layout_of(name):
        got = jax.jit(jax.value_and_grad(in_pieces, argnums=(0, 1, 2)))(x, head, mask)
        without_gradient = jax.jit(in_pieces)(x, head, mask)
    np.testing.assert_allclose(without_gradient, want[0], rtol=1e-6)
    # Relative to the largest entry: an entry is a sum of up to 128 terms in fp32, which rounds by at most 128 * eps / 2
    # = 8e-6.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, want)


def test_a_loss_in_pieces_splits_with_the_sequence(layout_of: Any) -> None:
    layout = jp.Layout(jp.MeshSpec(data=2, context=4).build(), layout_of("dp").rules)
    x, head = jnp.ones((4, 32, 12)), jnp.ones((12, 26))
    with layout:
        text = jax.jit(jax.grad(linear_cross_entropy)).lower(x, head, jnp.zeros((4, 32), int)).compile().as_text()
    # 2 of 4 rows, one shard of 8 positions: a piece is one position of each shard.
    assert "f32[2,1,1,26]" in text
    assert "all-gather" not in text


def test_cross_entropy_stands_extremes_and_an_empty_mask() -> None:
    x = jnp.array([[[1e4, 0.0, -1e4]]])
    assert float(cross_entropy(x, jnp.array([[0]]))) == 0.0
    assert float(cross_entropy(x, jnp.array([[2]]))) == 2e4
    assert float(cross_entropy(x, jnp.array([[0]]), jnp.zeros((1, 1)))) == 0.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"heads": 6, "kv_heads": 4}, "kv_heads"),
        ({"head_dim": 7}, "llama: head_dim"),
    ],
    ids=["heads", "head_dim"],
)
def test_sizes_that_cannot_work_are_refused(changes: dict[str, int], name: str) -> None:
    with raises(ConfigError, name):
        preset("tiny", **changes)


def test_an_unknown_preset_is_refused_with_the_closest() -> None:
    with raises(ConfigError, "llama3_1_8B"):
        preset("llama3_1_8B")
