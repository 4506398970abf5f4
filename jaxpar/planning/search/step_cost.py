"""``StepCost``: what a step is estimated to take, and the ``Transfer`` objects in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.planning.search.shards import Axes


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind over the same axes, in one step.

    Attributes:
      what: a kind of ``Calibration.hidden``.
      axes: the mesh axes.
      wire_bytes: bytes that one device sends.
      seconds: on the links.
      network_seconds, network_bytes: the part of both on the network between slices or hosts.
    """

    what: str
    axes: Axes
    wire_bytes: float
    seconds: float
    network_seconds: float = 0.0
    network_bytes: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """The estimated cost of a step.

    Attributes:
      compute, hbm: seconds of the FLOPs and of the traffic of main memory.
      transfers: what is sent.
      exposed, overlapped: seconds of transfers that overlap with no compute, and of those that do.
      step: seconds.
      memory: part → bytes on one device at the peak.
    """

    compute: float
    hbm: float
    transfers: tuple[Transfer, ...]
    exposed: float
    overlapped: float
    step: float
    memory: Mapping[str, float]

    @property
    def peak_bytes(self) -> float:
        """Bytes on one device at the peak."""
        return sum(self.memory.values())

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends."""
        return sum(t.wire_bytes for t in self.transfers)

    @property
    def network_bytes(self) -> float:
        """Bytes that one device sends to other slices or hosts."""
        return sum(t.network_bytes for t in self.transfers)

    @property
    def network_seconds(self) -> float:
        """Seconds of the network between slices or hosts, hidden or not."""
        return sum(t.network_seconds for t in self.transfers)

    @property
    def exposed_bytes(self) -> float:
        """The bytes of transfers that overlap with nothing, in proportion to their time."""
        total = sum(t.seconds for t in self.transfers)
        return self.wire_bytes * self.exposed / total if total else 0.0
