"""Classes of dims that must be sharded alike: a union-find whose elements may be products and sums of smaller ones.

A *dim* is a tuple of *atoms*, major to minor; a dim of size 1 or 0 has none. A reshape that divides a dim divides its
atom everywhere (a product); a concatenation makes the dim a sum of its pieces, and a slice finds such a sum. Two dims
that are found to be one are united atom by atom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Self

Dim = tuple[int, ...]


class Use(StrEnum):
    """What a program does with a dim; the roles of dims follow from it."""

    CONTRACTED = "contracted with a weight"
    PRODUCED = "produced by a weight"
    JOINED = "contracted between two activations"
    SEPARATE = "kept apart in a product of two activations"
    OPPOSED = "in one of two activations that are multiplied"
    PER_WEIGHT = "kept apart in a product with a weight"
    SCANNED = "scanned over"
    LOOKED_UP = "looked up by the batch's numbers"
    LABELLED = "chosen from by the batch's numbers"
    INDEXED = "looked up by position"
    SELECTED = "chosen from by top_k"
    CONVOLVED = "a feature dim of a convolution"
    WINDOW = "a window of a convolution"
    PARTS = "counts equal parts"
    CUT = "cut in pieces"


@dataclass
class DimClasses:
    """The union-find.

    Attributes:
      sizes: of each atom.
      uses: what is done with each atom; that of a class is at its root.
      misaligned: how often two dims that should be one could not be united, because their sizes do not nest.

    >>> classes = DimClasses()
    >>> heads, size, fused = classes.new(8), classes.new(16), classes.new(128)
    >>> classes.unite(fused, (*heads, *size)), classes.flat(fused) == classes.flat((*heads, *size))
    (True, True)
    """

    sizes: list[int] = field(default_factory=list)
    uses: list[set[Use]] = field(default_factory=list)
    misaligned: int = 0
    _parent: list[int] = field(default_factory=list)
    _product: dict[int, Dim] = field(default_factory=dict)
    _sum: dict[int, tuple[Dim, ...]] = field(default_factory=dict)

    def copy(self) -> Self:
        """Returns an independent copy."""
        return type(self)(
            list(self.sizes),
            [set(uses) for uses in self.uses],
            self.misaligned,
            list(self._parent),
            dict(self._product),
            dict(self._sum),
        )

    def new(self, size: int) -> Dim:
        """Returns a dim of this size that nothing is known of."""
        if size < 2:
            return ()
        self.sizes.append(size)
        self.uses.append(set())
        self._parent.append(len(self._parent))
        return (len(self._parent) - 1,)

    def flat(self, dim: Dim) -> Dim:
        """Returns a dim as roots of classes that are no products."""
        out: list[int] = []
        for atom in map(self._root, dim):
            out += self.flat(self._product[atom]) if atom in self._product else [atom]
        return tuple(out)

    def size(self, dim: Dim) -> int:
        """Returns the number of elements along a dim."""
        return math.prod(self.sizes[atom] for atom in dim)

    def terms(self, atom: int) -> tuple[Dim, ...]:
        """Returns the pieces of an atom that is a sum, flat, and nothing for others."""
        return tuple(self.flat(term) for term in self._sum.get(self._root(atom), ()))

    def mark(self, dim: Dim, use: Use) -> None:
        """Note what the program does with a dim."""
        for atom in self.flat(dim):
            self.uses[atom].add(use)

    def unite(self, left: Dim, right: Dim) -> bool:
        """Make two dims one. Returns whether their sizes nest; if not, what was united so far remains."""
        pair = [self.flat(left), self.flat(right)]
        while pair[0] and pair[1]:
            (a, *rest_a), (b, *rest_b) = pair
            if self.sizes[a] == self.sizes[b]:
                self._merge(a, b)
                pair = [tuple(rest_a), tuple(rest_b)]
            else:
                large, small = (a, b) if self.sizes[a] > self.sizes[b] else (b, a)
                if self.split(large, self.sizes[small]) is None:
                    break
            pair = [self.flat(dim) for dim in pair]
        nests = not pair[0] and not pair[1]
        self.misaligned += not nests
        return nests

    def split(self, atom: int, major: int) -> Dim | None:
        """Divide an atom into a product whose first factor has size ``major``.

        Returns:
          The two factors, or ``None`` where ``major`` does not divide the size, or the pieces of a sum differ.
        """
        atom = self._root(atom)
        if self.sizes[atom] % major:
            return None
        minor = self.new(self.sizes[atom] // major)
        if terms := self.terms(atom):
            group, odd = divmod(len(terms), major)
            if odd or not group:
                return None
            groups = [terms[i : i + group] for i in range(0, len(terms), group)]
            if not all(self._unite_terms(groups[0], other) for other in groups[1:]):
                return None
            first = self._as_dim(groups[0])
            self.unite(minor, first)
        parts = self.new(major)
        for part in (*parts, *minor):
            self.uses[part] |= self.uses[atom]
        self._product[atom] = (*parts, *minor)
        self._sum.pop(atom, None)
        if terms:
            self.mark(parts, Use.PARTS)
        return self._product[atom]

    def cut(self, dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
        """Divide a dim into a sum of pieces.

        Args:
          dim: the dim.
          sizes: of the pieces, which fill the dim.

        Returns:
          The pieces, or ``None`` where they do not fit the products or sums that are known of the dim.
        """
        if len(sizes) == 1:
            return [dim]
        flat = self.flat(dim)
        if not flat:
            return None
        first, rest = flat[0], flat[1:]
        minor = self.size(rest)
        if any(size % minor for size in sizes):
            return None
        pieces = self._cut_atom(first, [size // minor for size in sizes])
        return None if pieces is None else [(*piece, *rest) for piece in pieces]

    def _cut_atom(self, atom: int, sizes: list[int]) -> list[Dim] | None:
        known = self.terms(atom)
        if not known:
            pieces = [self.new(size) for size in sizes]
            self._set_sum(atom, pieces)
            return pieces
        ends = {*accumulate(sizes), *accumulate(map(self.size, known))}
        refined: list[Dim] = []
        start = 0
        for term in known:
            inner = [end - start for end in sorted(ends) if start < end <= start + self.size(term)]
            found = self.cut(term, [b - a for a, b in zip([0, *inner], inner, strict=False)])
            if found is None:
                return None
            refined += found
            start += self.size(term)
        self._set_sum(atom, refined)
        left = list(refined)
        return [self._next(left, size) for size in sizes]

    def _set_sum(self, atom: int, pieces: Sequence[Dim]) -> None:
        self._sum[atom] = tuple(pieces)
        self.uses[atom].add(Use.CUT)

    def _as_dim(self, terms: Sequence[Dim]) -> Dim:
        """The dim that is the sum of ``terms``."""
        if len(terms) == 1:
            return terms[0]
        whole = self.new(sum(map(self.size, terms)))
        self._set_sum(whole[0], terms)
        return whole

    def _next(self, left: list[Dim], size: int) -> Dim:
        """Take the first terms of a list, which fill a dim of this size."""
        terms: list[Dim] = []
        while sum(map(self.size, terms)) < size:
            terms.append(left.pop(0))
        return self._as_dim(tuple(terms))

    def add(self, terms: Sequence[Dim]) -> Dim:
        """Returns the dim that is the sum of ``terms``: a known one with these pieces, or a new one."""
        flat = tuple(map(self.flat, terms))
        known = next((atom for atom in self._sum if self.terms(atom) == flat), None)
        return self._as_dim(terms) if known is None else (known,)

    def unite_equal_sums(self) -> None:
        """Unite the sums that have turned out to have the same pieces."""
        changed = True
        while changed:
            changed = False
            found: dict[tuple[Dim, ...], int] = {}
            for atom in sorted({self._root(atom) for atom in self._sum}):
                first = found.setdefault(self.terms(atom), atom)
                if self._root(first) != self._root(atom):
                    self._merge(self._root(first), self._root(atom))
                    changed = True

    def _unite_terms(self, left: Sequence[Dim], right: Sequence[Dim]) -> bool:
        if [self.size(a) for a in left] != [self.size(b) for b in right]:
            return False
        return all(self.unite(a, b) for a, b in zip(left, right, strict=True))

    def _merge(self, a: int, b: int) -> None:
        """Unite two atoms of one size that are roots and no products."""
        if a == b:
            return
        left, right = self.terms(a), self.terms(b)
        self._parent[b] = a
        self.uses[a] |= self.uses[b]
        if right and not left:
            self._sum[a] = right
        elif right and left:
            ends = {*accumulate(map(self.size, left))}, {*accumulate(map(self.size, right))}
            if ends[1] < ends[0]:
                left, right = right, left
            if ends[0] <= ends[1] or ends[1] <= ends[0]:
                self._refine(a, left, right)
            else:  # pieces that overlap, as x[1:] and x[:-1] have: one class, and of its pieces only the first are kept
                self.misaligned += 1

    def _refine(self, atom: int, coarse: Sequence[Dim], fine: Sequence[Dim]) -> None:
        """Unite two sums, where each piece of ``coarse`` is one or several of ``fine``."""
        left = list(fine)
        for term in coarse:
            self.unite(term, self._next(left, self.size(term)))
        self._sum[atom] = tuple(fine)

    def _root(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = atom = parent[parent[atom]]
        return atom
