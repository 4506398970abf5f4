"""``Topology``: a named group of accelerators.

Examples are ``v5e:4x4`` (chips), ``v5e:4x4*2`` (two slices of chips) and ``h100:4x8`` (4 hosts of 8 GPUs).
"""

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
    """One kind of accelerator as jax reports it, recorded from its compiler.

    Attributes:
      device_kind: jax's name of one device.
      dims: the number of dims of the torus that joins the chips; 0 for GPUs, which a switch joins.
      devices: jax devices per chip. A v4 or v5p chip with two cores is one device ("megacore"); a tpu7x chip is two.
      cores: per device: TensorCores, or the multiprocessors of a GPU.
      host: the largest number of GPUs that one switch joins.
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
    """A group of accelerators: their kind, the shape of one slice, and the number of slices.

    A slice is a group that a fast interconnect joins: TPU chips in a torus, or the GPUs of a host. Slices are joined by
    a network.

    Attributes:
      kind: the accelerator's kind, as in the name.
      shape: the shape of one slice: chips along each dim of the torus, or ``(GPUs of a host,)``.
      slices: the number of slices or hosts.

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
        """Returns the topology with this name.

        Args:
          name: ``KIND:SHAPE`` in chips, ``KIND:SHAPE*SLICES``, or ``KIND:HOSTSxGPUS``.

        Raises:
          MeshError: another form, an unknown kind, or a shape that this kind does not have.
        """
        found = re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)(?:\*(\d+))?", name.strip())
        if found is None:
            raise MeshError(
                f"{name!r} is not a topology. Remedy: write KIND:SHAPE in chips, KIND:SHAPE*SLICES, or "
                f"KIND:HOSTSxGPUS, such as {_KNOWN}."
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
                f"{'has ' + str(len(shape)) if len(shape) != dims else 'has a 0'}. Remedy: use "
                f"{kind}:{'x'.join('4' * dims)}."
            )
        return cls(kind, shape, int(found[3] or 1))

    @classmethod
    def _of_hosts(cls, name: str, kind: str, shape: tuple[int, ...], *, starred: bool) -> Topology:
        host = _KINDS[kind].host
        if starred or len(shape) > 2 or 0 in shape or shape[-1] > host:
            raise MeshError(
                f"{name!r}: {kind} GPUs are written as {kind}:GPUS or {kind}:HOSTSxGPUS, with 1 to {host} GPUS in a "
                f"host. Remedy: use {kind}:{host} or {kind}:4x{host}."
            )
        return cls(kind, shape[-1:], shape[0] if len(shape) == 2 else 1)

    @property
    def devices(self) -> int:
        """The number of jax devices."""
        return math.prod(self.shape) * _KINDS[self.kind].devices * self.slices

    @property
    def platform(self) -> str:
        """The platform of its devices, as jax names it: ``tpu`` or ``gpu``."""
        return "tpu" if _KINDS[self.kind].dims else "gpu"

    @property
    def device_kind(self) -> str:
        """jax's name of one device, such as ``TPU v5 lite``."""
        return _KINDS[self.kind].device_kind

    @property
    def abstract_device(self) -> AbstractDevice:
        """The abstract device of a mesh on this topology, from which kernels read at trace time where they will run."""
        import jax

        return jax.sharding.AbstractDevice(self.device_kind, _KINDS[self.kind].cores, self.platform)

    @property
    def slice_name(self) -> str:
        """The name of one slice, such as ``v5e:4x4`` or ``h100:8``."""
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
    """Returns the platform that a program on ``mesh`` is compiled for: ``tpu``, ``gpu`` or ``cpu``.

    It is the platform of the mesh's devices or of its abstract device; ``cpu`` for an abstract mesh that has neither.

    >>> from jax.sharding import AbstractMesh
    >>> platform_of(AbstractMesh((4,), ("data",), abstract_device=Topology.parse("v5e:2x2").abstract_device))
    'tpu'
    >>> platform_of(AbstractMesh((4,), ("data",)))
    'cpu'
    """
    device = device_of(mesh)
    return "cpu" if device is None else str(device.platform)


def torus_of(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of dims of the torus that joins the devices of ``mesh``; 0 where there is no torus.

    >>> from jax.sharding import AbstractMesh
    >>> torus_of(AbstractMesh((64,), ("data",), abstract_device=Topology.parse("v5p:4x4x4").abstract_device))
    3
    """
    device = device_of(mesh)
    kind = "" if device is None else device.device_kind
    return next((its.dims for its in _KINDS.values() if its.device_kind == kind), 0)


def device_of(mesh: Mesh | AbstractMesh) -> Any:
    """Returns a device of ``mesh``, or its abstract device, which may be ``None``."""
    import jax

    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else mesh.abstract_device
