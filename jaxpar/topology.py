"""``Topology``: a named group of accelerators, as ``v5e:4x4`` (chips) or ``v5e:4x4*2`` (two slices of them)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpar.errors import MeshError, did_you_mean

if TYPE_CHECKING:
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh


@dataclass(frozen=True)
class _Kind:
    """What jax says of one kind of chip: dims of its torus, devices on a chip, their name, and cores in a device.

    The two cores of a v4 or v5p chip are one device ("megacore"); those of a tpu7x chip are two.
    """

    dims: int
    device_kind: str
    devices: int = 1
    cores: int = 1


_KINDS = {
    "v4": _Kind(3, "TPU v4", cores=2),
    "v5e": _Kind(2, "TPU v5 lite"),
    "v5p": _Kind(3, "TPU v5", cores=2),
    "v6e": _Kind(2, "TPU v6 lite"),
    "tpu7x": _Kind(3, "TPU7x", devices=2),
}


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
        known = ", ".join(f"{kind}:{'x'.join('4' * its.dims)}" for kind, its in _KINDS.items())
        if found is None:
            raise MeshError(
                f"{name!r} names no topology. Remedy: write KIND:SHAPE in chips, or KIND:SHAPE*SLICES, as {known}."
            )
        kind, shape = found[1], tuple(int(n) for n in found[2].split("x"))
        if kind not in _KINDS:
            raise MeshError(f"unknown accelerator {kind!r} in {name!r}.{did_you_mean(kind, _KINDS)} Known are {known}.")
        dims = _KINDS[kind].dims
        if len(shape) != dims or 0 in shape or found[3] == "0":
            raise MeshError(
                f"{name!r}: a {kind} slice has {dims} dims of 1 chip or more, but {found[2]} "
                f"{'has ' + str(len(shape)) if len(shape) != dims else 'has a 0'}. Remedy: as {kind}:{'x'.join('4' * dims)}."
            )
        return cls(kind, shape, int(found[3] or 1))

    @property
    def devices(self) -> int:
        """How many jax devices it has."""
        return math.prod(self.shape) * _KINDS[self.kind].devices * self.slices

    @property
    def platform(self) -> str:
        """The platform of its devices, as jax names it: ``tpu`` or ``gpu``."""
        return "tpu"

    @property
    def device_kind(self) -> str:
        """What jax calls one device, as ``TPU v5 lite``."""
        return _KINDS[self.kind].device_kind

    @property
    def abstract_device(self) -> AbstractDevice:
        """One device as an abstract mesh carries it, from where kernels read at trace time what they will run on."""
        import jax

        kind = _KINDS[self.kind]
        return jax.sharding.AbstractDevice(kind.device_kind, kind.cores, self.platform)

    @property
    def slice_name(self) -> str:
        """One slice, as the compiler calls it."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        return self.slice_name + (f"*{self.slices}" if self.slices > 1 else "")


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform a program on ``mesh`` is for: ``tpu``, ``gpu`` or ``cpu``.

    It is that of the mesh's devices, else of the abstract device it carries, else ``cpu``.

    >>> from jax.sharding import AbstractMesh
    >>> platform_of(AbstractMesh((4,), ("data",), abstract_device=Topology.parse("v5e:2x2").abstract_device))
    'tpu'
    >>> platform_of(AbstractMesh((4,), ("data",)))
    'cpu'
    """
    import jax

    device = mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else mesh.abstract_device
    return "cpu" if device is None else str(device.platform)
