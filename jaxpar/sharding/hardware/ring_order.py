"""The order of TPU devices in a mesh of which some axes form closed rings of chips."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import MeshError
from jaxpar.sharding.hardware.accelerators import of_device
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.rings import check_rings


def in_rings(devices: Sequence[Any], sizes: Mapping[str, int], rings: Collection[str]) -> np.ndarray | None:
    """Returns the devices of TPU slices as an array, with the devices of some axes in closed rings of chips.

    The axes are mapped to the torus as :mod:`jaxpar.sharding.hardware.links` describes.

    Args:
      devices: jax devices; their number is the product of ``sizes``.
      sizes: mesh axis → size, outermost first.
      rings: the axes whose devices form closed rings.

    Returns:
      An array of shape ``tuple(sizes.values())``; ``None`` where no torus joins the devices.

    Raises:
      MeshError: one of ``rings`` is no axis or its devices form no closed ring, or the devices are no full slices.
    """
    check_rings(rings, sizes)
    accelerator = of_device(devices[0].device_kind)
    if accelerator is None or not accelerator.torus:
        return None
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
            f"rings: the {len(devices)} devices of {len(slices)} slices are no full boxes of equally many chips. "
            f"Remedy: pass build() all devices of each slice, or leave rings out."
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
