"""``Topology``: a named group of accelerators, as ``v5e:4x4`` (chips), ``v5e:4x4*2`` (two slices) or ``h100:4x8`` (GPUs)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError, did_you_mean

if TYPE_CHECKING:
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh


@dataclass(frozen=True)
class _Kind:
    """What jax says of one kind of accelerator, as its compiler was seen to answer.

    Attributes:
      device_kind: what jax calls one device.
      dims: of the torus that joins the chips; 0 for GPUs, which a switch joins.
      devices: jax devices on a chip. The two cores of a v4 or v5p chip are one device ("megacore"), of a tpu7x chip two.
      cores: in one device: TensorCores, or a GPU's multiprocessors.
      host: the most GPUs that one switch joins.
    """

    device_kind: str
    dims: int
    devices: int = 1
    cores: int = 1
    host: int = 0


_KINDS = {
    "v4": _Kind("TPU v4", 3, cores=2),
    "v5e": _Kind("TPU v5 lite", 2),
    "v5p": _Kind("TPU v5", 3, cores=2),
    "v6e": _Kind("TPU v6 lite", 2),
    "tpu7x": _Kind("TPU7x", 3, devices=2),
    "h100": _Kind("NVIDIA H100 80GB HBM3", 0, cores=132, host=8),
}
_KNOWN = ", ".join(f"{kind}:{'x'.join('4' * its.dims)}" for kind, its in _KINDS.items() if its.dims) + ", h100:4x8"


@dataclass(frozen=True)
class Topology:
    """A group of accelerators: their kind, the shape of one slice, and how many slices.

    A slice is what a fast interconnect joins: TPU chips in a torus, or the GPUs of a host. Between slices is a network.

    Attributes:
      kind: as in the name.
      shape: of one slice: chips along each dim of the torus, or ``(GPUs of a host,)``.
      slices: how many.

    >>> topology = Topology.parse("v5p:4x4x4*2")
    >>> topology.slices, topology.devices, topology.platform, topology.device_kind
    (2, 128, 'tpu', 'TPU v5')
    >>> Topology.parse("h100:4x8")
    Topology(kind='h100', shape=(8,), slices=4)
    """

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, name: str) -> Topology:
        """The topology of a name.

        Raises:
          MeshError: unknown kind (with a did-you-mean), a shape that this kind does not have, or no such form at all.
        """
        found = re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)(?:\*(\d+))?", name.strip())
        if found is None:
            raise MeshError(
                f"{name!r} names no topology. Remedy: write KIND:SHAPE in chips, KIND:SHAPE*SLICES, or KIND:HOSTSxGPUS, as "
                f"{_KNOWN}."
            )
        kind, shape = found[1], tuple(int(n) for n in found[2].split("x"))
        if kind not in _KINDS:
            raise MeshError(
                f"unknown accelerator {kind!r} in {name!r}.{did_you_mean(kind, _KINDS)} Known are {_KNOWN}."
            )
        dims = _KINDS[kind].dims
        if dims == 0:
            return cls._of_hosts(name, kind, shape, starred=found[3] is not None)
        if len(shape) != dims or 0 in shape or found[3] == "0":
            raise MeshError(
                f"{name!r}: a {kind} slice has {dims} dims of 1 chip or more, but {found[2]} "
                f"{'has ' + str(len(shape)) if len(shape) != dims else 'has a 0'}. Remedy: as {kind}:{'x'.join('4' * dims)}."
            )
        return cls(kind, shape, int(found[3] or 1))

    @classmethod
    def _of_hosts(cls, name: str, kind: str, shape: tuple[int, ...], *, starred: bool) -> Topology:
        host = _KINDS[kind].host
        if starred or len(shape) > 2 or 0 in shape or shape[-1] > host:
            raise MeshError(
                f"{name!r}: {kind} GPUs are written as {kind}:GPUS or {kind}:HOSTSxGPUS, with 1 to {host} GPUS in a host. "
                f"Remedy: as {kind}:{host} or {kind}:4x{host}."
            )
        return cls(kind, shape[-1:], shape[0] if len(shape) == 2 else 1)

    @property
    def devices(self) -> int:
        """How many jax devices it has."""
        return math.prod(self.shape) * _KINDS[self.kind].devices * self.slices

    @property
    def platform(self) -> str:
        """The platform of its devices, as jax names it: ``tpu`` or ``gpu``."""
        return "tpu" if _KINDS[self.kind].dims else "gpu"

    @property
    def device_kind(self) -> str:
        """What jax calls one device, as ``TPU v5 lite``."""
        return _KINDS[self.kind].device_kind

    @property
    def abstract_device(self) -> AbstractDevice:
        """One device as an abstract mesh carries it, from where kernels read at trace time what they will run on."""
        import jax

        return jax.sharding.AbstractDevice(self.device_kind, _KINDS[self.kind].cores, self.platform)

    @property
    def slice_name(self) -> str:
        """One slice: ``v5e:4x4``, ``h100:8``."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        if self.slices == 1:
            return self.slice_name
        return (
            f"{self.slice_name}*{self.slices}"
            if self.platform == "tpu"
            else f"{self.kind}:{self.slices}x{self.shape[0]}"
        )


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform a program on ``mesh`` is for: ``tpu``, ``gpu`` or ``cpu``.

    It is that of the mesh's devices, else of the abstract device it carries, else ``cpu``.

    >>> from jax.sharding import AbstractMesh
    >>> platform_of(AbstractMesh((4,), ("data",), abstract_device=Topology.parse("v5e:2x2").abstract_device))
    'tpu'
    >>> platform_of(AbstractMesh((4,), ("data",)))
    'cpu'
    """
    device = device_of(mesh)
    return "cpu" if device is None else str(device.platform)


def torus_of(mesh: Mesh | AbstractMesh) -> int:
    """Dims of the torus that joins the devices of ``mesh``; 0 where there is none.

    >>> from jax.sharding import AbstractMesh
    >>> torus_of(AbstractMesh((64,), ("data",), abstract_device=Topology.parse("v5p:4x4x4").abstract_device))
    3
    """
    device = device_of(mesh)
    kind = "" if device is None else device.device_kind
    return next((its.dims for its in _KINDS.values() if its.device_kind == kind), 0)


def device_of(mesh: Mesh | AbstractMesh) -> Any:
    """A device of ``mesh``, or the abstract one that it carries; ``None`` where it carries none."""
    import jax

    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else mesh.abstract_device
