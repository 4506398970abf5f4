"""Derives a forward-only schedule from a training schedule, for evaluation."""

from __future__ import annotations

from dataclasses import replace

from jaxpar.parallel.pipeline.schedules.orders import Orders
from jaxpar.parallel.pipeline.schedules.schedule import Schedule


def forwards(schedule: Schedule) -> Schedule:
    """Returns the forwards of a schedule in its order, with the same placement of pieces and without sequence chunks.

    >>> import jaxpar as jp
    >>> one = forwards(jp.pipeline.schedule("zb_h1", stages=4, microbatches=8))
    >>> len(one.ticks.rows), one.forward_only
    (11, True)
    """
    if schedule.forward_only:
        return schedule
    parts = schedule.sequence_chunks
    orders: Orders = tuple(
        tuple(
            op._replace(microbatch=op.microbatch // parts)
            for op in order
            if op.kind == "F" and not op.microbatch % parts
        )
        for order in schedule.orders
    )
    count = schedule.microbatches // parts
    return replace(
        schedule, microbatches=count, orders=orders, fused=True, split=False, forward_only=True, sequence_chunks=1
    )
