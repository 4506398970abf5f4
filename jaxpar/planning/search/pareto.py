"""The plans that no other beats in both time and memory, and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpar.planning.search.search import Candidate, Search
from jaxpar.utils.plotting import new_figure

MOST_NAMED = 6


def front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the plans that no other beats in both the time of a sequence and memory, by rising memory."""
    edge: list[Candidate] = []
    possible = (c for c in candidates if not c.problem)
    for one in sorted(possible, key=lambda c: (c.peak_bytes, seconds(c))):
        if not edge or seconds(one) < seconds(edge[-1]):
            edge.append(one)
    return edge


def seconds(candidate: Candidate) -> float:
    """Returns the seconds of a step, divided by its sequences where the batch is a choice."""
    return candidate.step_seconds / (candidate.plan.batch or 1)


def draw_front(search: Search, best: Candidate) -> Any:
    """Returns the picture: time against memory. At most ``MOST_NAMED`` plans of the front are numbered and named below.

    Args:
      search: the plans.
      best: sets the range of the time: up to three times that of this plan.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    figure = new_figure("PlanReport.draw", figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    groups = (
        ([c for c in search.candidates if c.waiting], "estimated", "0.75", ".", 3),
        (search.ranked, "compiled", "tab:blue", "o", 6),
    )
    for plans, label, color, marker, size in groups:
        points = [_point(c) for c in plans]
        axes.plot(*zip(*points, strict=True) if points else ([], []), marker, color=color, ms=size, label=label)
    lowest = seconds(best) * 1e3
    edge = [c for c in front(search.candidates) if _point(c)[1] <= 3 * lowest]
    axes.step(*zip(*map(_point, edge), strict=True), "k-", lw=0.8, where="post", label="nothing is better in both")
    named = _spread(edge)
    for number, candidate in enumerate(named, 1):
        bubble = {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "0.4", "lw": 0.6}
        axes.annotate(
            str(number), _point(candidate), xytext=(7, 9), textcoords="offset points", fontsize=7, bbox=bubble
        )
    unit = "ms a sequence" if best.plan.batch else "ms a step"
    axes.set(xlabel="GiB at the peak", ylabel=unit, title=str(search.topology), ylim=(0.8 * lowest, 3 * lowest))
    axes.legend()
    names = [f"{i}  {c.plan.describe()}{'' if c.compiled else ' (estimate)'}" for i, c in enumerate(named, 1)]
    figure.supxlabel("\n".join(names), fontsize=8, x=0.02, ha="left")
    return figure


def _point(candidate: Candidate) -> tuple[float, float]:
    return candidate.peak_bytes / 2**30, seconds(candidate) * 1e3


def _spread(edge: Sequence[Candidate]) -> list[Candidate]:
    """The least memory, the least time, and plans between them that are far enough apart for a number each."""
    if len(edge) < 2:
        return list(edge)
    first, last = edge[0], edge[-1]

    def apart(one: Candidate, other: Candidate) -> bool:
        # The front is 2 long in units of its own width and height.
        along = abs(one.peak_bytes - other.peak_bytes) / (last.peak_bytes - first.peak_bytes)
        return along + abs(seconds(one) - seconds(other)) / (seconds(first) - seconds(last)) >= 2 / (MOST_NAMED - 1)

    chosen = [first]
    for one in edge[1:-1]:
        if apart(one, chosen[-1]) and apart(one, last):
            chosen.append(one)
    return [*chosen, last]
