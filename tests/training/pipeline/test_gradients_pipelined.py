"""Every pipeline schedule gives the values and gradients of one device, also combined with other mesh axes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_step import SGD, check_same, layout_of
from profiles import examples, few
from small_stages import (
    LAYERS,
    LOSS,
    ONE_F_ONE_B,
    QUICK,
    ROWS,
    RULES,
    SEQ,
    WIDTH,
    after,
    batch_of,
    layer,
    make_model,
    run,
)

import jaxpar as jp
from jaxpar.parallel.pipeline.executor import layer_slice
from jaxpar.parallel.pipeline.executor.layer_placement import Layers, _rounds
from jaxpar.parallel.pipeline.executor.stage import Chunk
from jaxpar.parallel.pipeline.schedules.orders import Pieces
from jaxpar.testing import assert_no_collective_in_conditional


@pytest.fixture(scope="module")
def one_device() -> tuple[dict[str, float], Any]:
    return run({"data": 1})


# name, mesh, microbatches, chunks, activation_checkpointing, layers of each piece
CASES: list[tuple[str, dict[str, int], int, int, str, tuple[int, ...]]] = [
    ("gpipe", {"pipeline": 4, "data": 2}, 8, 1, "none", ()),
    ("1f1b", {"pipeline": 4}, 2, 1, "full", ()),
    ("1f1b", {"pipeline": 2, "data": 2, "model": 2}, 8, 1, "none", (5, 3)),
    ("1f1b", {"pipeline": 1, "data": 2}, 2, 1, "full", ()),
    ("interleaved", {"pipeline": 2, "data": 2, "model": 2}, 4, 2, "full", (3, 2, 1, 2)),
    ("breadth_first", {"pipeline": 4, "data": 2}, 4, 2, "none", ()),
    ("zb_uniform", {"pipeline": 4, "data": 2}, 4, 1, "full", ()),
    ("zb_h1", {"pipeline": 2, "model": 2}, 4, 1, "none", ()),
    ("zb_v", {"pipeline": 2, "data": 2}, 8, 2, "full", ()),
    ("dualpipe_v", {"pipeline": 2, "data": 2}, 4, 2, "none", (1, 2, 3, 2)),
]


# Uneven layers combined with other axes, one stage, a V placement, and separate backward passes for weights.
@pytest.mark.slow
@pytest.mark.parametrize("case", few([CASES[i] for i in (2, 3, 8, 9)], 1), ids=str)
def test_what_comes_before_the_layers_in_the_ticks_gives_the_same(case: Any, one_device: Any) -> None:
    name, sizes, microbatches, chunks, activation_checkpointing, layers = case
    schedule = jp.pipeline.schedule(name, sizes["pipeline"], microbatches, chunks=None if name[-1] == "v" else chunks)
    got = run(
        sizes,
        jp.Pipeline(
            schedule,
            activation_checkpointing=activation_checkpointing,
            layers_per_stage=layers,
            embedding="per_microbatch",
        ),
    )
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


@pytest.mark.slow
def test_nothing_of_a_batch_waits_where_what_comes_before_the_layers_is_in_the_ticks() -> None:
    """A microbatch is ROWS x SEQ x WIDTH x 4 bytes, half on each stage; tokens and targets add 4 bytes per entry."""

    def temporary(microbatches: int, embedding: Any) -> int:
        layout = layout_of(RULES, {"pipeline": 2})
        pipeline = jp.Pipeline(
            jp.pipeline.schedule("1f1b", 2, microbatches), activation_checkpointing="none", embedding=embedding
        )
        batch = {name: jnp.concatenate([x] * microbatches) for name, x in batch_of().items()}
        with layout:
            state = jp.abstract_state(layout, make_model, SGD)
            step = jp.train_step(layout, LOSS, pipeline=pipeline).lower(state, batch)
        found: Any = step.compile(compiler_options=QUICK).memory_analysis()
        return found.temp_size_in_bytes

    more = {
        embedding: temporary(40, embedding) - temporary(8, embedding) for embedding in ("per_step", "per_microbatch")
    }
    assert more["per_step"] > 32 * ROWS * SEQ * WIDTH * 4 / 2
    assert more["per_microbatch"] < more["per_step"] / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "activation_checkpointing", "embedding"),
    few(
        [
            ("zb_h1", "full", "per_step"),
            ("zb_v", "none", "per_step"),
            ("1f1b", "none", "per_microbatch"),
            ("zb_v", "full", "per_microbatch"),
        ],
        2,
        names=3,
    ),
)
def test_stages_that_do_their_own_alone_give_the_same(
    name: str, activation_checkpointing: Any, embedding: Any, one_device: Any
) -> None:
    schedule = jp.pipeline.schedule(name, stages=2, microbatches=8, chunks=2 if name == "zb_v" else None, fused=False)
    got = run(
        {"pipeline": 2, "data": 2},
        jp.Pipeline(
            schedule, activation_checkpointing=activation_checkpointing, executor="independent", embedding=embedding
        ),
    )
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


@pytest.mark.slow
def test_no_collective_stands_where_stages_part() -> None:
    layout = layout_of(RULES, {"pipeline": 2, "data": 2})
    pipeline = jp.Pipeline(jp.pipeline.schedule("zb_h1", stages=2, microbatches=4), executor="independent")
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        step = jp.train_step(layout, LOSS, pipeline=pipeline).lower(state, batch_of())
    compiled = step.compile(compiler_options=QUICK)
    report = assert_no_collective_in_conditional(compiled, layout.mesh)
    assert "own_layers/" in compiled.as_text() and report.select("collective-permute")
    assert not [c for c in report.collectives if "own_layers/" in c.op_name]


@pytest.mark.slow
@pytest.mark.parametrize(("grad_reduction", "layers"), [("per_microbatch", ()), ("per_chunk", (3, 2, 1, 2))])
def test_gradients_are_scattered_before_the_end_where_that_is_asked_for(
    grad_reduction: Any, layers: tuple[int, ...], one_device: Any
) -> None:
    schedule = jp.pipeline.schedule("interleaved", stages=2, microbatches=4, chunks=2)
    got = run(
        {"pipeline": 2, "data": 2, "model": 2},
        jp.Pipeline(schedule, grad_reduction=grad_reduction, layers_per_stage=layers),
    )
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [layer_slice.BLOCK_BYTES, 100])
def test_a_bucket_is_scattered_beside_a_backward(
    block_bytes: int, one_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_slice, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(layer_slice, "RING_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(layer_slice, "_TILE", 2)
    rules = jp.Zero(3, min_bytes=0).rules(jp.Rules(**{k: v for k, v in RULES.to_dict().items() if k != "params"}))
    schedule = jp.pipeline.schedule("interleaved", stages=2, microbatches=2, chunks=2)
    options = jp.Pipeline(schedule, grad_reduction="per_chunk")
    got = run({"pipeline": 2, "data": 4}, options, rules=rules, **jp.Zero(3, min_bytes=0).step)
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)
    layout = layout_of(rules, {"pipeline": 2, "data": 4})
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        step = jp.train_step(layout, LOSS, pipeline=options).lower(state, batch_of())
    audit = jp.audit(step.compile(compiler_options=QUICK), mesh=layout.mesh)
    permutes = sum(c.count for c in audit.select("collective-permute", "data"))
    rings = 9 if block_bytes == 100 else 0
    assert permutes > rings, "no permute over data scatters a bucket beside a backward"


GATHERED_BESIDE: list[tuple[str, int, int, str, str, tuple[int, ...]]] = [
    ("interleaved", 2, 2, "none", "per_step", (3, 2, 1, 2)),
    ("breadth_first", 4, 3, "full", "per_chunk", ()),
    ("zb_v", 2, 4, "none", "per_microbatch", ()),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GATHERED_BESIDE, ids=str)
def test_weights_are_gathered_beside_the_first_forwards(case: Any, one_device: Any) -> None:
    name, chunks, microbatches, activation_checkpointing, grad_reduction, layers = case
    zero = jp.Zero(3, min_bytes=0)
    rules = zero.rules(jp.Rules(**{k: v for k, v in RULES.to_dict().items() if k != "params"}))
    schedule = jp.pipeline.schedule(name, stages=2, microbatches=microbatches, chunks=chunks)
    options = jp.Pipeline(
        schedule,
        activation_checkpointing=activation_checkpointing,
        grad_reduction=grad_reduction,
        layers_per_stage=layers,
    )
    batch = {name: x[: 4 * microbatches] for name, x in batch_of().items()}
    got = run({"pipeline": 2, "data": 4}, options, rules=rules, batch=batch, **zero.step)
    want = one_device if microbatches == 4 else run({"data": 1}, batch=batch)
    got[0]["right"] = want[0]["right"]
    check_same(got, want)
    layout = layout_of(rules, {"pipeline": 2, "data": 4})
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        step = jp.train_step(layout, LOSS, pipeline=options).lower(state, batch)
    audit = jp.audit(step.compile(compiler_options=QUICK), mesh=layout.mesh)
    assert any("own_layers/" in c.op_name for c in audit.select("collective-permute", "data"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([1, 2, 3], 2))
def test_every_stage_of_zero_composes_with_stages_and_heads(stage: int, one_device: Any) -> None:
    """Weights, gradients and moments are sharded over ``data``, also the embedding, which is used on both ends."""
    zero = jp.Zero(stage, min_bytes=0)
    rules = zero.rules(jp.Rules(**{dim: rule for dim, rule in RULES.to_dict().items() if dim != "params"}))
    layout = jp.Layout(jp.MeshSpec(pipeline=2, data=2, model=2).abstract(), rules)
    state = jp.abstract_state(layout, make_model, optax.adam(0.1))
    assert all("data" in str(x.sharding.spec) for x in jax.tree.leaves((state.params, state.opt_state[0].mu)))
    got = run({"pipeline": 2, "data": 2, "model": 2}, ONE_F_ONE_B, rules=rules, **zero.step)
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


@pytest.mark.parametrize("case", few(sorted(CASES, key=lambda case: case[0] != "zb_h1"), 1), ids=str)
def test_a_schedule_gives_the_gradients_of_one_device(case: Any, one_device: Any) -> None:
    name, sizes, microbatches, chunks, activation_checkpointing, layers = case
    schedule = jp.pipeline.schedule(name, stages=sizes["pipeline"], microbatches=microbatches, chunks=chunks)
    got = run(sizes, jp.Pipeline(schedule, activation_checkpointing=activation_checkpointing, layers_per_stage=layers))
    # The metric "right" is a mean over all rows, which differs from the weighted mean of the microbatches.
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)


def test_a_staged_loss_is_the_loss_by_itself(one_device: Any) -> None:
    def plain(model: Any, batch: Any) -> Any:
        x = LOSS.embed(model, batch)
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda w, i=i: w[i], model["blocks"]), x, LOSS.layer_inputs(model, batch))
        return after(model, x, batch)

    check_same(run({"data": 1}, None, plain), one_device)


def test_the_program_holds_no_conditional_and_does_not_grow_with_microbatches() -> None:
    layout = jp.Layout(jp.MeshSpec(pipeline=4, data=2).build(), RULES)
    sizes = []
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        for microbatches in (4, 16):
            batch = {name: jnp.concatenate([x, x]) for name, x in batch_of().items()}
            schedule = jp.pipeline.schedule("1f1b", stages=4, microbatches=microbatches)
            text = jp.train_step(layout, LOSS, pipeline=schedule).lower(state, batch).as_text()
            assert not re.search(r"stablehlo\.(case|if)\b", text)
            sizes.append(text.count("\n"))
    assert abs(sizes[1] - sizes[0]) <= 0.01 * sizes[0]


@pytest.mark.slow
def test_what_some_ticks_do_is_not_done_in_all() -> None:
    """XLA:CPU hoists loop-invariant code, so the head, the feed and the drain could otherwise run in every tick."""
    layout = jp.Layout(jp.MeshSpec(pipeline=4).build(jax.devices()[:4]), RULES)
    schedule = jp.pipeline.schedule("1f1b", stages=4, microbatches=8)
    with layout:
        state = jp.abstract_state(layout, make_model, SGD)
        step = jp.train_step(layout, LOSS, pipeline=schedule).lower(state, batch_of())
    report = jp.audit(step.compile(compiler_options=QUICK), mesh=layout.mesh)
    counts = {
        name: {c.count for c in report.collectives if name in c.source}
        for name in ("after", "over_stages", "first_input")
    }
    assert counts == {"after": {8}, "over_stages": {1, 7, 8}, "first_input": {1, 7}}
    assert {c.count for c in report.select("collective-permute")} == {len(schedule.ticks.rows)}


def test_weights_of_a_single_layer_are_not_done_where_their_loop_runs_zero_times() -> None:
    """XLA:CPU hoists loop-invariant code, which would run the weight gradient in ticks without a W."""
    x = jnp.ones((ROWS, WIDTH))

    def run(times: jax.Array, own: list[jax.Array]) -> Any:
        weights = {"w": jnp.ones((1, 1, WIDTH, WIDTH))}
        chunk = Chunk(lambda block, x, side: jnp.tanh(x @ block["w"]), weights, jnp.asarray(0), times)
        parts = chunk.halves(None, chunk.kept(x, None)[1], x)
        assert [y.shape for y in parts.shapes] == [y.shape[2:] for y in own]
        add = lambda sums, i, grads, here: sums + grads["w"]
        return chunk.backward_of_weights(own, jnp.asarray(0), None, parts, add, jnp.zeros((WIDTH, WIDTH)))

    own = [x[None, None], x[None, None]]
    compiled = jax.jit(run).lower(jnp.asarray(1), own).compile()
    assert [float(compiled(jnp.asarray(times), own).sum()) for times in (0, 1)] == [0, ROWS * WIDTH**2]
    loops, entry = compiled.as_text().split("\nENTRY")
    assert " dot(" in loops and " dot(" not in entry


@examples(20)
@given(st.data())
def test_layers_go_to_their_stages_and_back(data: st.DataObject) -> None:
    stages, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    per = data.draw(st.integers(chunks, 6))
    total, count = stages * per, stages * chunks
    cuts = sorted(
        data.draw(st.sets(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1)) if total > 1 else []
    )
    each = tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
    placement: Any = data.draw(st.sampled_from(["interleaved", "v"]))
    layers = Layers(total, Pieces(stages, chunks, placement), each)
    moves = layers._moves(1)
    assert sorted((stage, at) for stage, at, *_ in moves) == [(s, i) for s in range(stages) for i in range(per)]
    assert len({(to, place) for *_, to, place in moves}) == total
    for found in _rounds(moves):
        assert len({move[0] for move in found}) == len({move[2] for move in found}) == len(found)
    # The layers of a piece are stored where the piece runs, in the order of the model.
    at = {stage * per + i: (to, place) for stage, i, to, place in moves}
    numbers = iter(range(total))
    for piece, size in enumerate(each):
        stage, chunk = layers.pieces.place(piece)
        assert [at[next(numbers)] for _ in range(size)] == [(stage, chunk * layers.most + i) for i in range(size)]


@pytest.mark.parametrize(("chunks", "each"), [(4, (2,) * 16), (2, (4,) * 8)])
def test_layers_move_to_their_stages_and_back_by_permutes(chunks: int, each: tuple[int, ...]) -> None:
    layers = Layers(32, Pieces(4, chunks, "interleaved"), each)
    mesh = jax.make_mesh((4,), ("pipeline",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    there = lambda w: layers.cut(w).reshape(-1)
    spec = jax.P("pipeline")
    both = lambda w: (there(w), layers.back(layers.cut(w), split=True))
    compiled = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)).lower(jnp.arange(32.0)).compile()
    wanted = [
        layer
        for stage in range(4)
        for piece in range(stage, len(each), 4)
        for layer in range(piece * each[0], (piece + 1) * each[0])
    ]
    went, came = compiled(jnp.arange(32.0))
    assert went.tolist() == wanted and came.tolist() == list(range(32))
    assert {c.kind for c in jp.audit(compiled, mesh=mesh).collectives} == {"collective-permute"}


@pytest.mark.slow
def test_the_remedy_for_layers_that_stages_do_not_divide_works(one_device: tuple[dict[str, float], Any]) -> None:
    rules = RULES.replace(vocab=None, indivisible={"layers": "replicate"})
    pipeline = jp.Pipeline(jp.pipeline.schedule("1f1b", stages=3, microbatches=4), layers_per_stage=(3, 3, 2))
    got = run({"pipeline": 3, "data": 2}, pipeline, rules=rules)
    got[0]["right"] = one_device[0]["right"]
    check_same(got, one_device)
