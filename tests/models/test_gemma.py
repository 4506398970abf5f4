"""Gemma: gradients, pipelines, offloaded weights and generation of layers that differ, against one device.

That its logits are those of transformers is shown in tests/interop/test_huggingface.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import chex
import generators
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from one_step import BOUND, LLAMA_RULES, check_grads, check_same, layout_of, one_step
from profiles import examples, few

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.models.llama import LlamaConfig, make_llama
from jaxpar.models.llama.config import GemmaConfig
from jaxpar.models.llama.layer_groups import scan_groups
from jaxpar.models.llama.layers import rope_table
from jaxpar.models.llama.pipeline import staged_next_token_loss
from jaxpar.models.llama.rope import RopeScaling
from jaxpar.models.losses import cross_entropy, linear_cross_entropy, next_token_loss, soft_capped
from jaxpar.models.moe.config import MoEConfig

GEMMA = LlamaConfig(
    vocab=64,
    embed=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    rope_theta=500.0,
    rope_scaling=RopeScaling("linear", factor=4.0),
    qk_norm=True,
    sliding_window=6,
    window_pattern=(True, False),
    tie_embeddings=True,
    gemma=GemmaConfig(query_scalar=12, attention_softcap=2.0, logit_softcap=3.0, local_rope_theta=100.0),
)
"""Two periods of two layers."""
MAKE = make_llama(GEMMA)
SEQ = 32


def batch() -> dict[str, jax.Array]:
    return {
        name: jax.random.randint(jax.random.key(n), (8, SEQ), 0, 64) for n, name in enumerate(("tokens", "targets"))
    }


@functools.cache
def on_one_device() -> Any:
    return one_step(layout_of(LLAMA_RULES, {"data": 1}), next_token_loss, MAKE, batch())


@pytest.mark.slow
def test_gradients_are_those_of_one_device_in_fsdp_tp_context() -> None:
    layout = layout_of(LLAMA_RULES, {"data": 2, "context": 2, "model": 2})
    check_same(one_step(layout, next_token_loss, MAKE, batch()), on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["ring", "gather", "ulysses"])
def test_gradients_for_every_split_of_the_sequence(impl: Any) -> None:
    axis = "ulysses" if impl == "ulysses" else "context"
    make = make_llama(replace(GEMMA, context=jp.context.Context(impl=impl), remat="save_attention"))
    layout = layout_of(LLAMA_RULES, {axis: 2, "model": 2})
    check_same(one_step(layout, next_token_loss, make, batch(), MAKE), on_one_device())


@pytest.mark.slow
def test_gradients_are_those_of_plain_functions() -> None:
    """Without a scan, a remat policy, or a loss in pieces."""
    found = on_one_device()
    layout, data = layout_of(LLAMA_RULES, {"data": 1}), batch()
    state = jp.init(layout, MAKE, optax.identity())
    kind = state.metadata.kind

    def loss(params: Any) -> jax.Array:
        return cross_entropy(kind.merge(params, {})(data["tokens"]), data["targets"])

    with jax.default_matmul_precision("highest"), layout:
        value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
    assert found[0]["loss"] == pytest.approx(float(value), rel=1e-6)
    check_grads(found[1], jax.device_get(grads), 2 * BOUND)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


UNEVEN = jp.Rules(**{**LLAMA_RULES.to_dict(), "indivisible": {"layers": "replicate"}})
STAGES = [
    ({"pipeline": 2, "model": 2}, "1f1b", (3, 1), "full"),
    ({"pipeline": 2, "data": 2}, "gpipe", (1, 3), "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name", "layers", "kept"), [pytest.param(*STAGES[0], marks=pytest.mark.slow), STAGES[1]]
)
def test_stages_run_layers_that_differ(sizes: dict[str, int], name: str, layers: tuple[int, int], kept: Any) -> None:
    """Four layers on two stages: in a tick, one stage runs a layer with a window, and the other one without."""
    schedule = jp.pipeline.schedule(name, stages=2, microbatches=4)
    pipeline = jp.Pipeline(schedule, activation_checkpointing=kept, layers_per_stage=layers)
    got = one_step(layout_of(UNEVEN, sizes), staged_next_token_loss(GEMMA), MAKE, batch(), pipeline=pipeline)
    check_same(got, on_one_device())


def test_stages_that_differ_do_not_share_a_sequence() -> None:
    pipeline = jp.Pipeline(jp.pipeline.schedule("gpipe", stages=2, microbatches=2), layers_per_stage=(3, 1))
    layout = layout_of(UNEVEN, {"pipeline": 2, "context": 2})
    with raises(ConfigError, "seq", "2 of"):
        one_step(layout, staged_next_token_loss(GEMMA), MAKE, batch(), pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:offload. simulated CPU devices")
def test_weights_in_host_memory_run_in_one_program() -> None:
    layout = layout_of(LLAMA_RULES, {"data": 2, "model": 2})
    tx = jp.offload.to_host(optax.sgd(0.1), parameters=True, min_bytes=0)
    state = jp.init(layout, MAKE, tx)
    step = jp.train_step(layout, next_token_loss, return_grads=True, donate=False)
    with jax.default_matmul_precision("highest"):
        _, metrics = step(state, batch())
    check_grads(jax.device_get(metrics["grads"]), on_one_device()[1], 2 * BOUND)


GENERATING = replace(GEMMA, tie_embeddings=False)


@functools.cache
def generated() -> tuple[Any, list[list[int]]]:
    model = generators.generator(generators.one_device(), config=GENERATING)
    leaves, tree = jax.tree.flatten(generators.parameters(model, GENERATING))
    noise = [0.5 * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(leaves)]
    params = jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise, strict=True)])
    return params, model.generate(params, generators.PROMPTS, most=generators.MOST)


@pytest.mark.slow
def test_a_cache_gives_what_a_plain_forward_gives() -> None:
    params, made = generated()
    layout = jp.Layout(generators.one_device(), generators.RULES)
    kind = jp.abstract_state(layout, make_llama(GENERATING), optax.identity()).metadata.kind
    forward = jax.jit(lambda params, tokens: kind.merge(params, {})(tokens))
    for prompt, own in zip(generators.PROMPTS, made, strict=True):
        tokens = np.zeros((1, generators.SLOTS), np.int32)
        tokens[0, : len(prompt) + len(own)] = [*prompt, *own]
        with layout:
            logits = forward(params, tokens)[0]
        assert [int(logits[len(prompt) - 1 + i].argmax()) for i in range(len(own))] == own
    assert len({token for own in made for token in own}) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2, "data": 2, "model": 2},
        pytest.param({"data": 2, "context": 2, "model": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 4, "model": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_generated_tokens_are_those_of_one_device(mesh: dict[str, int]) -> None:
    params, made = generated()
    model = generators.generator(jp.MeshSpec(**mesh).build(), config=GENERATING)
    own = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, model.params)
    assert model.generate(own, generators.PROMPTS, most=generators.MOST) == made


@pytest.mark.slow
def test_stages_generate_from_prompts_that_are_not_split() -> None:
    params, _ = generated()
    model = generators.generator(jp.MeshSpec(pipeline=2, context=2, data=2).build(), config=GENERATING)
    own = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, model.params)
    with pytest.raises(ConfigError, match="seq: null"):
        model.generate(own, generators.PROMPTS, most=generators.MOST)


@examples(30)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_groups_run_every_layer_once(local: list[bool]) -> None:
    runs: list[bool] = []
    for first, end, period in scan_groups(local):
        assert first == len(runs) and (end - first) % period == 0
        runs += [local[first + i % period] for i in range(end - first)]
    assert runs == local


def test_a_published_pattern_is_one_scan_and_a_rest() -> None:
    assert scan_groups((([True] * 5 + [False]) * 5)[:26]) == [(0, 24, 6), (24, 26, 1)]


@pytest.mark.parametrize("softcap", few([None, 2.0], 1))
def test_a_capped_loss_in_pieces_is_that_of_all_logits(softcap: float | None) -> None:
    x, head = (3 * jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, 16, 8), (8, 24)]))
    targets = jax.random.randint(jax.random.key(2), (2, 16), 0, 24)
    rules = jp.Rules(batch=None, seq=None, embed=None, vocab=None)
    with jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), rules):
        in_pieces = lambda x, head: linear_cross_entropy(x, head, targets, softcap=softcap)
        plain = lambda x, head: cross_entropy(soft_capped(x @ head, softcap), targets)
        got, want = (jax.value_and_grad(f, (0, 1))(x, head) for f in (in_pieces, plain))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_keys_and_frequencies_by_hand() -> None:
    """One position of each kind of layer."""
    angle = lambda theta, factor: 5 / factor * theta ** (-np.arange(0, 16, 2) / 16)
    for local, want in ((False, angle(500.0, 4.0)), (True, angle(100.0, 1.0))):
        cos, _ = rope_table(jnp.array([[5]]), GEMMA, local=local)
        np.testing.assert_allclose(cos[0, 0, 0], np.cos(want), atol=1e-6)
    yarn = RopeScaling("yarn", factor=4.0, original_seq=64, fast_turns=8.0)
    cos, sin = rope_table(jnp.array([[5]]), replace(GEMMA, rope_theta=100.0, rope_scaling=yarn))
    # Pairs 0 to 7 turn 64 / (2 pi) * 100^(-i / 8) times within 64 positions: 8 times at i = 0.4, once at i = 4.03.
    stretched = np.clip(np.arange(8) / 5, 0, 1)
    want = angle(100.0, 1.0) * (1 - stretched + stretched / 4)
    np.testing.assert_allclose(np.hypot(cos, sin), 0.1 * np.log(4) + 1, rtol=1e-6)
    np.testing.assert_allclose(cos[0, 0, 0] / (0.1 * np.log(4) + 1), np.cos(want), atol=1e-6)


def test_the_sizes_of_a_gemma() -> None:
    state = jax.eval_shape(
        lambda: jax.tree.leaves(jp.abstract_state(layout_of(LLAMA_RULES, {}), MAKE, optax.identity()).params)
    )
    assert sum(leaf.size for leaf in state) == GEMMA.params
    # Of 32 keys: all layers see 6 at most, or half of 32.
    assert GEMMA.mean_keys(32) == pytest.approx(0.5 * (6 - 36 / 64) + 0.5 * 16)
    assert GEMMA.local_layers == (True, False, True, False)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: replace(GEMMA, window_pattern=(False,)), "llama: window_pattern"),
        (lambda: replace(GEMMA, copies=2), "overlap.ways"),
        (lambda: MoEConfig(gemma=GemmaConfig()), "moe: gemma"),
        (lambda: RopeScaling(fast_turns=1.0), "rope_scaling: fast_turns"),
    ],
)
def test_configurations_that_cannot_be(make: Any, name: str) -> None:
    with raises(ConfigError, name):
        make()
