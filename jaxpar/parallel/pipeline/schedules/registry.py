"""``schedule``: builds a pipeline schedule from a name or from custom orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.errors import ScheduleError, did_you_mean
from jaxpar.parallel.pipeline.schedules import orders
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS
from jaxpar.parallel.pipeline.schedules.orders import Op, Orders, Pieces, Placement, parse
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.zero_bubble import dualpipe_v, handcrafted, zb_v
from jaxpar.utils.checks import is_count

_MOST = 2**20
"""The largest number of operations of one kind; building such a schedule takes minutes and gigabytes."""


def schedule(
    name: str | Sequence[Sequence[Op | str]],
    stages: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    sequence_chunks: int = 1,
    placement: Placement | None = None,
    fused: bool | None = None,
) -> Schedule:
    """Returns a validated schedule, built from a name (docs/reference/schedules.md lists them) or from custom orders.

    Args:
      name: one of ``NAMES``, or custom orders: for each stage its operations in order, as ``Op``, as text such as
        ``"F0"``, ``"B3.1"`` (microbatch 3, chunk 1) and ``"W2"``, or as one text, ``"F0 F1 B0 B1"``.
      stages: the number of devices along ``pipeline``.
      microbatches: the number of microbatches in a batch.
      chunks: the number of pieces of the model on each stage, where the name allows several. The default is 1, or 2 for
        a ``v``.
      sequence_chunks: the number of chunks in each sequence, for ``seq1f1b`` and custom orders. Chunk q of microbatch m
        counts as microbatch ``m * sequence_chunks + q``.
      placement: for custom orders, how pieces are assigned to stages: ``interleaved`` (default) or ``v``.
      fused: whether a tick may hold a forward, a backward and a W of one stage, which suits one program for all stages,
        or only one operation. The default depends on the name; custom orders are fused.

    Returns:
      The schedule, after :meth:`Schedule.validate`.

    Raises:
      ScheduleError: the name is unknown, a size does not fit it, or custom orders omit work, repeat it or deadlock.

    >>> one = schedule("1f1b", stages=4, microbatches=8)
    >>> round(one.bubble, 3), one.stash
    (0.273, (7, 5, 3, 1))
    >>> [str(op) for op in one.ticks.rows[3][3]]
    ['F0', 'B0']
    >>> schedule(["F0 B0 F1 B1", "F0 B0 F1 B1"], stages=2, microbatches=2).stash
    (1, 1)
    """
    named = NAMES[name] if isinstance(name, str) and name in NAMES else None
    if isinstance(name, str) and name in ASYNCHRONOUS:
        raise ScheduleError(
            f"schedule {name!r} is asynchronous: its microbatches begin in one step and end in the next, so it is not "
            f"a schedule of one step. Remedy: use jp.pipeline.pipedream_train_step(..., "
            f"pipeline=jp.pipeline.Asynchronous({name!r}, stages={stages}, microbatches={microbatches}))."
        )
    if named is None and isinstance(name, str):
        raise ScheduleError(f"unknown schedule {name!r}.{did_you_mean(name, NAMES)} Schedules: {', '.join(NAMES)}.")
    label = name if isinstance(name, str) else "own"
    chunks = (2 if named is not None and named.chunks == "two" else 1) if chunks is None else chunks
    sizes = Sizes(label, stages, microbatches, chunks, sequence_chunks, fused)
    for what, value in zip(Sizes._fields[1:5], sizes[1:5], strict=True):
        if not is_count(value):
            raise ScheduleError(f"schedule {label!r}: {what} must be a positive integer, got {value!r}.")
    operations = math.prod(sizes[1:5])
    if operations > _MOST:
        raise ScheduleError(
            f"schedule {label!r}: {stages:,} stages, {microbatches:,} microbatches, {chunks:,} chunks and "
            f"{sequence_chunks:,} sequence chunks make {operations:,} operations of a kind, and the limit is "
            f"{_MOST:,}. Remedy: fewer microbatches."
        )
    if named is None:
        return _custom(name, sizes, placement or "interleaved").validate()
    _check_sizes(named, sizes, placement)
    return named.build(sizes).validate()


class Sizes(NamedTuple):
    """The arguments from which the orders of a schedule are built."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    sequence_chunks: int
    fused: bool | None


@dataclass(frozen=True)
class Named:
    """A named schedule.

    Attributes:
      orders: builds the orders.
      chunks: the number of chunks per stage that it takes.
      sequences: it takes sequence chunks.
      placement, fused, split, forward_only: those of the schedule; the caller's ``fused``, if set, overrides this one.
    """

    orders: Callable[[Sizes], Orders]
    chunks: Literal["one", "two", "any"] = "one"
    sequences: bool = False
    placement: Placement = "interleaved"
    fused: bool = True
    split: bool = False
    forward_only: bool = False

    def build(self, sizes: Sizes) -> Schedule:
        """Builds the schedule."""
        pieces, units = Pieces(sizes.stages, sizes.chunks, self.placement), sizes.microbatches * sizes.sequence_chunks
        fused = self.fused if sizes.fused is None else sizes.fused
        kinds = {"split": self.split, "forward_only": self.forward_only}
        chunks = sizes.sequence_chunks
        return Schedule(sizes.name, pieces, units, self.orders(sizes), fused, sequence_chunks=chunks, **kinds)


def _check_sizes(named: Named, sizes: Sizes, placement: Placement | None) -> None:
    """Raises ``ScheduleError`` for sizes that a named schedule does not take."""
    start = f"schedule {sizes.name!r}"
    if named.chunks == "one" and sizes.chunks != 1:
        raise ScheduleError(
            f"{start}: chunks is {sizes.chunks}, but in this schedule each stage has one piece of the model. Remedy: "
            "leave chunks out, or use 'interleaved'."
        )
    if named.chunks == "two" and sizes.chunks != 2:
        raise ScheduleError(
            f"{start}: chunks is {sizes.chunks}, but a v has two chunks per stage, one down the stages and one back "
            "up. Remedy: leave chunks out, or use 'interleaved'."
        )
    if sizes.sequence_chunks != 1 and not named.sequences:
        raise ScheduleError(
            f"{start}: sequence_chunks is {sizes.sequence_chunks}, but this schedule does not split sequences. "
            "Remedy: leave sequence_chunks out, or use 'seq1f1b'."
        )
    if placement is not None:
        raise ScheduleError(
            f"{start}: placement is {placement!r}, but a named schedule defines its own placement. Remedy: leave "
            "placement out."
        )


def _custom(given: Sequence[Sequence[Op | str]], sizes: Sizes, placement: Placement) -> Schedule:
    if placement not in get_args(Placement):
        raise ScheduleError(f"schedule 'own': placement must be 'interleaved' or 'v', got {placement!r}.")
    listed = [order.split() if isinstance(order, str) else order for order in given]
    read = tuple(tuple(_op(op, stage, at) for at, op in enumerate(order)) for stage, order in enumerate(listed))
    kinds = {op.kind for order in read for op in order}
    custom = Named(lambda _: read, placement=placement, split="W" in kinds, forward_only=kinds <= {"F"})
    return custom.build(sizes)


def _op(op: Op | str, stage: int, at: int) -> Op:
    found = op if isinstance(op, Op) else parse(op) if isinstance(op, str) else None
    if found is None:
        raise ScheduleError(
            f"schedule 'own': operation {at} of stage {stage} must be a kind (F, B, W), a microbatch and, if it is "
            f"not 0, a chunk, such as 'F0' or 'B3.1', got {op!r}."
        )
    return found


def _1f1b(sizes: Sizes) -> Orders:
    each = (sizes.stages, sizes.microbatches, sizes.sequence_chunks)
    return orders.one_forward_one_backward(*each, fused=sizes.fused is not False)


def _breadth_first(sizes: Sizes) -> Orders:
    if sizes.microbatches < sizes.stages and sizes.chunks > 1:
        raise ScheduleError(
            f"schedule 'breadth_first': {sizes.microbatches} microbatches are fewer than {sizes.stages} stages, so "
            f"each of {sizes.chunks} chunks would begin late. Remedy: use {sizes.stages} or more."
        )
    return orders.looped(sizes.stages, sizes.microbatches, sizes.chunks, sizes.microbatches)


def _interleaved(sizes: Sizes) -> Orders:
    """Builds depth-first orders: each chunk in turn, for groups of as many microbatches as there are stages."""
    if sizes.microbatches % sizes.stages:
        up = -(-sizes.microbatches // sizes.stages) * sizes.stages
        raise ScheduleError(
            f"schedule {sizes.name!r}: {sizes.microbatches} microbatches cannot be split into groups of "
            f"{sizes.stages}, one microbatch per stage. Remedy: use a multiple of {sizes.stages}, such as {up}, or "
            f"'breadth_first', which accepts any number from {sizes.stages}."
        )
    return orders.looped(sizes.stages, sizes.microbatches, sizes.chunks, sizes.stages)


def _circular(sizes: Sizes) -> Orders:
    return tuple(tuple(op for op in order if op.kind == "F") for order in _interleaved(sizes))


def _zb_h(sizes: Sizes, most: int) -> Orders:
    return handcrafted(sizes.stages, sizes.microbatches, most)


def _dualpipe_v(sizes: Sizes) -> Orders:
    least = 2 * sizes.stages
    if sizes.microbatches < least:
        raise ScheduleError(
            f"schedule 'dualpipe_v': {sizes.microbatches} microbatches are fewer than {least}, two for each of "
            f"{sizes.stages} stages, which are required to fill both directions. Remedy: use {least} or more, or "
            "'zb_v', which accepts any number."
        )
    return dualpipe_v(sizes.stages, sizes.microbatches)


NAMES: dict[str, Named] = {
    "gpipe": Named(lambda sizes: orders.gpipe(sizes.stages, sizes.microbatches), fused=False),
    "1f1b": Named(_1f1b),
    "seq1f1b": Named(_1f1b, sequences=True),
    "interleaved": Named(_interleaved, "any"),
    # This is Lamy-Poirier's name for Narayanan's interleaving: each microbatch goes as deep as it can before the next
    # group begins.
    "depth_first": Named(_interleaved, "any"),
    "breadth_first": Named(_breadth_first, "any"),
    "circular": Named(_circular, "any", forward_only=True),
    "zb_uniform": Named(
        lambda sizes: orders.deferred(_1f1b(sizes._replace(fused=True)), range(sizes.stages)), split=True
    ),
    "zb_h1": Named(lambda sizes: _zb_h(sizes, sizes.stages), fused=False, split=True),
    "zb_h2": Named(lambda sizes: _zb_h(sizes, 2 * sizes.stages - 1), fused=False, split=True),
    "zb_v": Named(lambda sizes: zb_v(sizes.stages, sizes.microbatches), "two", placement="v", fused=False, split=True),
    "dualpipe_v": Named(_dualpipe_v, "two", placement="v", split=True),
}
"""The named schedules."""
