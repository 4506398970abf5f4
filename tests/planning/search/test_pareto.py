"""The plans that nothing beats in both time and memory, and their picture."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxpar.planning.search.pareto import MOST_NAMED, draw_front, front
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import Candidate, Search
from jaxpar.planning.search.step_cost import StepCost
from jaxpar.sharding.hardware.topology import Topology


def candidate(step: float, gib: float, batch: int = 0) -> Candidate:
    cost = StepCost(step, 0.0, (), 0.0, 0.0, step, {"parameters": gib * 2**30})
    return Candidate(Plan(data=4, batch=batch), cost)


def test_the_front_has_no_plan_that_another_beats_in_both() -> None:
    good = [candidate(3.0, 1.0), candidate(2.0, 2.0), candidate(1.0, 4.0)]
    assert front([candidate(3.5, 1.5), *reversed(good), candidate(1.0, 5.0)]) == good


def test_batches_are_compared_by_the_time_of_a_sequence() -> None:
    small, large = candidate(1.0, 1.0, batch=8), candidate(1.5, 2.0, batch=16)
    assert front([large, small]) == [small, large]
    assert front([candidate(2.5, 2.0, batch=16), small]) == [small]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_picture_names_few_plans_and_no_two_close_together(count: int) -> None:
    pytest.importorskip("matplotlib")
    edge = [candidate(2.0 - i / count, 1.0 + i * 8 / count) for i in range(count)]
    found = Search(Topology.parse("v5e:2x2"), "time", edge, 0, Counter())
    figure = draw_front(found, edge[-1])
    named = figure.axes[0].texts
    assert min(count, 3) <= len(named) <= MOST_NAMED
    assert [text.get_text() for text in named] == [str(i + 1) for i in range(len(named))]
    assert len(figure.get_supxlabel().splitlines()) == len(named)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in named]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
