"""Gradient buckets of a chunk: every gradient is summed and scattered once, and a sum begins only in a free slot."""

from __future__ import annotations

import re

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.executor.grad_buckets import buckets_of

# name, stages, microbatches, chunks, slots of full sums, scatters, and how many of these are beside a backward
CASES = [
    ("interleaved", 4, 8, 4, 2, 8),
    ("interleaved", 4, 4, 8, 2, 8),
    ("breadth_first", 4, 6, 3, 2, 3),
    ("gpipe", 4, 5, 1, 1, 1),
    ("1f1b", 4, 8, 1, 1, 1),
    ("zb_uniform", 4, 6, 1, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_scattered_once(case: tuple[str, int, int, int, int, int]) -> None:
    name, stages, microbatches, chunks, slots, scatters = case
    schedule = jp.pipeline.schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    table, kind = schedule.table("none"), "w" if schedule.split else "b"
    buckets = buckets_of(schedule, table)
    on, chunk, microbatch = (table.column(f"{kind}_{what}") for what in ("on", "chunk", "microbatch"))
    for stage in range(stages):
        whole: dict[int, list[tuple[int, int]]] = {}
        scattered: list[tuple[int, int]] = []
        for tick in range(len(on)):
            slot, begins, scattered_slot, to = map(int, buckets.rows[tick, stage])
            at_end, beside = map(int, buckets.scatters[tick])
            assert at_end + beside <= 1
            if beside:
                assert on[tick].any(), f"tick {tick} has no backward beside which a bucket can be scattered"
                assert {number for number, _ in whole[scattered_slot]} == {to}
                scattered += whole.pop(scattered_slot)
                assert slot != scattered_slot or not on[tick, stage], f"tick {tick} adds to the bucket that it scatters"
            if on[tick, stage]:
                if begins:
                    assert not whole.get(slot), f"tick {tick} of stage {stage} begins in a slot that was not scattered"
                    whole[slot] = []
                whole[slot].append((int(chunk[tick, stage]), int(microbatch[tick, stage])))
            if at_end:
                assert {number for number, _ in whole[scattered_slot]} == {to}
                scattered += whole.pop(scattered_slot)
        assert not any(whole.values())
        assert sorted(scattered) == [(c, m) for c in range(chunks) for m in range(microbatches)]
    assert (buckets.slots, int(buckets.scatters.sum())) == (slots, scatters)
    assert np.all(buckets.rows[:, :, (0, 2)] < buckets.slots)


def test_stages_that_change_chunks_at_odds_are_named() -> None:
    schedule = jp.pipeline.schedule("zb_v", stages=2, microbatches=4, chunks=2)
    text = (
        "pipeline: grad_reduction is 'per_chunk', for which all stages must scatter a chunk's gradients together, but "
        "in the schedule 'zb_v' with 4 microbatches the stages change chunks 5, 7 times. Remedy: set "
        "grad_reduction='per_step' or 'per_microbatch', or use the schedule 'interleaved'."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        buckets_of(schedule, schedule.table("none"))
