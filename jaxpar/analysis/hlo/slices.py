"""Transfers between the slices of a program for several TPU slices.

The compiler makes one program for all slices. Inside a slice it uses the usual collectives, over the devices of that
slice only. Between slices, each transfer is a ``send`` and a ``recv`` to and from the hosts, with the collective in
their attributes. A sum over all slices becomes a scatter inside the slices, a sum between them, and a gather inside.
The audit counts these three separately.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpar.analysis.hlo.collectives import axes_of
from jaxpar.analysis.hlo.parser import Instruction, Module
from jaxpar.errors import AuditError
from jaxpar.sharding.hardware.torus import take
from jaxpar.sharding.resolve import num_shards_over

_HOSTS = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{(?:\{[^}]*\},?)*\})')
_NUMBERING = 100_000
"""A device's number is (slice, counted from 1) · 100,000 + its number in the slice."""


@dataclass(frozen=True)
class Slices:
    """A mesh on several slices.

    Attributes:
      across: mesh axis → the factor of its size that crosses slices.
      inside: mesh axis → the factor inside each slice.
    """

    across: Mapping[str, int]
    inside: Mapping[str, int]

    @property
    def count(self) -> int:
        """The number of slices."""
        return math.prod(self.across.values())

    @classmethod
    def of(cls, sizes: Mapping[str, int], devices: int) -> Slices:
        """Split a mesh over slices of ``devices`` devices each.

        The outermost axes cross slices, as in ``MeshSpec.build``.

        >>> Slices.of({"data": 8, "model": 2}, 4)
        Slices(across={'data': 4, 'model': 1}, inside={'data': 2, 'model': 2})
        """
        across = take(sizes, math.prod(sizes.values()) // devices, sizes)
        return cls(across, {axis: size // across[axis] for axis, size in sizes.items()})

    def axes(self, groups: np.ndarray) -> tuple[str, ...]:
        """Returns the mesh axes of transfers between slices.

        The program numbers devices in hardware order, not in mesh order. The axes that a group covers inside a slice
        therefore follow from its number of members there. If that is neither 1 nor the inside part of the axes that
        cross slices, the one other axis with that inside size is added.

        Args:
          groups: slice numbers from 0, one for each device, ``[groups, members]``.
        """
        found = axes_of(groups, self.across)
        members = max(int(np.bincount(row).max()) for row in groups)
        own = num_shards_over(found, self.inside)
        others = [axis for axis, size in self.inside.items() if size == members > 1 and axis not in found]
        if members not in (1, own) and len(others) == 1:
            return tuple(axis for axis in self.inside if axis in found or axis in others)
        return found


def crosses(instruction: Instruction) -> bool:
    """Whether an instruction sends an array to the hosts, for other slices."""
    return instruction.opcode == "send" and _HOSTS in (instruction.attribute("frontend_attributes") or "")


def rendezvous(instruction: Instruction) -> str | None:
    """Returns the name that a ``send`` and its ``recv`` have in common."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attribute("frontend_attributes") or "")
    return found[1] if found else None


def slices_named(module: Module) -> int:
    """Returns the highest slice number in any transfer, counted from 1; 0 in a program for one slice."""
    groups = (groups_between(i)[1] for where in module.computations.values() for i in where if crosses(i))
    return max((int(found.max()) + 1 for found in groups), default=0)


def groups_between(send: Instruction) -> tuple[str, np.ndarray]:
    """Returns the kind of a transfer, and its groups ``[groups, members]`` as slice numbers from 0, one for each
    device.

    Raises:
      AuditError: unknown kind of transfer, or unknown notation of its groups.
    """
    text = send.attribute("frontend_attributes") or ""
    named, target = re.search(r'_xla_megascale_transfer_type="(\w+)"', text), _TARGET.search(text)
    kind = _KINDS.get(named[1]) if named else None
    if kind is None or target is None:
        what = f"a transfer between slices of type {named[1] if named else 'unknown'}"
        raise AuditError(f"{send.name}: {what} is not supported. Remedy: audit the program for one slice.")
    if target[1].startswith('"'):  # {1,2}x{0:3}: the devices 0 to 3 of the slices 1 and 2
        rows = [[int(n) - 1 for n in row.split(",")] for row in re.findall(r"\{([\d,]+)\}x", target[1])]
    else:
        lists = re.findall(r"\{([\d,\->\s]+)\}", target[1])
        rows = [[int(n) // _NUMBERING - 1 for n in re.findall(r"\d+", row)] for row in lists]
    if not rows or len({len(row) for row in rows}) > 1 or min(map(min, rows)) < 0:
        raise AuditError(
            f"{send.name}: unsupported notation _xla_megascale_target={target[1][:80]}. Remedy: audit the program "
            "for one slice."
        )
    return kind, np.array(rows)
