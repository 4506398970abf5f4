"""``MeshSpec``: how many devices along each mesh axis, in one canonical order, checked before any device is touched.

The order is outermost first: neighbours along ``model`` sit on the fastest links, stages of ``pipeline`` on the
slowest. Axes that fit into one slice (or host), counted from the innermost, never leave it.
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
                raise MeshError(f"the mesh axis {axis!r} has size {size!r}, but a positive integer or -1 is wanted.")
        free = [axis for axis, size in self._asked().items() if size == -1]
        if len(free) > 1:
            raise MeshError(
                f"the mesh axes {listing(free)} are -1, but only one can be. Remedy: give the others a size."
            )

    @classmethod
    def from_dict(cls, sizes: Mapping[str, Any]) -> MeshSpec:
        """A spec from a mapping, as YAML gives it; an unknown axis is a ``MeshError`` with a did-you-mean."""
        if not isinstance(sizes, Mapping):
            raise MeshError(f"a mesh is written as a mapping of axes to sizes, as {{data: -1}}, not as {sizes!r}.")
        for axis in sizes:
            if axis not in AXES:
                hint = did_you_mean(axis, AXES)
                raise MeshError(f"unknown mesh axis {axis!r}.{hint} The axes are: {', '.join(AXES)}.")
        return cls(**sizes)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on ``devices`` devices, ``-1`` filled in.

        Raises:
          MeshError: the sizes do not multiply to ``devices``; the text holds the equation and what would fit.
        """
        asked = self._asked()
        fixed = math.prod(size for size in asked.values() if size != -1)
        filled = {axis: devices // fixed if size == -1 else size for axis, size in asked.items()}
        if devices < 1 or math.prod(filled.values()) != devices:
            raise MeshError(_misfit(asked, fixed, devices))
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

        asked = self._asked()
        if devices is None and -1 in asked.values():
            raise MeshError(f"abstract() of the mesh {_product(asked)} needs a number of devices, as abstract(4096).")
        sizes = self.sizes(math.prod(asked.values()) if devices is None else devices)
        kinds = (axis_type or jax.sharding.AxisType.Auto,) * len(AXES)
        return jax.sharding.AbstractMesh(tuple(sizes.values()), AXES, axis_types=kinds)

    def to_dict(self) -> dict[str, int]:
        """The axes that are not 1, as YAML wants them."""
        return {axis: size for axis, size in self._asked().items() if size != 1}

    def _asked(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}


AXES: tuple[str, ...] = tuple(field.name for field in fields(MeshSpec))
"""The canonical mesh axes, outermost (slowest link) first."""


def arrange(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """``devices`` as an array of shape ``tuple(sizes.values())``, slow links outermost.

    Raises:
      MeshError: the slices (or processes) hold different numbers of devices, or axes that fit into one
        would lie across several.
    """
    from jax.experimental import mesh_utils

    shape = tuple(sizes.values())
    by_slice = getattr(devices[0], "slice_index", None) is not None
    granule, plural = ("slice_index", "slices") if by_slice else ("process_index", "processes")
    counts = Counter(getattr(device, granule) for device in devices)
    # Hosts of one TPU slice share its interconnect; only elsewhere is a host boundary a slow link.
    if len(counts) == 1 or (not by_slice and devices[0].platform == "tpu"):
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{i}: {count}" for i, count in sorted(counts.items()))
        raise MeshError(
            f"the {plural} hold different numbers of devices ({shown}). Remedy: pass build() as many of each."
        )
    whole = len(devices) // len(counts)
    for i in range(len(shape)):
        inner = math.prod(shape[i:])
        if inner <= whole and whole % inner:
            text = f"the mesh {_product(sizes)} does not fit {len(counts)} {plural} of {whole} devices"
            block = _product(dict(list(sizes.items())[i:]))
            raise MeshError(f"{text}: {block} would lie across several. Remedy: make it divide {whole}.")
    # The devices are granules × whole, so the outermost axes together always hold the factors of the granules.
    dcn, left = [], len(counts)
    for size in shape:
        dcn.append(math.gcd(size, left))
        left //= dcn[-1]
    ici = [size // outer for size, outer in zip(shape, dcn, strict=True)]
    options = {"process_is_granule": not by_slice, "allow_split_physical_axes": True}
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, **options)


def _misfit(asked: Mapping[str, int], fixed: int, devices: int) -> str:
    """Why the sizes do not multiply to the number of devices, and every change of one axis after which they do."""
    if devices < 1:
        return f"a mesh needs at least one device, but the number of devices is {devices}."
    text = f"the mesh {_product(asked)} does not fit the number of devices, which is {devices}"
    if -1 in asked.values():
        fits = [str(d) for d in range(1, devices + 1) if devices % d == 0]
        return f"{text} and no multiple of {fixed}. What fits: other sizes that multiply to {' or '.join(fits)}."
    named = [axis for axis, size in asked.items() if size > 1 or axis == "data"]
    fits = [f"{axis}={devices * asked[axis] // fixed}" for axis in named if devices * asked[axis] % fixed == 0]
    return f"{text}, not {fixed}. What fits: {' or '.join(fits) or f'sizes that multiply to {devices}'}."


def _product(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"
