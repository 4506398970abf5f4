"""Schedules: published figures, tables that are replayed for every order, output, and error texts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from random_orders import orders_of_ones_own

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.errors import ScheduleError
from jaxpar.parallel.pipeline.schedules.orders import Op
from jaxpar.parallel.pipeline.schedules.registry import NAMES
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.simulate import Timing, simulate
from jaxpar.parallel.pipeline.schedules.table import FIELDS, ActivationCheckpointing, Table
from jaxpar.parallel.pipeline.schedules.ticks import needs
from jaxpar.parallel.pipeline.schedules.verify import replay

SIZES = [(1, 3), (2, 4), (3, 6), (4, 12)]
"""Stages and microbatches."""


def sized(name: str, stages: int, microbatches: int, chunks: int = 2, parts: int = 3, **options: Any) -> Schedule:
    """The named schedule, with chunks and sequence parts where it supports them."""
    many = chunks if NAMES[name].chunks == "any" else None
    sequence_chunks = parts if NAMES[name].sequences else 1
    return jp.pipeline.schedule(name, stages, microbatches, chunks=many, sequence_chunks=sequence_chunks, **options)


# Published figures.


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_bubbles_by_ticks_are_the_formulas(stages: int, microbatches: int) -> None:
    one, wait = (stages, microbatches), stages - 1
    for name in ("gpipe", "1f1b"):
        assert jp.pipeline.schedule(name, *one).bubble == pytest.approx(wait / (microbatches + wait))
    groups = -(-microbatches // stages) * stages
    for chunks in (1, 2, 3):
        for name in ("interleaved", "depth_first", "circular"):
            found = jp.pipeline.schedule(name, stages, groups, chunks=chunks)
            assert found.bubble == pytest.approx(wait / (chunks * groups + wait))
            assert max(found.stash) == (1 if name == "circular" else stages * chunks + wait)
        found = jp.pipeline.schedule("breadth_first", *one, chunks=chunks)
        assert found.bubble == pytest.approx(wait / (chunks * microbatches + wait))
        assert max(found.stash) == (chunks - 1) * microbatches + 2 * stages - 1
        # Sequences in parts are more microbatches; the bubble takes as long as with as many chunks of a model.
        found = jp.pipeline.schedule("seq1f1b", *one, sequence_chunks=chunks)
        assert found.bubble == pytest.approx(wait / (chunks * microbatches + wait))
        assert max(found.stash) == 2 * stages + chunks - 2
    uniform = jp.pipeline.schedule("zb_uniform", *one)
    assert uniform.bubble == pytest.approx(2 * wait / (3 * microbatches + 2 * wait))
    assert simulate(uniform, timing="stages").bubble == pytest.approx(wait / (3 * microbatches + wait))
    assert max(uniform.held) == 2 * stages - 1


@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (6, 11), (8, 15), (4, 32)])
def test_zero_bubbles_stand_still_as_long_as_their_papers_say(stages: int, microbatches: int) -> None:
    """Idle time and held microbatches are those of the papers, with F = B = W = 1.

    ZB-H1: (p - 1) (F + B - W) and p. ZB-H2: (p - 1) (F + B - 2 W) and 2 p - 1. ZB-V: 0 and p.
    """
    most = {"zb_h1": stages, "zb_h2": 2 * stages - 1, "zb_v": 2 * stages}
    waits = {"zb_h1": stages - 1, "zb_h2": 0, "zb_v": 0}
    for name, wait in waits.items():
        if microbatches < 2 * stages - 1 and name != "zb_h1":
            continue  # the published order needs more microbatches
        one = jp.pipeline.schedule(name, stages, microbatches)
        found = simulate(one, timing="stages")
        assert found.idle == pytest.approx(wait)
        assert max(one.held) <= most[name]
        # The last stage (in a v, that of its first half) cannot begin earlier, so no schedule is faster.
        assert found.time == pytest.approx(3 * microbatches + (stages - 1) / one.pieces.chunks)
        # Synchronizing with neighbours costs no time: every tick has one operation.
        assert one.simulate(timing="neighbours") == pytest.approx(found.time)
    textbook = simulate(jp.pipeline.schedule("1f1b", stages, microbatches), timing="stages")
    assert textbook.idle == pytest.approx(3 * (stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (3, 7), (4, 20), (8, 16)])
def test_dualpipe_waits_no_longer_than_published(stages: int, microbatches: int) -> None:
    """Idle time and held pieces stay within the published bounds.

    For PP pieces they are (PP / 2 - 1) (F&B + B - 3 W), where B is a full backward, and PP + 1 held pieces. Here, a
    backward's input gradients go on before its W.
    """
    one = jp.pipeline.schedule("dualpipe_v", stages, microbatches)
    assert max(one.held) == 2 * stages + 1
    assert simulate(one, timing="stages").idle == pytest.approx((stages - 1) / 2)
    for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.5, 0.7), (1.0, 2.0, 1.0)):
        published = (stages - 1) * ((f + b + w) + (b + w) - 3 * w) / 2
        assert simulate(one, {"F": f, "B": b, "W": w}, "stages").idle <= published + 1e-9
    # The purpose of the schedule: a forward of one chunk runs in the same tick as a backward of the other.
    together = [ops for row in one.ticks.rows for ops in row if {"F", "B"} <= {op.kind for op in ops}]
    crossed = [ops for ops in together if len({op.chunk for op in ops}) == 2]
    assert len(crossed) >= stages * 2 * (microbatches - 2 * stages) + stages


def test_sequence_chunks() -> None:
    whole, same = jp.pipeline.schedule("1f1b", 4, 8), jp.pipeline.schedule("seq1f1b", 4, 8, sequence_chunks=1)
    assert (same.orders, same.ticks) == (whole.orders, whole.ticks)
    one = jp.pipeline.schedule("seq1f1b", 2, 2, sequence_chunks=2)
    assert [" ".join(map(str, order)) for order in one.orders] == [
        "F0 F1 F2 F3 B1 B0 B3 B2",
        "F0 F1 B1 F2 B0 F3 B3 B2",
    ]
    assert needs(Op("F", 3), 1, 2, 2) == [("F", 2, 1), ("F", 3, 0)]
    assert needs(Op("B", 2), 0, 2, 2) == [("F", 2, 0), ("B", 3, 0), ("B", 2, 1)]
    # The carry of a microbatch's chunks stays in one slot until the last backward. Its cotangent lives from one
    # backward to the next.
    table = one.table()
    assert (table.sizes["carry"], table.sizes["back"], jp.pipeline.schedule("1f1b", 2, 2).table().sizes["carry"]) == (
        2,
        1,
        0,
    )
    on = table.column("f_on")[:, 1] == 1
    assert table.column("f_carry")[on, 1].tolist() == [0, 0, 1, 1]
    # In complete sequences, the first stage's stash is nearly that of 1F1B divided by the number of chunks.
    assert max(jp.pipeline.schedule("seq1f1b", 4, 8, sequence_chunks=4).stash) / 4 == (2 * 4 - 1 + 3) / 4


@pytest.mark.parametrize("microbatches", [8, 24])
def test_stash_does_not_grow_with_microbatches(microbatches: int) -> None:
    assert jp.pipeline.schedule("1f1b", 4, microbatches).stash == (7, 5, 3, 1)
    textbook = jp.pipeline.schedule("1f1b", 4, microbatches, fused=False)
    assert textbook.stash == (4, 3, 2, 1)
    assert textbook.simulate(timing="stages") == 3 * (microbatches + 3)
    assert all(len(ops) <= 1 for row in textbook.ticks.rows for ops in row)
    assert max(jp.pipeline.schedule("gpipe", 4, microbatches).stash) == microbatches


def test_costs() -> None:
    whole, split = jp.pipeline.schedule("1f1b", 1, 4), jp.pipeline.schedule("zb_uniform", 1, 4)
    # A backward that is not split costs as much as both of its parts.
    assert whole.simulate({"F": 1, "B": 2, "W": 3}) == split.simulate({"F": 1, "B": 2, "W": 3}) == 24
    assert whole.simulate({"F": 1, "B": 2}) == 12
    with raises(ScheduleError, "zb_uniform", "costs"):
        split.simulate({"F": 1, "B": 2})
    with raises(ScheduleError, "1f1b", "F=-1"):
        whole.simulate({"F": -1, "B": 2, "R": 1})
    with raises(ScheduleError, "1f1b", "F=0"):
        whole.simulate({"F": 0, "B": 0})
    with raises(ScheduleError, "1f1b", "'tick'"):
        whole.simulate(timing="tick")  # type: ignore[arg-type]


# Orders and tables.


@examples(40)
@given(orders_of_ones_own())
def test_orders_of_ones_own_make_tables_that_do_what_they_say(given: tuple[list[list[Op]], dict[str, Any]]) -> None:
    orders, sizes = given
    one = jp.pipeline.schedule(orders, **sizes)  # jp.pipeline.schedule replays both tables
    assert one == jp.pipeline.schedule([" ".join(map(str, order)) for order in orders], **sizes)
    assert one.simulate(timing="stages") <= one.simulate(timing="neighbours") + 1e-9 <= one.simulate() + 2e-9
    for activation_checkpointing in get_args(ActivationCheckpointing):
        sizes = one.table(activation_checkpointing).sizes
        assert max(one.stash) <= (
            sizes["act"] if activation_checkpointing == "full" or one.forward_only else sizes["res"]
        )


@examples(40)
@given(
    st.sampled_from(sorted(NAMES)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([None, False, True]),
)
def test_schedules_by_name_make_tables_that_do_what_they_say(
    name: str, stages: int, microbatches: int, chunks: int, fused: bool | None
) -> None:
    if name in ("interleaved", "depth_first", "circular"):
        microbatches *= stages
    elif name in ("breadth_first", "dualpipe_v"):
        microbatches += 2 * stages - 1
    one = sized(
        name, stages, microbatches, chunks, parts=chunks, fused=fused
    )  # jp.pipeline.schedule replays both tables
    if name not in ("gpipe", "breadth_first"):
        assert max(one.stash) <= stages * (one.pieces.chunks + 1) + one.sequence_chunks
    for row in one.ticks.rows:
        for ops in row:
            assert len({op.kind for op in ops}) == len(ops) <= (1 if not one.fused else 3)


@pytest.mark.parametrize("activation_checkpointing", get_args(ActivationCheckpointing))
@pytest.mark.parametrize("name", ["interleaved", "zb_v", "seq1f1b"])
def test_a_replay_finds_every_wrong_number(name: str, activation_checkpointing: ActivationCheckpointing) -> None:
    one = sized(name, 2, 4)
    right = one.table(activation_checkpointing)
    replay(one, right, activation_checkpointing)
    unread = {"b_input"} if activation_checkpointing == "none" else set()
    unread |= set() if one.sequence_chunks > 1 else {"f_carry", "b_carry", "b_back"}
    dice, tried = random.Random(0), 0
    cells = [cell for cell in np.ndindex(right.stages.shape) if FIELDS[cell[2]] not in unread]
    empty = {buffer: size for buffer, size in right.sizes.items()}
    for tick, stage, field in dice.sample(cells, 500):
        name, value = FIELDS[field], int(right.stages[tick, stage, field])
        on = right.stages[tick, stage, FIELDS.index(f"{name[0]}_on")] if name[1] == "_" else True
        named = {"input": "act", "cotangent": "cot", "residuals": "res", "own": "own", "carry": "carry", "back": "back"}
        buffer = named.get(name[2:], name[:3])
        if not on or value == empty.get(buffer, -1):
            continue  # not read, or written to the unused slot
        tried += 1
        stages = right.stages.copy()
        stages[tick, stage, field] = value + 1 if name[1] != "_" or "_on" not in name else 0
        wrong = Table(stages, right.ticks, right.first, right.last, right.sizes, right.channels)
        with pytest.raises(ScheduleError):
            replay(one, wrong, activation_checkpointing)
    assert tried > 100


def test_a_replay_says_what_is_wrong() -> None:
    one = jp.pipeline.schedule("1f1b", 2, 3)
    right = one.table()

    def told(tick: int, stage: int, *names: str, **fields: int) -> None:
        stages = right.stages.copy()
        for name, value in fields.items():
            stages[tick, stage, FIELDS.index(name)] = value
        with raises(ScheduleError, f"tick {tick}", *names):
            replay(one, Table(stages, right.ticks, right.first, right.last, right.sizes, right.channels))

    told(1, 0, "act 2", "piece 0", f_input=2)
    told(1, 0, "stage 0 writes", "act 0", act_feed=0)
    told(0, 0, "act_down", act_down=1)
    told(2, 1, "F of", "stage 1", f_microbatch=0)
    told(1, 1, "f_last", "piece 1", f_last=0)
    told(1, 1, "stage 1 writes", "act 0", b_on=0)
    told(4, 0, "b_first", "piece 0", b_first=0)


# Invalid input.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "zbh1"}, "zb_h1"),
        ({"stages": 0}, "'1f1b': stages"),
        ({"microbatches": 2.0}, "2.0"),
        ({"chunks": 2}, "'1f1b': chunks"),
        ({"name": "zb_v", "chunks": 3}, "schedule 'zb_v'"),
        ({"sequence_chunks": 2}, "sequence_chunks"),
        ({"placement": "v"}, "'v'"),
        ({"name": "interleaved", "microbatches": 6, "chunks": 2}, "6"),
        ({"name": "circular", "microbatches": 3}, "'circular'"),
        ({"name": "breadth_first", "microbatches": 3, "chunks": 2}, "schedule 'breadth_first'"),
        ({"name": "dualpipe_v", "microbatches": 7}, "'dualpipe_v'"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(arguments: dict[str, Any], text: str) -> None:
    with raises(ScheduleError, text):
        jp.pipeline.schedule(**({"name": "1f1b", "stages": 4, "microbatches": 8} | arguments))


@pytest.mark.parametrize(
    ("orders", "options", "name"),
    [
        (["F0 B0"], {}, "2"),
        (["F0 B0", "F0"], {"microbatches": 1}, "does B0"),
        (["F0 F1 B0 B1", "F0 F1 B0"], {}, "B1"),
        (["F0 F1 B0 B1", "F0 F1 B0 F1 B1"], {}, "does F1"),
        (["F0 F1 B0 B1", "F0 B1 F1 B0"], {}, "F1"),
        (
            ["F0 F1 B0 B1", "F0 F2 B0 B1"],
            {},
            "F2"
        ),
        (["F0 F1 B0 B1 W0", "F0 F1 B0 B1"], {}, "W1"),
        (
            ["F0 B0 F1 B1", "F1 B1 F0 B0"],
            {},
            "tick 1"
        ),
        (
            ["F1 F0 B1 B0", "F0 F1 B1 B0"],
            {"microbatches": 1, "sequence_chunks": 2},
            "tick 0"
        ),
        (
            ["F0 F0.1 B0.1 B0", "F0 F0.1 B0 B0.1"],
            {"microbatches": 1, "chunks": 2},
            "B0.1"
        ),
        (["F0 F1 B0 X1", ""], {}, "B3.1"),
        (["", ""], {"placement": "u"}, "interleaved"),
    ],
    ids=str,
)  # fmt: skip
def test_orders_that_cannot_be(orders: list[str], options: dict[str, Any], name: str) -> None:
    with raises(ScheduleError, name):
        jp.pipeline.schedule([order.split() for order in orders], **({"stages": 2, "microbatches": 2} | options))


# Output.


def test_as_text() -> None:
    one = jp.pipeline.schedule("zb_v", 2, 3)
    assert str(one) == (
        "zb_v: 2 stages of 2 chunks in a v, 3 microbatches\nticks   19\nbubble  41.9% of 15.5 by ticks, 5.3% of 9.5 "
        "by neighbours, 5.3% of 9.5 by stages (0 between a stage's first and last operation)\nstash   4, 4; until W "
        "4, 4\nbuffers act 5, cot 2, own 3 with activation checkpointing 'full'\nbuffers act 2, cot 2, res 4, own 3 "
        "with activation checkpointing 'none'"
    )
    assert jp.pipeline.schedule("1f1b", 2, 3).show(width=32) == (
        "tick     0   1      2      3\n"
        "stage 0  F0  F1     F2 B0  B1\n"
        "stage 1  ·   F0 B0  F1 B1  F2 B2\n"
        "\n"
        "tick     4\n"
        "stage 0  B2\n"
        "stage 1  ·"
    )
    assert "buffers act 1\n" not in str(jp.pipeline.schedule("circular", 2, 2))
    assert len(repr(one)) < 200, "the orders are for str and show"


@pytest.mark.parametrize("timing", get_args(Timing))
def test_drawn(timing: Timing, tmp_path: Path) -> None:
    one = jp.pipeline.schedule("dualpipe_v", 2, 4)
    figure = one.draw(
        tmp_path / "one.svg" if timing == "ticks" else None, costs={"F": 1, "B": 2, "W": 1}, timing=timing
    )
    ax = figure.axes[0]
    # One collection of bars per stage, kind and chunk, with the costs as lengths.
    assert len(ax.collections) == 2 * 3 * 2
    bars = [path.get_extents() for bars in ax.collections for path in bars.get_paths()]
    assert len(bars) == 2 * 3 * 2 * 4
    assert sum(bar.width for bar in bars) == pytest.approx(2 * 4 * 4)
    assert max(bar.x1 for bar in bars) == pytest.approx(one.simulate({"F": 1, "B": 2, "W": 1}, timing))
    assert len({tuple(bars.get_facecolor()[0]) for bars in ax.collections}) == 3 * 2
    assert f"by {timing}" in ax.get_title(loc="left")
    assert timing != "ticks" or (tmp_path / "one.svg").stat().st_size > 1000


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["schedule", "1f1b", *sizes, "--costs", "F=1,B=1", "--draw", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "bubble  20.0% of 10 by ticks" in printed
    assert "stage 0  F0  F1     F2 B0  F3 B1  B2     B3\n" in printed
    assert (tmp_path / "a.png").exists()
    assert main(["schedule", "1f1b", "interleaved", "zb_v", *sizes, "--virtual-stages", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["ticks", "by", "ticks", "bubble"],
        ["1f1b", "6", "15", "20.0%"],
        ["interleaved", "18", "13", "7.7%"],
        ["zb_v", "25", "21.5", "44.2%"],
    ]
    for arguments, text in (
        ([*sizes], f"no schedule is given. Schedules: {', '.join(NAMES)}."),
        (["1f1b", *sizes, "--costs", "F=1,B"], "costs 'F=1,B': 'B' is not a cost. Remedy: write costs as in F=1,B=2."),
        (
            ["1f1b", *sizes, "--costs", "F=nan"],
            "costs 'F=nan': 'F=nan' is not a cost. Remedy: write costs as in F=1,B=2.",
        ),
    ):  # fmt: skip
        assert main(["schedule", *arguments]) == 2
        assert capsys.readouterr().err == f"ScheduleError: {text}\n"


def test_the_command_imports_no_jax() -> None:
    code = (
        "import sys, jaxpar.app.cli\n"
        "jaxpar.app.cli.main('schedule 1f1b --stages 2 --microbatches 2'.split())\n"
        "assert not {'jax', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
