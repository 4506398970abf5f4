"""The ticks that gather weights beside their forwards: which schedules have them, and that no weight comes too late."""

from __future__ import annotations

import pytest

import jaxpar as jp
from jaxpar.parallel.pipeline.executor.first_ticks import first_ticks

# name, stages, microbatches, chunks, and how many ticks gather weights
CASES = [
    ("interleaved", 4, 8, 4, 3),
    ("interleaved", 4, 4, 8, 7),
    ("interleaved", 1, 2, 3, 2),
    ("breadth_first", 2, 3, 2, 1),
    ("breadth_first", 4, 4, 3, 2),
    ("zb_v", 4, 6, None, 1),
    ("dualpipe_v", 2, 4, None, 1),
    ("1f1b", 4, 8, 1, 0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chunk_is_gathered_before_its_first_forward(case: tuple[str, int, int, int | None, int]) -> None:
    name, stages, microbatches, chunks, ticks = case
    schedule = jp.pipeline.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    table = schedule.table("none")
    on, chunk = (table.column(f"f_{what}") for what in ("on", "chunk"))
    assert first_ticks(schedule, table) == ticks
    for tick in range(len(on) if ticks else 0):  # tick t gathers chunk t + 1
        assert all(number <= tick for number in chunk[tick][on[tick] == 1])
    assert not table.column("b_on")[:ticks].any() and on[:ticks].any(axis=1).all()
