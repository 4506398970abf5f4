"""The order of the devices in a mesh, so that the outermost axes cross the slow links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.errors import MeshError
from jaxpar.sharding import messages
from jaxpar.sharding.hardware.ring_order import in_rings
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

    if rings and (placed := in_rings(devices, sizes, rings)) is not None:
        return placed
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
