"""The order of the devices in a mesh, so that the outermost axes cross the slow links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import MeshError
from jaxpar.sharding import messages
from jaxpar.sharding.hardware.accelerators import of_device
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.rings import check_rings
from jaxpar.sharding.hardware.torus import take


def arrange(devices: Sequence[Any], sizes: Mapping[str, int], rings: Collection[str] = ()) -> np.ndarray:
    """Returns ``devices`` as an array of shape ``tuple(sizes.values())``, with the slow links outermost.

    Args:
      devices: jax devices; their number is the product of ``sizes``.
      sizes: mesh axis → size, outermost first.
      rings: the axes whose devices form closed rings of chips; without a torus they have no effect.

    Raises:
      MeshError: the slices (or processes) hold different numbers of devices, a block of axes that is no larger than
        one slice would span several, or the devices of one of ``rings`` form no closed ring.
    """
    from jax.experimental import mesh_utils

    check_rings(rings, sizes)
    accelerator = of_device(devices[0].device_kind) if rings else None
    if accelerator is not None and accelerator.torus:
        return _in_rings(devices, sizes, rings)
    shape = tuple(sizes.values())
    by_slice = getattr(devices[0], "slice_index", None) is not None
    group, groups = ("slice_index", "slices") if by_slice else ("process_index", "processes")
    counts = Counter(getattr(device, group) for device in devices)
    # The hosts of one TPU slice share its interconnect. On other platforms a host boundary is a slow link.
    if len(counts) == 1 or (not by_slice and devices[0].platform == "tpu"):
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{i}: {count}" for i, count in sorted(counts.items()))
        raise MeshError(
            f"the {groups} have different numbers of devices ({shown}). Remedy: pass build() the same number of "
            f"devices of each."
        )
    whole = len(devices) // len(counts)
    for i in range(len(shape)):
        inner = math.prod(shape[i:])
        if inner <= whole and whole % inner:
            block = dict(list(sizes.items())[i:])
            raise MeshError(
                f"the mesh {messages.product(sizes)} does not fit {len(counts)} {groups} of {whole} devices: "
                f"{messages.product(block)} would span several {groups}. Remedy: make its size divide {whole}."
            )
    # There are groups × whole devices, so the outermost axes can always supply every factor of the number of groups.
    dcn = list(take(sizes, len(counts), sizes).values())
    ici = [size // outer for size, outer in zip(shape, dcn, strict=True)]
    options = {"process_is_granule": not by_slice, "allow_split_physical_axes": True}
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, **options)


def _in_rings(devices: Sequence[Any], sizes: Mapping[str, int], rings: Collection[str]) -> np.ndarray:
    """Returns the devices of TPU slices as an array, with the devices of some axes in closed rings of chips.

    The axes are mapped to the torus as :mod:`jaxpar.sharding.hardware.links` describes.
    """
    accelerator = of_device(devices[0].device_kind)
    assert accelerator is not None
    slices: dict[int, dict[tuple[int, ...], list[Any]]] = {}
    for device in sorted(devices, key=lambda device: int(getattr(device, "core_on_chip", 0) or 0)):
        chips = slices.setdefault(getattr(device, "slice_index", None) or 0, {})
        chips.setdefault(tuple(device.coords[: accelerator.torus]), []).append(device)
    boxes = {_box(chips) for chips in slices.values()}
    pair = len(devices) // sum(map(len, slices.values()))
    shape = tuple(1 + high - low for low, high in next(iter(boxes)))
    each = {(len(chips), len(of_chip)) for chips in slices.values() for of_chip in chips.values()}
    if len({tuple(1 + high - low for low, high in box) for box in boxes}) > 1 or each != {(math.prod(shape), pair)}:
        raise MeshError(
            f"rings: the {len(devices)} devices of {len(slices)} slices are no full boxes of equally many chips. Remedy: "
            f"pass build() all devices of each slice, or leave rings out."
        )
    links = Links(accelerator, len(slices), shape, pair, sizes, rings)
    assert links.torus is not None
    outer, middle, inner = (tuple(of_level.values()) for of_level in links.levels.values())
    places = links.torus.places(list(sizes))
    found = np.empty((len(slices), len(places), pair), object)
    for number, (_, chips) in enumerate(sorted(slices.items())):
        low = [start for start, _ in _box(chips)]
        for index, place in enumerate(places):
            found[number, index] = chips[tuple(a + b for a, b in zip(low, place, strict=True))]
    # Each axis consists of a factor that crosses slices, one on the torus, and one inside a chip.
    count = len(sizes)
    order = [level * count + axis for axis in range(count) for level in range(3)]
    return found.reshape(*outer, *middle, *inner).transpose(order).reshape(tuple(sizes.values()))


def _box(chips: Mapping[tuple[int, ...], Any]) -> tuple[tuple[int, int], ...]:
    """Returns the lowest and the highest coordinate of the chips along each dim."""
    return tuple((min(along), max(along)) for along in zip(*chips, strict=True))
