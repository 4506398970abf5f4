"""Tables of pipelines that stay filled between calls, executed with numbers instead of arrays."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpar.parallel.pipeline.schedules.async_window import AsyncSchedule
from jaxpar.parallel.pipeline.schedules.table import FIELDS


@pytest.mark.parametrize("activation_checkpointing", ("full", "none"))
@pytest.mark.parametrize(("stages", "batch"), [(1, 1), (1, 3), (2, 2), (3, 4), (3, 7), (4, 6), (5, 9)])
def test_a_window_reads_what_was_written(activation_checkpointing: Any, stages: int, batch: int) -> None:
    """Calls and a flush, executed with the numbers of microbatches instead of arrays."""
    full = AsyncSchedule("pipedream_2bw", stages, batch, batch)
    size = full.table(activation_checkpointing).sizes
    turn = lambda slot, of, call: (slot + (call - 1) * batch) % size[of] if slot < size[of] else slot
    act, res = ([[None] * (size[of] + 1) for _ in range(stages)] for of in ("act", "res"))
    sent, lost, out, back = [None] * stages, [], [], [[] for _ in range(stages)]
    for call in (0, 1, 2, 3):
        table = (full if call < 3 else full.flush()).table(activation_checkpointing)
        number = lambda position, call=call: position + (call - 1) * batch
        column = {name: table.column(name).tolist() for name in FIELDS}
        if table.first[1] < full.microbatches:
            act[0][turn(table.first[0][0], "act", call)] = number(table.first[1])
        for tick, (feed, head, _) in enumerate(table.ticks.tolist()):
            at = lambda name, stage, tick=tick, column=column: column[name][tick][stage]
            gave = [act[s][turn(at("f_input", s), "act", call)] for s in range(stages)]
            for s in range(stages):
                wanted = number(at("f_microbatch", s))
                assert gave[s] in (wanted, None) and (gave[s] == wanted or wanted < 0 or call == 3)
                res[s][turn(at("f_residuals", s), "res", call)] = wanted
            have = call < 3 or head < batch
            lost += [number(head)] if have and number(head) >= 0 else []
            assert number(head) == number(at("f_microbatch", stages - 1))
            came = [sent[s + 1] if s + 1 < stages else number(head) for s in range(stages)]
            for s in range(stages):
                b = number(at("b_microbatch", s))
                kept = act if activation_checkpointing == "full" else res
                of, field = ("act", "b_input") if activation_checkpointing == "full" else ("res", "b_residuals")
                assert at("b_chunk", s) == at("b_microbatch", s) // batch
                if b >= 0 and (call < 3 or at("b_chunk", s) == 0):
                    assert kept[s][turn(at(field, s), of, call)] == b == came[s]
                    back[s].append(b)
                sent[s] = b
            out.append(sent[0])
            for s in range(1, stages):
                act[s][turn(at("act_down", s), "act", call)] = gave[s - 1]
            if feed < full.microbatches:
                act[0][turn(at("act_feed", 0), "act", call)] = number(feed)
    every = list(range(3 * batch))
    assert back == [every] * stages and lost == every
    assert [m for m in out if m >= 0][: len(every)] == every
