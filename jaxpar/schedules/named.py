"""``schedule``: a pipeline's schedule by name."""

from __future__ import annotations

from collections.abc import Callable

from jaxpar.errors import ScheduleError, did_you_mean
from jaxpar.schedules.orders import Op, Orders, Pieces, deferred, gpipe, looped
from jaxpar.schedules.schedule import Schedule


def schedule(name: str, stages: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """A schedule by name, checked.

    Args:
      name: one of ``NAMES``.
      stages: devices along ``pipeline``.
      microbatches: pieces of a batch.
      chunks: pieces of the model on each stage, where a name takes more than one.

    Raises:
      ScheduleError: no such name, or sizes that do not fit it.

    >>> one = schedule("1f1b", stages=4, microbatches=8)
    >>> round(one.bubble, 3), one.stash
    (0.273, (7, 5, 3, 1))
    >>> [str(op) for op in one.ticks.rows[3][3]]
    ['F0', 'B0']
    """
    if name not in NAMES:
        raise ScheduleError(f"unknown schedule {name!r}.{did_you_mean(name, NAMES)} Schedules: {', '.join(NAMES)}.")
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"schedule {name!r}: {what} is {value!r}, but a number, 1 or more, is wanted.")
    return NAMES[name](stages, microbatches, chunks).validate()


def _one_chunk(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ScheduleError(
            f"schedule {name!r}: chunks is {chunks}, but here each stage has one piece of the model. Remedy: leave chunks out, or 'interleaved'."
        )


def _gpipe(stages: int, microbatches: int, chunks: int) -> Schedule:
    _one_chunk("gpipe", chunks)
    return Schedule("gpipe", Pieces(stages), microbatches, gpipe(stages, microbatches), fused=False)


def _1f1b(stages: int, microbatches: int, chunks: int) -> Schedule:
    _one_chunk("1f1b", chunks)
    return Schedule("1f1b", Pieces(stages), microbatches, looped(stages, microbatches, 1, stages))


def _interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    _in_groups("interleaved", stages, microbatches)
    return Schedule("interleaved", Pieces(stages, chunks), microbatches, looped(stages, microbatches, chunks, stages))


def _breadth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    if microbatches < stages:
        raise ScheduleError(
            f"schedule 'breadth_first': {microbatches} microbatches are fewer than {stages} stages, which would wait for each other. Remedy: "
            f"{stages} or more."
        )
    orders = looped(stages, microbatches, chunks, microbatches)
    return Schedule("breadth_first", Pieces(stages, chunks), microbatches, orders)


def _in_groups(name: str, stages: int, microbatches: int) -> None:
    if microbatches % stages:
        up = -(-microbatches // stages) * stages
        raise ScheduleError(
            f"schedule {name!r}: {microbatches} microbatches do not go in groups of {stages}, one for each stage. Remedy: a multiple of "
            f"{stages}, as {up}, or 'breadth_first', which takes any number from {stages} on."
        )


def _circular(stages: int, microbatches: int, chunks: int) -> Schedule:
    _in_groups("circular", stages, microbatches)
    orders = looped(stages, microbatches, chunks, stages)
    forward: Orders = tuple(tuple(Op(*op) for op in order if op.kind == "F") for order in orders)
    return Schedule("circular", Pieces(stages, chunks), microbatches, forward, forward_only=True)


def _zb_uniform(stages: int, microbatches: int, chunks: int) -> Schedule:
    _one_chunk("zb_uniform", chunks)
    orders = deferred(looped(stages, microbatches, 1, stages), range(stages))
    return Schedule("zb_uniform", Pieces(stages), microbatches, orders, split=True)


NAMES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "breadth_first": _breadth_first,
    "circular": _circular,
    "zb_uniform": _zb_uniform,
}
"""Name → the schedule of (stages, microbatches, chunks)."""
