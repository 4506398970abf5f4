"""Gradients outside the layers that are reduce-scattered for every microbatch are those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_step import SGD, check_same, layout_of
from profiles import few
from small_stages import LOSS, ONE_F_ONE_B, RULES, batch_of, layer, make_model, run

import jaxpar as jp
from jaxpar.parallel.pipeline.executor import layer_slice

ZERO = jp.Zero(3, min_bytes=0)


def rules_with(**dims: Any) -> jp.Rules:
    """Returns rules that shard every parameter over ``data``, with other rules for some dims of compute."""
    base = {dim: rule for dim, rule in RULES.to_dict().items() if dim != "params"}
    return ZERO.rules(jp.Rules(**{**base, **dims}))


SHARDED = rules_with()
_COMPUTE = {dim: rule for dim, rule in RULES.to_dict().items() if dim != "params"}
NOT_OVER_DATA = jp.Rules(**_COMPUTE)
SAME_DIM = jp.Rules(**_COMPUTE, params={"vocab": ("pipeline", "data"), "embed": None})


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, float], Any]:
    return run({"data": 1})


def options(schedule: Any = ONE_F_ONE_B, **others: Any) -> jp.Pipeline:
    return jp.Pipeline(schedule, head_grad_reduction="per_microbatch", **others)


INTERLEAVED = jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=2)
CASES: dict[str, tuple[dict[str, int], jp.Pipeline, jp.Rules]] = {
    "over stages and data": ({"pipeline": 2, "data": 2}, options(), RULES),
    "the same dim": ({"pipeline": 2, "data": 2}, options(), SAME_DIM),
    "in ticks": ({"pipeline": 2, "data": 4}, options(embedding="per_microbatch"), SHARDED),
    "with model": (
        {"pipeline": 2, "data": 2, "model": 2},
        options(INTERLEAVED, grad_reduction="per_chunk", activation_checkpointing="none"),
        SHARDED,
    ),
    "independent": ({"pipeline": 2, "data": 2}, options(executor="independent", embedding="per_microbatch"), SHARDED),
    "not over data": ({"pipeline": 2, "data": 2}, options(embedding="per_microbatch"), NOT_OVER_DATA),
    "one stage": ({"pipeline": 1, "data": 4}, options(jp.pipeline.schedule("1f1b", stages=1, microbatches=2)), SHARDED),
}


@pytest.mark.parametrize("name", few(sorted(CASES, key=lambda name: name != "not over data"), 1))
def test_gradients_are_those_of_one_device(name: str, one_device: Any) -> None:
    sizes, pipeline, rules = CASES[name]
    got = run(sizes, pipeline, rules=rules, **(ZERO.step if rules is SHARDED else {}))
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


@pytest.mark.slow
def test_large_gradients_are_scattered_in_blocks(monkeypatch: pytest.MonkeyPatch, one_device: Any) -> None:
    monkeypatch.setattr(layer_slice, "BLOCK_BYTES", 100)
    monkeypatch.setattr(layer_slice, "_TILE", 2)
    layout = layout_of(RULES, {"pipeline": 2, "data": 2})
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        text = jp.train_step(layout, LOSS, pipeline=options()).lower(state, batch_of()).as_text()
    # The head [8, 16] is 256 bytes on each of two stages, and so is the table: three blocks of up to four words each.
    assert text.count("reduce_scatter") >= 6
    got = run({"pipeline": 2, "data": 2}, options(), rules=RULES)
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


def test_blocks_cover_a_gradient_along_its_largest_unscattered_dim() -> None:
    blocks = layer_slice.blocks_of((512, 100_001), [0], 2**26)
    assert [(dim, start) for dim, start, _ in blocks] == [(1, 0), (1, 25088), (1, 50176), (1, 75264)]
    assert sum(size for *_, size in blocks) == 100_001
    assert layer_slice.blocks_of((6, 2**18 + 5), [0], 2**26) == [(1, 0, 2**18 + 5)]
    assert layer_slice.blocks_of((6, 2**28), [0, 1], 2**26) == [(0, 0, 6)]
    assert layer_slice.blocks_of((), [], 2**26) == [(0, 0, 1)]


@pytest.mark.slow
def test_in_bf16_they_are_those_of_one_reduction() -> None:
    narrow = replace(LOSS, layer=lambda block, x, side: layer(block, x, side.astype(x.dtype)))
    each = (options(embedding="per_microbatch"), jp.Pipeline(ONE_F_ONE_B, embedding="per_microbatch"))
    got, want = (run({"pipeline": 2, "data": 2}, how, narrow, rules=RULES, precision="bf16") for how in each)
    check_same(got, want)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(got[1]))
