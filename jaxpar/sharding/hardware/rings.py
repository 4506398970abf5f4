"""Closed rings of chips in a torus, in which each device and the next, and the last and the first, share a link.

A dim of a torus is a ring if its ends are joined. Where they are not, as in small slices, a row of chips is an open
line: what the last sends to the first passes all others. A block of an even number of chips has a ring nevertheless,
such as the four chips of a square.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from jaxpar.errors import MeshError, did_you_mean, listing

type Place = tuple[int, ...]


def check_rings(rings: Iterable[str], axes: Collection[str]) -> None:
    """Checks that the axes whose devices shall form closed rings are axes of the mesh.

    Raises:
      MeshError: one is not.
    """
    for axis in rings:
        if axis not in axes:
            raise MeshError(
                f"rings: unknown mesh axis {axis!r}.{did_you_mean(axis, axes)} The mesh has {listing(axes)}."
            )


def ring_dims(
    axis: str, size: int, left: Sequence[int], shape: Sequence[int], closed: Sequence[bool]
) -> list[tuple[int, int]]:
    """Returns the (dim, factor) pairs of a closed ring: one full closed dim, or else a block along as few as possible.

    Among blocks along as many dims, the one with the shortest sides is taken.

    Args:
      axis: the name of the axis.
      size: its size in chips.
      left: the chips along each dim that the axes inside this one leave.
      shape: the chips along each dim.
      closed: whether each dim closes to a ring.

    Raises:
      MeshError: there is no such ring.

    >>> ring_dims("model", 8, (4, 4), (4, 4), (False, False))
    [(0, 2), (1, 4)]
    """
    for dim, chips in enumerate(shape):
        if closed[dim] and left[dim] == chips == size:
            return [(dim, chips)]
    factors = ([factor for factor in range(1, n + 1) if n % factor == 0] for n in left)
    blocks = [block for block in itertools.product(*factors) if math.prod(block) == size and size not in block]
    if size % 2 or not blocks:
        full, free = ("x".join(map(str, sides)) for sides in (shape, left))
        beside = "" if full == free else f", of which {free} are left beside the axes inside it"
        raise MeshError(
            f"rings: the {size} devices of {axis!r} form no closed ring on {full} chips{beside}. It takes a full dim "
            f"whose ends are joined, or a block of an even number of chips along two dims or more. Remedy: use another "
            f"size of {axis!r}, or leave {axis!r} out of rings."
        )
    best = min(blocks, key=lambda block: (sum(n > 1 for n in block), max(block), block))
    return [(dim, factor) for dim, factor in enumerate(best) if factor > 1]


def closed_ring(sides: Sequence[int]) -> list[Place]:
    """Returns all places of a block in the order of a ring: each is next to the one before, the last to the first.

    Args:
      sides: the sides of the block, two or more that are at least 2; their product is even.

    >>> closed_ring((2, 2)), closed_ring((2, 3))
    ([(0, 0), (1, 0), (1, 1), (0, 1)], [(0, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 1)])
    """
    even = next(i for i, n in enumerate(sides) if n % 2 == 0)
    rows, others = sides[even], _snake([n for i, n in enumerate(sides) if i != even])
    # Down the first column, and back through the rest of each row.
    ring = [(row, 0) for row in range(rows)]
    for step, row in enumerate(reversed(range(rows))):
        columns = range(1, len(others))
        ring += [(row, column) for column in (columns if step % 2 == 0 else reversed(columns))]
    return [(*others[column][:even], row, *others[column][even:]) for row, column in ring]


def _snake(sides: Sequence[int]) -> list[Place]:
    """Returns all places of a block, each next to the one before."""
    if not sides:
        return [()]
    inner = _snake(sides[1:])
    return [(n, *rest) for n in range(sides[0]) for rest in (inner if n % 2 == 0 else inner[::-1])]


def check_on_torus(axis: str, size: int, chips: int, slices: int) -> None:
    """Checks that an axis lies on the torus of one slice.

    Args:
      axis: the name of the axis.
      size: its devices.
      chips: how many of its devices the torus joins.
      slices: the number of slices.

    Raises:
      MeshError: some of its devices are in other slices, or share a chip.
    """
    if size != chips:
        raise MeshError(
            f"rings: the {size} devices of {axis!r} form no ring of chips of one slice, because {size // chips} of "
            f"them are in other slices, of which there are {slices}, or share a chip. Remedy: use another size of "
            f"{axis!r}, or leave {axis!r} out of rings."
        )
