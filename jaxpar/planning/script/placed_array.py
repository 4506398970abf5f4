"""An array that a train step reads, and its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpar.analysis.units import axes_of_dims, device_bytes, shard_count
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.sharding.names import Names
from jaxpar.sharding.resolve import Resolved


@dataclass(frozen=True)
class PlacedArray:
    """An array that the step reads, with its place.

    Attributes:
      path: its path, which begins with the name of the step's argument.
      role: ``params``, ``optimizer`` (all other state) or ``activations`` (what is no state).
      shape: its global shape.
      names: the names of its dims.
      resolved: the sharding that the rules give it.
      itemsize: bytes of an element.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    names: Names
    resolved: Resolved
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes of the global array."""
        return math.prod(self.shape) * self.itemsize

    def device_bytes(self, layout: Layout) -> int:
        """Returns the bytes of one device's shard."""
        axes = axes_of_dims(to_spec(self.resolved), len(self.shape))
        return device_bytes(self.shape, self.itemsize, [shard_count(own, layout.sizes) for own in axes])
