"""What a program of several TPU slices sends between them.

The compiler makes one program for all slices. Inside a slice it has the usual collectives, over that slice's devices alone;
between slices it hands arrays to the hosts, a ``send`` and a ``recv`` for each transfer, marked with what the hosts make of
them. A sum over all slices becomes a scatter inside, a sum between, and a gather inside: each is counted as what it is.
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
from jaxpar.sharding.device_order import take

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
"""A device's number is (slice from 1) · 100,000 + its number in the slice."""


@dataclass(frozen=True)
class Slices:
    """A mesh on several slices: the factor of each axis that lies across them, and the one inside of each."""

    across: Mapping[str, int]
    inside: Mapping[str, int]

    @property
    def count(self) -> int:
        """How many slices."""
        return math.prod(self.across.values())

    @classmethod
    def of(cls, sizes: Mapping[str, int], devices: int) -> Slices:
        """The mesh over slices of so many devices each: the outermost axes cross, as ``MeshSpec.build`` lays them.

        >>> Slices.of({"data": 8, "model": 2}, 4)
        Slices(across={'data': 4, 'model': 1}, inside={'data': 2, 'model': 2})
        """
        across = take(sizes, math.prod(sizes.values()) // devices, sizes)
        return cls(across, {axis: size // across[axis] for axis, size in sizes.items()})

    def axes(self, groups: np.ndarray) -> tuple[str, ...]:
        """The mesh axes of transfers among ``groups`` [groups, members] of slice numbers from 0, one for each device.

        The program numbers devices as the hardware does, not as the mesh does. Which axes a group covers inside of a slice
        is told from how many of its members lie there: the part of its own axes that is inside, if they are as many.
        """
        found = axes_of(groups, self.across)
        members = max(int(np.bincount(row).max()) for row in groups)
        own = math.prod(self.inside[axis] for axis in found)
        others = [axis for axis, size in self.inside.items() if size == members > 1 and axis not in found]
        if members not in (1, own) and len(others) == 1:
            return tuple(axis for axis in self.inside if axis in found or axis in others)
        return found


def crosses(instruction: Instruction) -> bool:
    """Whether an instruction hands an array to the hosts, for other slices."""
    return instruction.opcode == "send" and _HOSTS in (instruction.attribute("frontend_attributes") or "")


def rendezvous(instruction: Instruction) -> str | None:
    """The name that a ``send`` and its ``recv`` have in common."""
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.attribute("frontend_attributes") or "")
    return found[1] if found else None


def slices_named(module: Module) -> int:
    """The highest number of a slice that takes part in a transfer; 0 in a program of one slice."""
    groups = (groups_between(i)[1] for where in module.computations.values() for i in where if crosses(i))
    return max((int(found.max()) + 1 for found in groups), default=0)


def groups_between(send: Instruction) -> tuple[str, np.ndarray]:
    """The kind of a transfer, and its groups [groups, members] as the number, from 0, of the slice of each device.

    Raises:
      AuditError: a kind of transfer, or a spelling of its groups, that this reader does not know.
    """
    text = send.attribute("frontend_attributes") or ""
    named, target = re.search(r'_xla_megascale_transfer_type="(\w+)"', text), _TARGET.search(text)
    kind = _KINDS.get(named[1]) if named else None
    if kind is None or target is None:
        what = f"a transfer between slices of type {named[1] if named else 'unknown'}"
        raise AuditError(f"{send.name}: {what} is nothing the auditor knows. Remedy: audit the program for one slice.")
    if target[1].startswith('"'):  # {1,2}x{0:3}: of each device in the range, those in the slices
        rows = [[int(n) - 1 for n in row.split(",")] for row in re.findall(r"\{([\d,]+)\}x", target[1])]
    else:
        lists = re.findall(r"\{([\d,\->\s]+)\}", target[1])
        rows = [[int(n) // _NUMBERING - 1 for n in re.findall(r"\d+", row)] for row in lists]
    if not rows or len({len(row) for row in rows}) > 1 or min(map(min, rows)) < 0:
        raise AuditError(
            f"{send.name}: _xla_megascale_target={target[1][:80]} is a spelling the auditor does not know. "
            f"Remedy: audit the program for one slice."
        )
    return kind, np.array(rows)
