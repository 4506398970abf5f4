"""The torus of a slice: which of its dims each mesh axis takes, their bandwidth, and the routes of messages."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from jaxpar.sharding.hardware.rings import Place, closed_ring, ring_dims

type Link = tuple[int, int, Place]
"""A dim, 1 or -1 for the direction, and a place."""


@dataclass(frozen=True)
class Torus:
    """The torus of a slice and the mesh axes that are mapped to it.

    Attributes:
      shape: chips along each dim.
      closed: whether each dim closes to a ring.
      link: bytes/s of one link in one direction.
      factors: for each dim, the (axis, factor) pairs that it consists of, innermost first.
      ringed: the axes whose devices follow a closed ring through their chips, instead of one dim after the other.
    """

    shape: tuple[int, ...]
    closed: tuple[bool, ...]
    link: float
    factors: tuple[tuple[tuple[str, int], ...], ...]
    ringed: tuple[str, ...] = ()

    @classmethod
    def lay(
        cls,
        sizes: Mapping[str, int],
        shape: Sequence[int],
        closed: Sequence[bool],
        link: float,
        ringed: Collection[str] = (),
    ) -> Torus:
        """Returns a torus with mesh axes, outermost first, mapped to its dims.

        Args:
          sizes: the size of each mesh axis in chips; their product is the number of chips.
          shape: chips along each dim.
          closed: whether each dim closes to a ring.
          link: bytes/s of one link in one direction.
          ringed: the axes whose devices form closed rings: a full closed dim, or else a block of chips.

        Raises:
          MeshError: the chips that inner axes leave hold no closed ring of the size of an axis.

        >>> Torus.lay({"data": 4, "model": 16}, (4, 16), (False, True), 5e10).factors
        ((('data', 4),), (('model', 16),))
        >>> Torus.lay({"data": 8, "model": 2}, (4, 4), (False, False), 5e10).factors
        ((('model', 2), ('data', 2)), (('data', 4),))
        >>> Torus.lay({"data": 4, "model": 4}, (4, 4), (False, False), 5e10, ["model"]).places(["model"])
        [(0, 0), (1, 0), (1, 1), (0, 1)]
        """
        left, factors = list(shape), [[] for _ in shape]  # type: list[int], list[list[tuple[str, int]]]
        for axis, size in reversed(list(sizes.items())):
            in_ring = axis in ringed and size > 2  # two devices are neighbours wherever they are
            found = ring_dims(axis, size, left, shape, closed) if in_ring else _dims_for(size, left, shape)
            for dim, factor in found:
                factors[dim].append((axis, factor))
                left[dim] //= factor
        rings = tuple(axis for axis in sizes if axis in ringed)
        return cls(tuple(shape), tuple(closed), link, tuple(map(tuple, factors)), rings)

    def ways(self, axes: Collection[str]) -> dict[int, tuple[int, float]]:
        """Returns dim → (chips, bytes/s per device) for each dim on which a group over these axes has several chips."""
        found = {}
        for dim, factors in enumerate(self.factors):
            mine = [i for i, (axis, _) in enumerate(factors) if axis in axes]
            chips = math.prod(factors[i][1] for i in mine)
            if chips == 1:
                continue
            sharing = math.prod(factor for axis, factor in factors[: mine[-1]] if axis not in axes)
            whole = mine[-1] == len(factors) - 1  # the group spans the dim to its ends, so it can use the ring
            both = 2 if self.closed[dim] and whole else 1
            found[dim] = (chips, self.link * both / sharing)
        return found

    def rings(self, axis: str) -> tuple[int, ...]:
        """Returns the sizes of the lines or rings that an axis forms along dims, outermost first.

        >>> Torus.lay({"pipeline": 8, "model": 8}, (4, 4, 4), (True,) * 3, 1e11).rings("model")
        (4, 2)
        """
        if axis in self.ringed:
            return (math.prod(factor for _, factor, _ in self._digits(axis)),)
        return tuple(factor for factors in self.factors for name, factor in factors if name == axis)

    @property
    def cell(self) -> Place:
        """The part of the torus in which links are told apart, along each dim: one place unless an axis is ringed.

        A ring sends in both directions of a dim at the same time, over different links. Links at the same place of two
        cells carry the same.
        """
        sides = [1] * len(self.shape)
        for axis in self.ringed:
            digits = list(self._digits(axis))
            for dim, factor, stride in digits if len(digits) > 1 else []:
                sides[dim] = max(sides[dim], factor * stride)
        return tuple(sides)

    def loads(self, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> dict[Link, int]:
        """Returns (dim, 1 or -1, place in its cell) → the most messages through one such link in that direction.

        All groups over the axes send at the same time. A message travels along one dim after the other, and takes the
        shorter way around a ring.

        Args:
          axes: the axes of a group, outermost first.
          pairs: (source, target) of each message in a group, as indices along its axes.

        >>> ring = Torus.lay({"data": 4, "model": 4}, (4, 4), (True, True), 5e10)
        >>> pairs, crossing = [(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 2), (1, 3), (2, 0), (3, 1)]
        >>> ring.loads(("model",), pairs), ring.loads(("model",), crossing)
        ({(0, 1, (0, 0)): 1}, {(0, 1, (0, 0)): 2})
        """
        places, used = self.places(axes), Counter[Link]()
        for a, b in pairs:
            start, end = places[a], places[b]
            for dim in range(len(self.shape)):
                for offset in self._beside(dim, axes):
                    for at, way in self._links(dim, start[dim] + offset, end[dim] + offset):
                        # The message has already travelled along earlier dims.
                        used[dim, way, (*end[:dim], at, *start[dim + 1 :])] += 1
        found: dict[Link, int] = {}
        for (dim, way, place), count in used.items():
            for spot in self._spots(dim, place, axes):
                found[dim, way, spot] = max(found.get((dim, way, spot), 0), count)
        return found

    def links(self, dim: int) -> Iterator[Link]:
        """Yields (dim, 1 or -1, place in its cell) for all links of a dim."""
        for spot in itertools.product(*map(range, self.cell)):
            yield from ((dim, way, spot) for way in (1, -1))

    def _spots(self, dim: int, place: Place, axes: Sequence[str]) -> Iterator[Place]:
        """Yields the places in their cells of a link along a dim, and of the same link of each group beside it."""
        offsets = [[0] if d == dim else self._beside(d, axes) for d in range(len(self.shape))]
        sides = self.cell
        along = [{(at + o) % side for o in some} for at, some, side in zip(place, offsets, sides, strict=True)]
        yield from itertools.product(*along)

    def places(self, axes: Sequence[str]) -> list[Place]:
        """Returns the torus coordinates of the devices of one group, in their order."""
        along = [self._along(axis) for axis in axes]
        return [tuple(map(sum, zip(*parts, strict=True))) for parts in itertools.product(*along)]

    def _along(self, axis: str) -> list[Place]:
        """Returns the torus coordinates of the devices along one axis."""
        digits = list(self._digits(axis))
        factors = [factor for _, factor, _ in digits]
        in_ring = axis in self.ringed and len(digits) > 1
        found = []
        for index in closed_ring(factors) if in_ring else itertools.product(*map(range, factors)):
            place = [0] * len(self.shape)
            for at, (dim, _, stride) in zip(index, digits, strict=True):
                place[dim] += at * stride
            found.append(tuple(place))
        return found

    def _digits(self, axis: str) -> Iterator[tuple[int, int, int]]:
        """Yields (dim, factor, chips between neighbours) for each part of an axis, outermost first."""
        for dim, factors in enumerate(self.factors):
            stride = 1
            for name, factor in factors:
                if name == axis:
                    yield dim, factor, stride
                stride *= factor

    def _beside(self, dim: int, axes: Sequence[str]) -> list[int]:
        """Returns the offsets, along a dim, of all groups that share its links."""
        offsets, stride = [0], 1
        for axis, factor in self.factors[dim]:
            if axis not in axes:
                offsets = [offset + n * stride for offset in offsets for n in range(factor)]
            stride *= factor
        return offsets

    def _links(self, dim: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields the (link, direction) pairs of the route from one place of a dim to another."""
        size = self.shape[dim]
        way = 1 if end > start else -1
        if self.closed[dim]:
            way = 1 if (end - start) % size * 2 <= size else -1
        while start != end:
            yield start, way
            start = (start + way) % size


def _dims_for(size: int, left: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the (dim, factor) pairs that an axis takes.

    It takes full dims, as many as multiply to its size, else factors of the dims that have the most to give.
    """
    free = [dim for dim, n in enumerate(shape) if n > 1 and left[dim] == n]
    for count in range(len(free), 0, -1):
        for dims in combinations(free, count):
            if math.prod(shape[dim] for dim in dims) == size:
                return [(dim, shape[dim]) for dim in dims]
    taken = []
    for dim in sorted(range(len(shape)), key=lambda dim: -math.gcd(size, left[dim])):
        if (factor := math.gcd(size, left[dim])) > 1:
            taken.append((dim, factor))
            size //= factor
    return taken


def take(sizes: Mapping[str, int], count: int, order: Iterable[str]) -> dict[str, int]:
    """Returns the factor of each axis that a level of ``count`` devices holds.

    Each axis, in ``order``, takes the largest factor that it shares with what is left of ``count``.

    >>> take({"data": 4, "model": 4}, 8, ["data", "model"])
    {'data': 4, 'model': 2}
    """
    taken = dict.fromkeys(sizes, 1)
    for axis in order:
        taken[axis] = math.gcd(sizes[axis], count)
        count //= taken[axis]
    return taken
