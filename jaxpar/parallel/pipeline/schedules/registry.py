"""``schedule``: a pipeline's schedule by name, or from orders of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.errors import ScheduleError, did_you_mean
from jaxpar.parallel.pipeline.schedules import zero_bubble
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS
from jaxpar.parallel.pipeline.schedules.orders import (
    Op,
    Orders,
    Pieces,
    Placement,
    deferred,
    gpipe,
    looped,
    one_forward_one_backward,
    parse,
)
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.utils.checks import is_count


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
    """A schedule by name or by its orders, checked; docs/pipeline.md tells them apart.

    Args:
      name: one of ``NAMES``; or for each stage its operations in their order, as ``Op`` or as text, ``"F0"``, ``"B3.1"`` (microbatch 3,
        chunk 1), ``"W2"``; or all of a stage in one text, ``"F0 F1 B0 B1"``.
      stages: devices along ``pipeline``.
      microbatches: pieces of a batch.
      chunks: pieces of the model on each stage, where a name takes several; 1 by default, 2 for a ``v``.
      sequence_chunks: for ``seq1f1b`` and own orders: parts of each sequence. Chunk q of microbatch m counts as microbatch
        ``m * sequence_chunks + q``.
      placement: for own orders, which pieces lie where: ``loop`` (the default) or ``v``.
      fused: whether a tick may hold a forward, a backward and a W of a stage, which one program for all stages wants; else it holds one
        operation. By default as the name says; own orders are fused.

    Raises:
      ScheduleError: no such name, sizes that do not fit it, or orders that leave out or double work, or wait for each other.

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
            f"schedule {name!r} is asynchronous: what it begins in a step it ends in the next, so it is no schedule of one. Remedy: "
            f"jp.PipedreamStep(..., pipeline=jp.Asynchronous({name!r}, stages={stages}, microbatches={microbatches}))."
        )
    if named is None and isinstance(name, str):
        raise ScheduleError(f"unknown schedule {name!r}.{did_you_mean(name, NAMES)} Schedules: {', '.join(NAMES)}.")
    told = name if isinstance(name, str) else "own"
    chunks = (2 if named is not None and named.chunks == "two" else 1) if chunks is None else chunks
    given = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "sequence_chunks": sequence_chunks}
    for what, value in given.items():
        if not is_count(value):
            raise ScheduleError(f"schedule {told!r}: {what} is {value!r}, but a number, 1 or more, is wanted.")
    sizes = Sizes(told, stages, microbatches, chunks, sequence_chunks, fused)
    if named is None:
        return _own(name, sizes, placement or "loop").validate()
    _fits(named, sizes, placement)
    return named.make(sizes).validate()


class Sizes(NamedTuple):
    """What a schedule is made for."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    sequence_chunks: int
    fused: bool | None

    def schedule(
        self, orders: Orders, *, placement: Placement = "loop", fused: bool = True, **options: bool
    ) -> Schedule:
        """A schedule of these sizes; ``fused`` unless the caller says otherwise."""
        pieces = Pieces(self.stages, self.chunks, placement)
        fused, units = fused if self.fused is None else self.fused, self.microbatches * self.sequence_chunks
        return Schedule(self.name, pieces, units, orders, fused, sequence_chunks=self.sequence_chunks, **options)


@dataclass(frozen=True)
class Named:
    """How a schedule is made, how many chunks of the model it takes on a stage, and whether it takes chunks of sequences."""

    make: Callable[[Sizes], Schedule]
    chunks: Literal["one", "two", "any"] = "one"
    sequences: bool = False


def _fits(named: Named, sizes: Sizes, placement: Placement | None) -> None:
    """Raise what a name cannot have."""
    start = f"schedule {sizes.name!r}"
    if named.chunks == "one" and sizes.chunks != 1:
        raise ScheduleError(
            f"{start}: chunks is {sizes.chunks}, but here each stage has one piece of the model. Remedy: leave chunks out, or 'interleaved'."
        )
    if named.chunks == "two" and sizes.chunks != 2:
        raise ScheduleError(
            f"{start}: chunks is {sizes.chunks}, but a v has two, down the stages and up again. Remedy: leave chunks out, or 'interleaved'."
        )
    if sizes.sequence_chunks != 1 and not named.sequences:
        raise ScheduleError(
            f"{start}: sequence_chunks is {sizes.sequence_chunks}, but sequences go through it whole. Remedy: leave it out, or 'seq1f1b'."
        )
    if placement is not None:
        raise ScheduleError(
            f"{start}: placement is {placement!r}, but a name says itself where the pieces lie. Remedy: leave placement out."
        )


def _own(orders: Sequence[Sequence[Op | str]], sizes: Sizes, placement: Placement) -> Schedule:
    if placement not in get_args(Placement):
        raise ScheduleError(f"schedule 'own': placement is {placement!r}, but 'loop' or 'v' is wanted.")
    listed = [order.split() if isinstance(order, str) else order for order in orders]
    read = tuple(tuple(_op(op, stage, at) for at, op in enumerate(order)) for stage, order in enumerate(listed))
    kinds = {op.kind for order in read for op in order}
    options = {"split": "W" in kinds, "forward_only": kinds <= {"F"}}
    return sizes.schedule(read, placement=placement, **options)


def _op(op: Op | str, stage: int, at: int) -> Op:
    found = op if isinstance(op, Op) else parse(op) if isinstance(op, str) else None
    if found is None:
        raise ScheduleError(
            f"schedule 'own': operation {at} of stage {stage} is {op!r}, but a kind (F, B, W), a microbatch and, if it is not 0, a chunk are "
            "wanted, as 'F0' or 'B3.1'."
        )
    return found


def _gpipe(sizes: Sizes) -> Schedule:
    return sizes.schedule(gpipe(sizes.stages, sizes.microbatches), fused=False)


def _1f1b(sizes: Sizes) -> Schedule:
    each = (sizes.stages, sizes.microbatches, sizes.sequence_chunks)
    return sizes.schedule(one_forward_one_backward(*each, fused=sizes.fused is not False))


def _interleaved(sizes: Sizes) -> Schedule:
    return sizes.schedule(_in_groups(sizes))


def _breadth_first(sizes: Sizes) -> Schedule:
    if sizes.microbatches < sizes.stages and sizes.chunks > 1:
        raise ScheduleError(
            f"schedule 'breadth_first': {sizes.microbatches} microbatches are fewer than {sizes.stages} stages, so each of {sizes.chunks} chunks "
            f"would begin late. Remedy: {sizes.stages} or more."
        )
    return sizes.schedule(looped(sizes.stages, sizes.microbatches, sizes.chunks, sizes.microbatches))


def _in_groups(sizes: Sizes) -> Orders:
    """Depth first: chunk by chunk for as many microbatches as there are stages."""
    if sizes.microbatches % sizes.stages:
        up = -(-sizes.microbatches // sizes.stages) * sizes.stages
        raise ScheduleError(
            f"schedule {sizes.name!r}: {sizes.microbatches} microbatches do not go in groups of {sizes.stages}, one for each stage. Remedy: a "
            f"multiple of {sizes.stages}, as {up}, or 'breadth_first', which takes any number from {sizes.stages} on."
        )
    return looped(sizes.stages, sizes.microbatches, sizes.chunks, sizes.stages)


def _circular(sizes: Sizes) -> Schedule:
    forward: Orders = tuple(tuple(op for op in order if op.kind == "F") for order in _in_groups(sizes))
    return sizes.schedule(forward, forward_only=True)


def _zb_uniform(sizes: Sizes) -> Schedule:
    orders = one_forward_one_backward(sizes.stages, sizes.microbatches, 1, fused=True)
    return sizes.schedule(deferred(orders, range(sizes.stages)), split=True)


def _zb_h1(sizes: Sizes) -> Schedule:
    orders = zero_bubble.handcrafted(sizes.stages, sizes.microbatches, sizes.stages)
    return sizes.schedule(orders, fused=False, split=True)


def _zb_h2(sizes: Sizes) -> Schedule:
    orders = zero_bubble.handcrafted(sizes.stages, sizes.microbatches, 2 * sizes.stages - 1)
    return sizes.schedule(orders, fused=False, split=True)


def _zb_v(sizes: Sizes) -> Schedule:
    orders = zero_bubble.zb_v(sizes.stages, sizes.microbatches)
    return sizes.schedule(orders, placement="v", fused=False, split=True)


def _dualpipe_v(sizes: Sizes) -> Schedule:
    least = 2 * sizes.stages
    if sizes.microbatches < least:
        raise ScheduleError(
            f"schedule 'dualpipe_v': {sizes.microbatches} microbatches are fewer than {least}, two for each of {sizes.stages} stages, which it "
            f"takes to fill both directions. Remedy: {least} or more, or 'zb_v', which takes any number."
        )
    return sizes.schedule(zero_bubble.dualpipe_v(sizes.stages, sizes.microbatches), placement="v", split=True)


NAMES: dict[str, Named] = {
    "gpipe": Named(_gpipe),
    "1f1b": Named(_1f1b),
    "seq1f1b": Named(_1f1b, sequences=True),
    "interleaved": Named(_interleaved, "any"),
    # Narayanan's interleaving is what Lamy-Poirier calls depth first: each microbatch goes as deep as it can before the next group begins.
    "depth_first": Named(_interleaved, "any"),
    "breadth_first": Named(_breadth_first, "any"),
    "circular": Named(_circular, "any"),
    "zb_uniform": Named(_zb_uniform),
    "zb_h1": Named(_zb_h1),
    "zb_h2": Named(_zb_h2),
    "zb_v": Named(_zb_v, "two"),
    "dualpipe_v": Named(_dualpipe_v, "two"),
}
"""Name → how it is made."""
