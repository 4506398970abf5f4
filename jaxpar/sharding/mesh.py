"""``MeshSpec``: how many devices along each mesh axis, in one canonical order, checked before any device is touched.

The order is outermost first: neighbours along ``model`` sit on the fastest links, stages of ``pipeline`` on the
slowest. Axes that fit into one slice (or host), counted from the innermost, never leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError
from jaxpar.sharding import messages
from jaxpar.sharding.device_order import arrange
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.checks import is_count

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, AxisType, Mesh


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the canonical mesh axes; at most one is ``-1``, "whatever is left".

    Every axis is always part of the mesh, so a rule may name any of them; one of size 1 costs nothing.

    Raises:
      MeshError: a size is not a positive integer or ``-1``, or two sizes are ``-1``.

    >>> spec = MeshSpec(data=-1, model=2)
    >>> spec.sizes(8)["data"]
    4
    >>> spec.abstract(4096).shape["data"]
    2048
    """

    pipeline: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    ulysses: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        asked = vars(self)
        for axis, size in asked.items():
            if not is_count(size, -1) or size == 0:
                raise MeshError(f"the mesh axis {axis!r} has size {size!r}, but a positive integer or -1 is wanted.")
        free = [axis for axis, size in asked.items() if size == -1]
        if len(free) > 1:
            raise MeshError(messages.two_free_axes(free))

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> MeshSpec:
        """A spec from a mapping, as YAML gives it; an unknown axis is a ``MeshError`` with a did-you-mean."""
        if not isinstance(sizes, Mapping):
            raise MeshError(f"a mesh is written as a mapping of axes to sizes, as {{data: -1}}, not as {sizes!r}.")
        for axis in sizes:
            if axis not in AXES:
                raise MeshError(messages.unknown_mesh_axis(axis, AXES))
        return cls(**sizes)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on ``devices`` devices, ``-1`` filled in.

        Raises:
          MeshError: the sizes do not multiply to ``devices``; the text holds the equation and what would fit.
        """
        asked = vars(self)
        fixed = math.prod(size for size in asked.values() if size != -1)
        filled = {axis: devices // fixed if size == -1 else size for axis, size in asked.items()}
        if devices < 1 or math.prod(filled.values()) != devices:
            raise MeshError(messages.mesh_misfit(asked, fixed, devices))
        return filled

    def build(self, devices: Sequence[Any] | None = None, *, axis_type: AxisType | None = None) -> Mesh:
        """A ``jax.sharding.Mesh`` over ``devices`` (default: all of ``jax.devices()``), with Auto axes by default.

        Devices that report slices, or that belong to several hosts without a common interconnect, are arranged as an
        ICI × DCN hybrid: the outermost axes take the factors that cross slices. On TPU the order inside a slice follows
        the physical topology.
        """
        import jax

        chosen = list(jax.devices() if devices is None else devices)
        sizes = self.sizes(len(chosen))
        kinds = (axis_type or jax.sharding.AxisType.Auto,) * len(AXES)
        return jax.sharding.Mesh(arrange(chosen, sizes), AXES, axis_types=kinds)

    def abstract(self, devices: int | None = None, *, axis_type: AxisType | None = None) -> AbstractMesh:
        """The same mesh with no devices behind it, of ``devices`` devices (default: the product of the sizes)."""
        import jax

        asked = vars(self)
        if devices is None and -1 in asked.values():
            raise MeshError(messages.open_mesh(asked))
        sizes = self.sizes(math.prod(asked.values()) if devices is None else devices)
        kinds = (axis_type or jax.sharding.AxisType.Auto,) * len(AXES)
        return jax.sharding.AbstractMesh(tuple(sizes.values()), AXES, axis_types=kinds)

    def on(self, topology: str | Topology, *, axis_type: AxisType | None = None) -> AbstractMesh:
        """The same mesh on the devices of a topology, as ``"v5p:4x4x4"``, abstract: this machine need not have them.

        It carries the topology's device, so that code traced under it can tell what it will run on.

        Raises:
          MeshError: no such topology, or the sizes do not multiply to its devices, with the equation and what would fit.

        >>> mesh = MeshSpec(data=-1, model=4).on("v5p:4x4x4")
        >>> mesh.shape["data"], mesh.abstract_device.device_kind
        (16, 'TPU v5')
        """
        target = Topology.parse(str(topology))
        try:
            mesh = self.abstract(target.devices, axis_type=axis_type)
        except MeshError as error:
            raise MeshError(f"{target}: {error}") from error
        return mesh.update(abstract_device=target.abstract_device)

    def to_dict(self) -> dict[str, int]:
        """The axes that are not 1, as YAML wants them."""
        return {axis: size for axis, size in vars(self).items() if size != 1}


AXES: tuple[str, ...] = tuple(field.name for field in fields(MeshSpec))
"""The canonical mesh axes, outermost (slowest link) first."""
