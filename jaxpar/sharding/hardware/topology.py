"""``Topology``: a named group of accelerators.

Examples are ``v5e:4x4`` (chips), ``v5e:4x4*2`` (two slices of chips) and ``h100:4x8`` (4 hosts of 8 GPUs).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError, did_you_mean
from jaxpar.sharding.hardware.accelerators import ACCELERATORS, Accelerator, of_device

if TYPE_CHECKING:
    from jax.sharding import AbstractDevice, AbstractMesh, Mesh


_CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1, "h100": 132}
"""The kinds of a topology, and the cores of one jax device as jax's compiler reports them: TensorCores, or the
multiprocessors of a GPU. A v4 or v5p chip with two cores is one device ("megacore"); a tpu7x chip is two."""

_KNOWN = ", ".join(f"{kind}:{'x'.join('4' * ACCELERATORS[kind].torus) or '4x8'}" for kind in _CORES)


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
        if (found := re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)*)(?:\*(\d+))?", name.strip())) is None:
            raise MeshError(
                f"{name!r} is not a topology. Remedy: write KIND:SHAPE in chips, KIND:SHAPE*SLICES, or "
                f"KIND:HOSTSxGPUS, such as {_KNOWN}."
            )
        kind, shape = found[1], tuple(int(n) for n in found[2].split("x"))
        if kind not in _CORES:
            raise MeshError(
                f"unknown accelerator {kind!r} in {name!r}.{did_you_mean(kind, _CORES)} Known are {_KNOWN}."
            )
        dims = ACCELERATORS[kind].torus
        if dims == 0:
            host = ACCELERATORS[kind].domain
            if found[3] is not None or len(shape) > 2 or 0 in shape or shape[-1] > host:
                raise MeshError(
                    f"{name!r}: {kind} GPUs are written as {kind}:GPUS or {kind}:HOSTSxGPUS, with 1 to {host} GPUS in "
                    f"a host. Remedy: use {kind}:{host} or {kind}:4x{host}."
                )
            return cls(kind, shape[-1:], math.prod(shape[:-1]))
        if len(shape) != dims or 0 in shape or found[3] == "0":
            raise MeshError(
                f"{name!r}: a {kind} slice has {dims} dims of 1 chip or more, but {found[2]} "
                f"{'has ' + str(len(shape)) if len(shape) != dims else 'has a 0'}. Remedy: use "
                f"{kind}:{'x'.join('4' * dims)}."
            )
        return cls(kind, shape, int(found[3] or 1))

    @property
    def accelerator(self) -> Accelerator:
        """The figures of its devices."""
        return ACCELERATORS[self.kind]

    @property
    def devices(self) -> int:
        """The number of jax devices."""
        return math.prod(self.shape) * self.accelerator.chip_devices * self.slices

    @property
    def platform(self) -> str:
        """The platform of its devices, as jax names it: ``tpu`` or ``gpu``."""
        return "tpu" if self.accelerator.torus else "gpu"

    @property
    def device_kind(self) -> str:
        """jax's name of one device, such as ``TPU v5 lite``."""
        return self.accelerator.device_kinds[0]

    @property
    def abstract_device(self) -> AbstractDevice:
        """The abstract device of a mesh on this topology, from which kernels read at trace time where they will run."""
        import jax

        return jax.sharding.AbstractDevice(self.device_kind, _CORES[self.kind], self.platform)

    @property
    def slice_name(self) -> str:
        """The name of one slice, such as ``v5e:4x4`` or ``h100:8``."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        if self.slices == 1:
            return self.slice_name
        hosts = f"{self.kind}:{self.slices}x{self.shape[0]}"
        return f"{self.slice_name}*{self.slices}" if self.platform == "tpu" else hosts


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
    found = None if device is None else of_device(device.device_kind)
    return 0 if found is None else found.torus


def device_of(mesh: Mesh | AbstractMesh) -> Any:
    """Returns a device of ``mesh``, or its abstract device, which may be ``None``."""
    import jax

    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else mesh.abstract_device
