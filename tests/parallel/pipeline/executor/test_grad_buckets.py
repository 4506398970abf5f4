"""Gradient buckets of a chunk: every gradient is summed and scattered once, and a bucket moves only to a free slot."""

from __future__ import annotations

import numpy as np
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.executor.grad_buckets import buckets_of

# name, stages, microbatches, chunks, slots of complete buckets, scatters, and how many of these are beside a backward
CASES = [
    ("interleaved", 4, 8, 4, 1, 8),
    ("interleaved", 4, 4, 8, 1, 8),
    ("breadth_first", 4, 6, 3, 1, 3),
    ("gpipe", 4, 5, 1, 0, 1),
    ("1f1b", 4, 8, 1, 0, 1),
    ("zb_uniform", 4, 6, 1, 0, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_scattered_once(case: tuple[str, int, int, int, int, int]) -> None:
    name, stages, microbatches, chunks, slots, scatters = case
    schedule = jp.pipeline.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    table, kind = schedule.table("none"), "w" if schedule.split else "b"
    buckets = buckets_of(schedule, table)
    on, chunk, microbatch = (table.column(f"{kind}_{what}") for what in ("on", "chunk", "microbatch"))
    for stage in range(stages):
        filled: list[tuple[int, int]] = []
        complete: dict[int, list[tuple[int, int]]] = {}
        scattered: list[tuple[int, int]] = []
        for tick in range(len(on)):
            begins, ends, completed, scattered_slot, to = map(int, buckets.rows[tick, stage])
            at_end, beside = map(int, buckets.scatters[tick])
            assert at_end + beside <= 1
            if beside:
                assert on[tick].any(), f"tick {tick} has no backward beside which a bucket can be scattered"
                assert {number for number, _ in complete[scattered_slot]} == {to}
                scattered += complete.pop(scattered_slot)
            if on[tick, stage]:
                assert bool(begins) != bool(filled), (
                    f"tick {tick} of stage {stage} begins in a bucket that is not empty"
                )
                filled.append((int(chunk[tick, stage]), int(microbatch[tick, stage])))
            if ends and buckets.completed:
                assert completed not in complete, f"tick {tick} of stage {stage} moves a bucket to a slot in use"
                complete[completed], filled = filled, []
            if at_end:
                found = complete.pop(scattered_slot) if buckets.completed else filled
                filled = filled if buckets.completed else []
                assert {number for number, _ in found} == {to}
                scattered += found
        assert not filled and not complete
        assert sorted(scattered) == [(c, m) for c in range(chunks) for m in range(microbatches)]
    assert (buckets.completed, int(buckets.scatters.sum())) == (slots, scatters)
    assert np.all(buckets.rows[:, :, (2, 3)] < max(buckets.completed, 1))


def test_stages_that_change_chunks_at_odds_are_named() -> None:
    schedule = jp.pipeline.schedule("zb_v", stages=2, microbatches=4, chunks=2)
    with raises(ConfigError, "pipeline: grad_reduction", "zb_v"):
        buckets_of(schedule, schedule.table("none"))
