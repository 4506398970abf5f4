"""A slice's torus: where mesh axes lie on it, what its links give, and the ways that messages take."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

type Place = tuple[int, ...]


@dataclass(frozen=True)
class Torus:
    """The torus of a slice, with mesh axes laid on it.

    Attributes:
      shape: chips along each dim.
      closed: which dims close to a ring.
      link: bytes/s of one link, one way.
      factors: of each dim, the (axis, factor) pairs that make it up, innermost first.
    """

    shape: tuple[int, ...]
    closed: tuple[bool, ...]
    link: float
    factors: tuple[tuple[tuple[str, int], ...], ...]

    @classmethod
    def lay(cls, sizes: Mapping[str, int], shape: Sequence[int], closed: Sequence[bool], link: float) -> Torus:
        """Lay axes, outermost first, on a torus of as many chips.

        >>> Torus.lay({"data": 4, "model": 16}, (4, 16), (False, True), 5e10).factors
        ((('data', 4),), (('model', 16),))
        >>> Torus.lay({"data": 8, "model": 2}, (4, 4), (False, False), 5e10).factors
        ((('model', 2), ('data', 2)), (('data', 4),))
        """
        left, factors = list(shape), [[] for _ in shape]  # type: list[int], list[list[tuple[str, int]]]
        for axis, size in reversed(list(sizes.items())):
            for dim, factor in _dims_for(size, left, shape):
                factors[dim].append((axis, factor))
                left[dim] //= factor
        return cls(tuple(shape), tuple(closed), link, tuple(map(tuple, factors)))

    def ways(self, axes: Collection[str]) -> dict[int, tuple[int, float]]:
        """Dim → (chips of a group along it, bytes/s that a device sends along it) for a group over these axes."""
        found = {}
        for dim, factors in enumerate(self.factors):
            mine = [i for i, (axis, _) in enumerate(factors) if axis in axes]
            chips = math.prod(factors[i][1] for i in mine)
            if chips == 1:
                continue
            sharing = math.prod(factor for axis, factor in factors[: mine[-1]] if axis not in axes)
            whole = mine[-1] == len(factors) - 1  # nothing of the dim lies outside of the group: its ring is the dim's
            both = 2 if self.closed[dim] and whole else 1
            found[dim] = (chips, self.link * both / sharing)
        return found

    def rings(self, axis: str) -> tuple[int, ...]:
        """The sizes of the lines, or rings, that an axis' devices form along dims, in the order in which its index counts them.

        >>> Torus.lay({"pipeline": 8, "model": 8}, (4, 4, 4), (True,) * 3, 1e11).rings("model")
        (4, 2)
        """
        return tuple(factor for factors in self.factors for name, factor in factors if name == axis)

    def loads(self, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """(dim, 1 or -1) → the most messages through one link of the dim that way, where all groups over the axes send at once.

        A message goes along one dim after the other, and along a ring by the shorter way.

        Args:
          axes: of a group, outermost first.
          pairs: (from, to) of the messages in a group, counted along its axes.

        >>> ring = Torus.lay({"data": 4, "model": 4}, (4, 4), (True, True), 5e10)
        >>> ring.loads(("model",), [(0, 1), (1, 2), (2, 3), (3, 0)]), ring.loads(("model",), [(0, 2), (1, 3), (2, 0), (3, 1)])
        ({(0, 1): 1}, {(0, 1): 2})
        """
        places, used = self._places(axes), Counter[tuple[int, int, Place]]()
        for a, b in pairs:
            start, end = places[a], places[b]
            for dim in range(len(self.shape)):
                others = (*end[:dim], -1, *start[dim + 1 :])  # dims before it are behind it
                for offset in self._beside(dim, axes):
                    for at, way in self._links(dim, start[dim] + offset, end[dim] + offset):
                        used[dim, way, (*others, at)] += 1
        found: dict[tuple[int, int], int] = {}
        for (dim, way, _), count in used.items():
            found[dim, way] = max(found.get((dim, way), 0), count)
        return found

    def _places(self, axes: Sequence[str]) -> list[Place]:
        """Where the devices of one group stand, in their order."""
        digits = [(dim, factor, stride) for axis in axes for dim, factor, stride in self._digits(axis)]
        found = []
        for index in itertools.product(*(range(factor) for _, factor, _ in digits)):
            place = [0] * len(self.shape)
            for at, (dim, _, stride) in zip(index, digits, strict=True):
                place[dim] += at * stride
            found.append(tuple(place))
        return found

    def _digits(self, axis: str) -> Iterator[tuple[int, int, int]]:
        """(dim, factor, places between neighbours) of an axis, outermost first."""
        for dim, factors in enumerate(self.factors):
            stride = 1
            for name, factor in factors:
                if name == axis:
                    yield dim, factor, stride
                stride *= factor

    def _beside(self, dim: int, axes: Sequence[str]) -> list[int]:
        """By how much the other groups on the same links are shifted along a dim."""
        offsets, stride = [0], 1
        for axis, factor in self.factors[dim]:
            if axis not in axes:
                offsets = [offset + n * stride for offset in offsets for n in range(factor)]
            stride *= factor
        return offsets

    def _links(self, dim: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The links, each with its way, from one place of a dim to another."""
        size = self.shape[dim]
        way = 1 if end > start else -1
        if self.closed[dim]:
            way = 1 if (end - start) % size * 2 <= size else -1
        while start != end:
            yield start, way
            start = (start + way) % size


def _dims_for(size: int, left: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
    """The (dim, factor) pairs that an axis takes: whole dims, as many as fit, else factors of the dims with most to give."""
    free = [dim for dim, n in enumerate(shape) if n > 1 and left[dim] == n]
    for count in range(len(free), 0, -1):
        for dims in combinations(free, count):
            if math.prod(shape[dim] for dim in dims) == size:
                return [(dim, shape[dim]) for dim in dims]
    taken = []
    for dim in sorted(range(len(shape)), key=lambda dim: -math.gcd(size, left[dim])):
        factor = math.gcd(size, left[dim])
        if factor > 1:
            taken.append((dim, factor))
            size //= factor
    return taken
