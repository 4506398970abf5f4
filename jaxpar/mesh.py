"""``MeshSpec``: how many devices along each mesh axis, in one canonical order, checked before any device is touched.

The order is outermost first: neighbours along ``model`` sit on the fastest links, stages of ``pipeline`` on the
slowest, so an axis crosses hosts or slices only when every axis outside it already does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError, did_you_mean, listing

if TYPE_CHECKING:
    import numpy as np
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
        for axis, size in self._asked().items():
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise MeshError(f"mesh axis {axis!r} has size {size!r}. Remedy: a positive integer, or -1 once.")
        free = [axis for axis, size in self._asked().items() if size == -1]
        if len(free) > 1:
            raise MeshError(
                f"mesh axes {listing(free)} are both -1 in {self._equation(self._asked())}; only one can take what is "
                f"left. Remedy: give a size to all but one of them."
            )

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> MeshSpec:
        """A spec from a mapping, as YAML gives it; an unknown axis is a ``MeshError`` with a did-you-mean."""
        for axis in sizes:
            if axis not in AXES:
                raise MeshError(
                    f"unknown mesh axis {axis!r}.{did_you_mean(axis, AXES)} The axes are: {', '.join(AXES)}."
                )
        return cls(**sizes)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on ``devices`` devices, ``-1`` filled in.

        Raises:
          MeshError: the sizes do not multiply to ``devices``; the text holds the equation and what would fit.
        """
        asked = self._asked()
        fixed = math.prod(size for size in asked.values() if size != -1)
        free = next((axis for axis, size in asked.items() if size == -1), None)
        if free is not None and devices % fixed == 0 and devices >= fixed:
            return {**asked, free: devices // fixed}
        if free is None and fixed == devices:
            return asked
        raise MeshError(self._misfit(asked, devices))

    def build(self, devices: Sequence[Any] | None = None, *, axis_type: AxisType | None = None) -> Mesh:
        """A ``jax.sharding.Mesh`` over ``devices`` (default: all of ``jax.devices()``), with Auto axes by default.

        Devices that report slices, or that belong to several hosts without a common interconnect, are arranged as an
        ICI × DCN hybrid: the outermost axes take the factors that cross slices. On TPU the order inside a slice follows
        the physical topology.
        """
        import jax

        chosen = list(jax.devices() if devices is None else devices)
        sizes = self.sizes(len(chosen))
        kind = jax.sharding.AxisType.Auto if axis_type is None else axis_type
        return jax.sharding.Mesh(arrange(chosen, sizes), AXES, axis_types=(kind,) * len(AXES))

    def abstract(self, devices: int | None = None, *, axis_type: AxisType | None = None) -> AbstractMesh:
        """The same mesh with no devices behind it, of ``devices`` devices (default: the product of the sizes)."""
        import jax

        asked = self._asked()
        sizes = self.sizes(math.prod(asked.values()) if devices is None and -1 not in asked.values() else devices or 0)
        kind = jax.sharding.AxisType.Auto if axis_type is None else axis_type
        return jax.sharding.AbstractMesh(tuple(sizes.values()), AXES, axis_types=(kind,) * len(AXES))

    def to_dict(self) -> dict[str, int]:
        """The axes that are not 1, as YAML wants them."""
        return {axis: size for axis, size in self._asked().items() if size != 1}

    def _asked(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @staticmethod
    def _equation(sizes: Mapping[str, int]) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in sizes.items())

    def _misfit(self, asked: Mapping[str, int], devices: int) -> str:
        fixed = math.prod(size for size in asked.values() if size != -1)
        text = f"the mesh does not fit the devices: {self._equation(asked)}"
        if -1 in asked.values():
            free = next(axis for axis, size in asked.items() if size == -1)
            text += f" needs a multiple of {fixed} devices, but there are {devices}."
            free_fits = f"{free}=-1 with sizes of the others that multiply to one of {_divisors(devices)}"
            return f"{text} What fits: {free_fits}."
        text += f" = {fixed}, but there are {devices} devices."
        fits = [
            f"{axis}={devices * size // fixed}"
            for axis, size in asked.items()
            if (devices * size) % fixed == 0 and devices * size != fixed * size and (size > 1 or devices > fixed)
        ]
        if fixed < devices:
            fits.append(f"build(jax.devices()[:{fixed}])")
        return f"{text} What fits: {', '.join(fits) or 'no change of one axis; change two, or set one to -1'}."


AXES: tuple[str, ...] = tuple(field.name for field in fields(MeshSpec))
"""The canonical mesh axes, outermost (slowest link) first."""


def arrange(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """``devices`` as an array of shape ``tuple(sizes.values())``, slow links outermost.

    Raises:
      MeshError: the slices (or hosts) hold different numbers of devices, or the axes cannot be split over them.
    """
    from jax.experimental import mesh_utils

    shape = tuple(sizes.values())
    by_slice = getattr(devices[0], "slice_index", None) is not None
    granule = "slice_index" if by_slice else "process_index"
    # Hosts of one TPU slice share its interconnect; only elsewhere is a host boundary a slow link.
    if not by_slice and devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices)
    counts = Counter(getattr(device, granule) for device in devices)
    if len(counts) == 1:
        return mesh_utils.create_device_mesh(shape, devices)
    if len(set(counts.values())) > 1:
        raise MeshError(
            f"the {'slices' if by_slice else 'hosts'} hold different numbers of devices ({dict(sorted(counts.items()))}); "
            f"a mesh needs equal ones. Remedy: pass build() the devices of equal {'slices' if by_slice else 'hosts'}."
        )
    dcn, left = [], len(counts)
    for size in shape:
        dcn.append(math.gcd(size, left))
        left //= dcn[-1]
    if left > 1:
        raise MeshError(
            f"{MeshSpec._equation(sizes)} cannot be split over {len(counts)} {'slices' if by_slice else 'hosts'}: a "
            f"factor of {left} is left. Remedy: make an outer axis (pipeline, replica, data) a multiple of {len(counts)}."
        )
    ici = [size // outer for size, outer in zip(shape, dcn, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, process_is_granule=not by_slice)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
