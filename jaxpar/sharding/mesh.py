"""``MeshSpec``: the size of each mesh axis, checked before any device is touched.

The axes have one canonical order, outermost first. Neighbours along ``model`` are joined by the fastest links, stages
of ``pipeline`` by the slowest. Counted from the innermost, axes that fit into one slice (or host) never cross its
boundary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Self

from jaxpar.errors import MeshError, did_you_mean, listing
from jaxpar.sharding import messages
from jaxpar.sharding.hardware.device_order import arrange
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.checks import Range, is_count
from jaxpar.utils.simulate_devices import sizes_or_suggestion

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, AxisType, Mesh

_MOST_DEVICES = 2**20
AxisSize = Annotated[int, Range(-1, _MOST_DEVICES)]


@dataclass(frozen=True)
class LayoutData:
    """The top-level keys of a layout in YAML."""

    mesh: dict[str, AxisSize] | None
    rules: dict[str, Any] | None
    rings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the canonical mesh axes.

    At most one size is ``-1``: that axis takes the devices that are left. A mesh always has the seven axes from
    ``pipeline`` to ``model``; an axis of size 1 has no cost. A rule may name any axis of a spec.

    Attributes:
      pipeline: pipeline stages.
      replica: groups that hold copies of the model state (see :class:`jaxpar.Zero`, ``fsdp_group_size``).
      data: data parallelism, and the default axis of ZeRO and FSDP.
      expert: for the expert dim of a mixture-of-experts model.
      context: context parallelism: the sequence is sharded.
      ulysses: context parallelism by all-to-all (DeepSpeed-Ulysses).
      model: tensor parallelism in one dimension.
      x, y, z: tensor parallelism in two, 2.5 and three dimensions, instead of ``model``; see :mod:`jaxpar.tensor`. A
        mesh has those of them whose size is not 1.

    Raises:
      MeshError: an unknown axis, a size that is not a positive integer or ``-1``, or two sizes of ``-1``.

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
    x: int = 1
    y: int = 1
    z: int = 1

    def __new__(cls, *sizes: int, **named: int) -> Self:
        """Reject unknown axes before the generated ``__init__`` does, whose error would not list the known ones."""
        for axis in named.keys() - set(ALL_AXES):
            known = f" It is {_ELSEWHERE[axis]!r} here." if axis in _ELSEWHERE else did_you_mean(axis, ALL_AXES)
            raise MeshError(f"unknown mesh axis {axis!r}.{known} The axes are: {', '.join(ALL_AXES)}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        given = vars(self)
        for axis, size in given.items():
            if not is_count(size, -1) or size == 0:
                raise MeshError(f"the size of the mesh axis {axis!r} must be a positive integer or -1, got {size!r}.")
        if len(free := [axis for axis, size in given.items() if size == -1]) > 1:
            raise MeshError(
                f"the mesh axes {listing(free)} are -1, but only one can be. Remedy: give the others a size."
            )

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> MeshSpec:
        """Returns a spec from a mapping of axes to sizes, as in YAML.

        Raises:
          MeshError: not a mapping, an unknown axis, or a bad size.
        """
        if not isinstance(sizes, Mapping):
            raise MeshError(f"a mesh must be a mapping of axes to sizes such as {{data: -1}}, got {sizes!r}.")
        return cls(**{str(axis): size for axis, size in sizes.items()})

    def sizes(self, devices: int) -> dict[str, int]:
        """Returns the size of every axis of the mesh on ``devices`` devices, with ``-1`` filled in.

        Raises:
          MeshError: the product of the sizes is not ``devices``. The text lists sizes that fit.
        """
        given = vars(self)
        fixed = math.prod(size for size in given.values() if size != -1)
        if devices > _MOST_DEVICES:
            raise MeshError(f"a mesh of {devices:,} devices exceeds {_MOST_DEVICES:,}. Remedy: use smaller sizes.")
        filled = {axis: devices // fixed if size == -1 else size for axis, size in given.items()}
        if devices < 1 or math.prod(filled.values()) != devices:
            raise MeshError(_mesh_misfit(given, fixed, devices))
        return {axis: size for axis, size in filled.items() if axis in AXES or size > 1}

    def build(
        self,
        devices: Sequence[Any] | None = None,
        *,
        axis_type: AxisType | None = None,
        rings: Collection[str] = (),
    ) -> Mesh:
        """Returns a ``jax.sharding.Mesh`` over ``devices``.

        Devices of several slices, or of several hosts without a common interconnect, form an ICI × DCN hybrid
        mesh, whose outermost axes take the factors that cross slices. Within a TPU slice the order follows the physical
        topology.

        Args:
          devices: by default all of ``jax.devices()``.
          axis_type: the type of all axes, by default Auto.
          rings: the axes whose devices form closed rings of TPU chips, as in :class:`jaxpar.Layout`: a full dim of the
            torus if its ends are joined, else a block such as 2 × 2 chips. They have no effect on other devices.

        Raises:
          MeshError: the sizes do not fit the number of devices or the slices, or the devices of one of ``rings`` form
            no closed ring. For a machine with too few devices, the text says how to simulate enough.
        """
        import jax

        chosen = list(jax.devices() if devices is None else devices)
        sizes = sizes_or_suggestion(self.sizes, len(chosen), vars(self).values())
        return jax.sharding.Mesh(
            arrange(chosen, sizes, rings), tuple(sizes), axis_types=axis_type and (axis_type,) * len(sizes)
        )

    def abstract(self, devices: int | None = None, *, axis_type: AxisType | None = None) -> AbstractMesh:
        """Returns an ``AbstractMesh``, which has no devices.

        Args:
          devices: the number of devices, by default the product of the sizes.
          axis_type: the type of all axes, by default Auto.

        Raises:
          MeshError: the sizes do not fit ``devices``, or one is ``-1`` and ``devices`` is not given.
        """
        import jax

        if devices is None and -1 in vars(self).values():
            shown = messages.product(vars(self))
            raise MeshError(f"abstract() of the mesh {shown} requires a number of devices, such as abstract(4096).")
        sizes = self.sizes(math.prod(vars(self).values()) if devices is None else devices)
        kinds = (axis_type or jax.sharding.AxisType.Auto,) * len(sizes)
        return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)

    def on(self, topology: str | Topology, *, axis_type: AxisType | None = None) -> AbstractMesh:
        """Returns an ``AbstractMesh`` on the devices of a topology, such as ``"v5p:4x4x4"``; no device is needed.

        The mesh carries the topology's abstract device, so code that is traced under it can tell the accelerator.

        Args:
          topology: the topology or its name; see :meth:`Topology.parse`.
          axis_type: the type of all axes, by default Auto.

        Raises:
          MeshError: the topology is unknown, or the sizes do not fit its devices. The text lists sizes that fit.

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
        """Returns the axes whose size is not 1, as YAML holds them."""
        return {axis: size for axis, size in vars(self).items() if size != 1}


ALL_AXES: tuple[str, ...] = tuple(field.name for field in fields(MeshSpec))
"""The mesh axes that a spec knows, outermost (slowest links) first."""
TENSOR_AXES = ("x", "y", "z")
"""The mesh axes of tensor parallelism in several dimensions; a mesh has them only where their size is not 1."""
AXES: tuple[str, ...] = tuple(axis for axis in ALL_AXES if axis not in TENSOR_AXES)
"""The canonical mesh axes, which every mesh has."""


_ELSEWHERE = {"fsdp": "data", "tp": "model", "cp": "context", "sp": "context", "pp": "pipeline", "ep": "expert"}
"""Names of axes in other libraries, and ours."""


def _mesh_misfit(given: Mapping[str, int], fixed: int, devices: int) -> str:
    """Says why the sizes do not multiply to the number of devices, and lists each change of one axis that fits."""
    if devices < 1:
        return f"a mesh needs at least one device, but the number of devices is {devices}."
    if -1 in given.values():
        why = f"{devices} is not a multiple of {fixed}"
        divisors = [str(d) for d in range(1, devices + 1) if devices % d == 0]
        fits = f"other sizes that multiply to {' or '.join(divisors)}"
    else:
        why = f"its sizes multiply to {fixed}"
        can = {axis: devices * n // fixed for axis, n in given.items() if n > 1 or axis == "data"}
        sizes = [f"{axis}={n}" for axis, n in can.items() if n * fixed == devices * given[axis]]
        fits = " or ".join(sizes) or f"sizes that multiply to {devices}"
    return f"the mesh {messages.product(given)} does not fit {devices} devices, because {why}. Remedy: use {fits}."
