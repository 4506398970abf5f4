"""``Topology``: a named group of accelerators, as ``v5e:4x4`` (chips) or ``v5e:4x4*2`` (two slices of them)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxpar.errors import MeshError, did_you_mean

# Kind → (dims of its torus, jax devices on a chip). Two cores of a v4 or v5p chip are one device; of a tpu7x chip, two.
_KINDS = {"v4": (3, 1), "v5e": (2, 1), "v5p": (3, 1), "v6e": (2, 1), "tpu7x": (3, 2)}


@dataclass(frozen=True)
class Topology:
    """A group of TPU chips: its kind, the shape of one slice in chips, and how many slices.

    >>> topology = Topology.parse("v5p:4x4x4*2")
    >>> topology.slices, topology.devices
    (2, 128)
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, name: str) -> Topology:
        """The topology of a name.

        Raises:
          MeshError: unknown kind (with a did-you-mean), a shape of the wrong number of dims, or no such form at all.
        """
        found = re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)(?:\*(\d+))?", name.strip())
        known = ", ".join(f"{kind}:{'x'.join('4' * dims)}" for kind, (dims, _) in _KINDS.items())
        if found is None:
            raise MeshError(
                f"{name!r} names no topology. Remedy: write KIND:SHAPE in chips, or KIND:SHAPE*SLICES, as {known}."
            )
        kind, shape = found[1], tuple(int(n) for n in found[2].split("x"))
        if kind not in _KINDS:
            raise MeshError(f"unknown accelerator {kind!r} in {name!r}.{did_you_mean(kind, _KINDS)} Known are {known}.")
        dims = _KINDS[kind][0]
        if len(shape) != dims or 0 in shape or found[3] == "0":
            raise MeshError(
                f"{name!r}: a {kind} slice has {dims} dims of 1 chip or more, but {found[2]} "
                f"{'has ' + str(len(shape)) if len(shape) != dims else 'has a 0'}. Remedy: as {kind}:{'x'.join('4' * dims)}."
            )
        return cls(kind, shape, int(found[3] or 1))

    @property
    def devices(self) -> int:
        """How many jax devices it has."""
        return math.prod(self.shape) * _KINDS[self.kind][1] * self.slices

    @property
    def slice_name(self) -> str:
        """One slice, as the compiler calls it."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        return self.slice_name + (f"*{self.slices}" if self.slices > 1 else "")
