"""The order of devices in a mesh: which of them are neighbours on fast links, and which axes may cross slow ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError
from jaxpar.sharding import messages

if TYPE_CHECKING:
    import numpy as np


def arrange(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """``devices`` as an array of shape ``tuple(sizes.values())``, slow links outermost.

    Raises:
      MeshError: the slices (or processes) hold different numbers of devices, or axes that fit into one
        would lie across several.
    """
    from jax.experimental import mesh_utils

    shape = tuple(sizes.values())
    by_slice = getattr(devices[0], "slice_index", None) is not None
    group, groups = ("slice_index", "slices") if by_slice else ("process_index", "processes")
    counts = Counter(getattr(device, group) for device in devices)
    # Hosts of one TPU slice share its interconnect; only elsewhere is a host boundary a slow link.
    if len(counts) == 1 or (not by_slice and devices[0].platform == "tpu"):
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if len(set(counts.values())) > 1:
        raise MeshError(messages.uneven_groups(groups, counts))
    whole = len(devices) // len(counts)
    for i in range(len(shape)):
        inner = math.prod(shape[i:])
        if inner <= whole and whole % inner:
            block = dict(list(sizes.items())[i:])
            raise MeshError(messages.torn_block(sizes, block, len(counts), groups, whole))
    # The devices are groups × whole, so the outermost axes together always hold the factors of the groups.
    dcn = list(take(sizes, len(counts), sizes).values())
    ici = [size // outer for size, outer in zip(shape, dcn, strict=True)]
    options = {"process_is_granule": not by_slice, "allow_split_physical_axes": True}
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, **options)


def take(sizes: Mapping[str, int], count: int, order: Iterable[str]) -> dict[str, int]:
    """The factor of each axis that goes to a level of ``count`` devices, axes in ``order`` taking what they can.

    >>> take({"data": 4, "model": 4}, 8, ["data", "model"])
    {'data': 4, 'model': 2}
    """
    taken = dict.fromkeys(sizes, 1)
    for axis in order:
        taken[axis] = math.gcd(sizes[axis], count)
        count //= taken[axis]
    return taken
