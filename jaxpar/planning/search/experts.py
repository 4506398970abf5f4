"""Experts under a plan: how their rows travel, in how many pieces they are computed, and what that sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.parallel.experts.exchange import exchange_on
from jaxpar.parallel.experts.options import ExpertSizes, capacity_of, most_rows, pieces_for
from jaxpar.parallel.experts.select import bytes_per_transfer, select_dispatch
from jaxpar.planning.search.plan import BATCH, SEQ, Plan
from jaxpar.planning.search.workload import ExpertLayers, Workload
from jaxpar.sharding.hardware.topology import Topology

_AXES = ("expert",)
_CHOICE, _GAIN = 8, 4
"""Bytes of a choice of a token, its expert and its weight, and of the gradient of the weight."""


@dataclass(frozen=True)
class ExpertExchange:
    """What the layers of one kind do on a device in a step, if the routing is balanced.

    Attributes:
      layers: the layers.
      dispatch: how rows reach their experts.
      sizes: those of one call.
      pieces: the pieces in which a call processes its tokens.
      rows: rows of the experts of a device in a piece, for which there is room.
      calls: how often a device runs a layer in the forward pass.
    """

    layers: ExpertLayers
    dispatch: str
    sizes: ExpertSizes
    pieces: int
    rows: int
    calls: float

    @property
    def transfer_bytes(self) -> float:
        """Bytes that a device sends to bring the rows of a call to their experts."""
        call = self.layers.call
        extra = (call.capacity_factor or 1.0) if self.dispatch == "all_to_all" else 1.0
        return extra * bytes_per_transfer(self.dispatch, self.sizes, call.row_bytes)

    @property
    def choice_bytes(self) -> float:
        """Bytes that a device sends so that all know the choices of its tokens."""
        s = self.sizes
        return float(_CHOICE * s.tokens * s.k * (s.token_devices - 1))

    def sent(self, *, again: bool) -> float:
        """Returns the bytes that a device sends in a step.

        Rows go to their experts and back in the forward and in the backward pass, and once more to their experts where
        the backward pass computes them again.

        Args:
          again: whether it does.
        """
        choices = (1 + again) * self.choice_bytes + self.choice_bytes * _GAIN / _CHOICE
        return self.calls * ((4 + again) * self.transfer_bytes + choices)

    @property
    def kind(self) -> str:
        """The collective, as XLA names it."""
        return "all-gather" if self.dispatch == "gather" else "all-to-all"

    @property
    def room(self) -> float:
        """The rows for which a call has room, in all its pieces, divided by those of a balanced routing."""
        return self.pieces * self.rows / (self.sizes.tokens * self.sizes.k)


def exchanges(plan: Plan, workload: Workload, topology: Topology) -> tuple[ExpertExchange, ...]:
    """Returns what a plan's layers with experts do.

    Args:
      plan: the plan.
      workload: the step.
      topology: the hardware.
    """
    return tuple(_exchanges(plan, workload, topology))


def _exchanges(plan: Plan, workload: Workload, topology: Topology) -> Iterator[ExpertExchange]:
    shards = plan.replica * plan.data * plan.expert * plan.context * plan.ulysses
    steps = plan.microbatches if plan.pipeline > 1 else plan.grad_accum_steps
    tokens = workload.sizes.get(BATCH, 1) * workload.sizes.get(SEQ, 1) // (shards * steps)
    for layers in workload.experts:
        call = layers.call
        sizes = ExpertSizes(max(tokens, 1), call.k, call.experts, plan.expert, plan.expert)
        chosen = select_dispatch(
            call.dispatch,
            sizes,
            _AXES,
            _AXES,
            call.row_bytes,
            capacity=call.capacity_factor is not None,
            ragged=has_ragged_exchange(topology),
        )
        pieces = call.pieces or pieces_for(sizes, call.capacity_factor)
        of_piece = sizes.tokens // pieces
        rows = most_rows(sizes, of_piece, capacity_of(sizes, of_piece, call.capacity_factor))
        ticks = plan.ticks if layers.layered else 1.0
        calls = layers.times / (plan.pipeline if layers.layered else 1) * steps * ticks
        yield ExpertExchange(layers, chosen.dispatch, sizes, pieces, rows, calls)


def has_ragged_exchange(topology: Topology) -> bool:
    """Returns whether the devices of a topology can exchange rows of which each pair has another number."""
    return exchange_on(topology.platform, topology.device_kind, topology.devices) != "none"


def problem(plan: Plan, workload: Workload, *, ragged: bool = True) -> str | None:
    """Returns why a plan's mesh does not fit the experts of a model, if it does not.

    Args:
      plan: the plan.
      workload: the step.
      ragged: as :func:`has_ragged_exchange`.
    """
    if plan.expert == 1:
        return None
    for layers in workload.experts:
        call = layers.call
        if call.experts % plan.expert:
            return f"{call.experts} experts do not divide over expert {plan.expert}"
        if call.dispatch in ("ragged", "deduplicated") and not ragged:
            return f"dispatch {call.dispatch!r} needs a ragged exchange, which XLA does not have for these devices"
    return None
