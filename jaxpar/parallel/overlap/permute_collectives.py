"""All-gathers and reduce-scatters made of permutes, which send pieces straight to their devices or around rings.

They send as many bytes as the collectives that they replace. The difference is overlap: XLA can run a permute next to
any independent work, whereas XLA:TPU overlaps no reduce-scatter and few all-gathers.

Straight pieces do not depend on each other, so one product can hide all of them; but on a torus they share links. Rings
run along each dim of the torus, one dim after the other, in both directions. Every hop uses one link, and depends on
the hop before. A reduce-scatter adds in fp32 at each hop, and sends the sum in the dtype of its input.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def ppermute_all_gather(x: jax.Array, axes: Sequence[str], *, dim: int, rings: Sequence[int] = ()) -> jax.Array:
    """Returns ``jax.lax.all_gather(x, axes, axis=dim, tiled=True)`` in a ``shard_map``, by permutes.

    Its gradient is :func:`ppermute_reduce_scatter`.

    Args:
      x: this device's piece.
      axes: the mesh axes to gather over, major to minor.
      dim: the dim along which the pieces are joined.
      rings: the sizes of the rings that the devices form, outermost first, as of
        :meth:`jaxpar.sharding.hardware.links.Links.rings`; if empty, pieces are sent straight.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> with jax.set_mesh(jp.MeshSpec(data=-1).build()):
    ...     gather = lambda x: ppermute_all_gather(x, ("data",), dim=0, rings=(4, 2))
    ...     y = jax.jit(jax.shard_map(gather, in_specs=P("data"), out_specs=P(), check_vma=False))(jnp.arange(16))
    >>> bool((y == jnp.arange(16)).all())
    True
    """
    return _gather(tuple(axes), tuple(rings), dim, x)


def ppermute_reduce_scatter(x: jax.Array, axes: Sequence[str], *, dim: int, rings: Sequence[int] = ()) -> jax.Array:
    """Returns ``jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)`` in a ``shard_map``, by permutes.

    Its gradient is :func:`ppermute_all_gather`.

    Args:
      x: this device's summand, with all pieces.
      axes, dim, rings: as in :func:`ppermute_all_gather`.
    """
    return _scatter(tuple(axes), tuple(rings), dim, x)


def scatter_parts(
    part_of: Callable[[jax.Array, int], jax.Array],
    size: int,
    axes: Sequence[str],
    *,
    dim: int,
    rings: Sequence[int] = (),
) -> jax.Array:
    """Returns :func:`ppermute_reduce_scatter` of a summand that is read in parts, so that it is not copied.

    Args:
      part_of: ``part_of(start, size)`` returns ``size`` entries of the summand along ``dim``, from ``start``.
      size: the summand's size along ``dim``.
      axes, dim, rings: as in :func:`ppermute_all_gather`.
    """
    found = _rings(tuple(axes), tuple(rings))
    if not found:
        return part_of(jnp.asarray(0), size)
    first, *others = found
    part = size // first.size
    piece_of = lambda distance: part_of((first.index() + distance) % first.size * part, part)
    x = first.summed(piece_of, dim) if rings else first.summed_straight(piece_of)
    for ring in others:
        x = ring.scattered(x, dim)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: tuple[str, ...], rings: tuple[int, ...], dim: int, x: jax.Array) -> jax.Array:
    for ring in reversed(_rings(axes, rings)):  # the innermost ring first, while the pieces are smallest
        x = ring.gathered(x, dim) if rings else ring.gathered_straight(x, dim)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scatter(axes: tuple[str, ...], rings: tuple[int, ...], dim: int, x: jax.Array) -> jax.Array:
    for ring in _rings(axes, rings):
        x = ring.scattered(x, dim) if rings else ring.scattered_straight(x, dim)
    return x


_gather.defvjp(
    lambda axes, rings, dim, x: (_gather(axes, rings, dim, x), None),
    lambda axes, rings, dim, _, grad: (_scatter(axes, rings, dim, grad),),
)
_scatter.defvjp(
    lambda axes, rings, dim, x: (_scatter(axes, rings, dim, x), None),
    lambda axes, rings, dim, _, grad: (_gather(axes, rings, dim, grad),),
)


@dataclass(frozen=True)
class Ring:
    """The ``count`` devices of ``axes`` as rings of ``size`` devices; neighbours in a ring are ``stride`` apart."""

    axes: tuple[str, ...]
    count: int
    size: int
    stride: int

    @classmethod
    def of(cls, axes: Sequence[str]) -> Ring:
        """Returns the ring of all devices of ``axes``, in a ``shard_map`` in which these are manual."""
        count = jax.lax.axis_size(tuple(axes))
        return cls(tuple(axes), count, count, 1)

    def index(self) -> jax.Array:
        """Returns this device's index in its ring."""
        return jax.lax.axis_index(self.axes) // self.stride % self.size

    def shifted(self, x: jax.Array, step: int) -> jax.Array:
        """Returns ``x`` of the device ``step`` places before this one in the ring."""
        to = lambda i: i + ((i // self.stride + step) % self.size - i // self.stride % self.size) * self.stride
        return jax.lax.ppermute(x, self.axes, [(i, to(i)) for i in range(self.count)])

    def gathered_straight(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns the pieces of all devices, in device order, each sent straight."""
        received = [x, *(self.shifted(x, distance) for distance in range(1, self.size))]
        # received[n] is from n places before. Reversed, the pieces are in device order, starting after this device.
        return jnp.roll(jnp.concatenate(received[::-1], dim), (self.index() + 1) * x.shape[dim], dim)

    def scattered_straight(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's piece of the sum; the summands are sent straight."""
        return self.summed_straight(lambda distance: self.piece(x, distance, dim))

    def summed_straight(self, piece_of: Callable[[int], jax.Array]) -> jax.Array:
        """Returns :meth:`scattered_straight` of summands whose pieces are ``piece_of(distance)``."""
        own = piece_of(0)
        total = own.astype(jnp.promote_types(own.dtype, jnp.float32))
        for distance in range(1, self.size):
            total += self.shifted(piece_of(distance), distance).astype(total.dtype)
        return total.astype(own.dtype)

    def piece(self, x: jax.Array, distance: int, dim: int) -> jax.Array:
        """Returns the piece of ``x`` that belongs to the device ``distance`` places after this one."""
        size = x.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(x, (self.index() + distance) % self.size * size, size, dim)

    def gathered(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns the pieces of all devices, in device order, sent around the ring in both directions."""
        pieces = dict(self.pieces(x, dim))
        # One concatenation and a roll write no piece twice.
        received = [pieces[distance] for distance in range(self.size)]
        return jnp.roll(jnp.concatenate(received, dim), self.index() * x.shape[dim], dim)

    def pieces(self, x: jax.Array, dim: int) -> Iterator[tuple[int, jax.Array]]:
        """Yields each device's piece as it arrives, with the number of places that the device is after this one."""
        yield 0, x
        before = after = x
        for distance in range(1, (self.size - 1) // 2 + 1):
            before, after = self.shifted(before, 1), self.shifted(after, -1)
            yield self.size - distance, before
            yield distance, after
        if self.size % 2 == 0:
            yield self.size // 2, self._opposite(before, after, dim)

    def _opposite(self, before: jax.Array, after: jax.Array, dim: int) -> jax.Array:
        """Returns the piece of the opposite device; each direction brings one half of it."""
        if self.size == 2:
            return self.shifted(before, 1)
        half = before.shape[dim] // 2
        first, second = (jax.lax.split(x, (half, x.shape[dim] - half), dim) for x in (before, after))
        return jnp.concatenate([self.shifted(first[0], 1), self.shifted(second[1], -1)], dim)

    def halves(self, x: jax.Array, dim: int) -> Iterator[tuple[int, int, jax.Array]]:
        """Yields all pieces in halves as they arrive: one half travels around the ring in each direction.

        A hop takes half as long as one of :meth:`pieces`, and there are twice as many, so that less of the first and of
        the last is left when the work beside it is done.

        Yields:
          The number of places that the device of a part is after this one, where the part starts in its piece, and the
          part. The own piece comes first, as one part.
        """
        yield 0, 0, x
        half = x.shape[dim] // 2
        if self.size == 2 or half == 0:
            yield from ((distance, 0, piece) for distance, piece in self.pieces(x, dim) if distance)
            return
        before, after = jax.lax.split(x, (half, x.shape[dim] - half), dim)
        for hop in range(1, self.size):
            before, after = self.shifted(before, 1), self.shifted(after, -1)
            yield self.size - hop, 0, before
            yield hop, half, after

    def scattered(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this device's piece of the sum; two partial sums travel around the ring, one in each direction."""
        return self.summed(lambda distance: self.piece(x, distance, dim), dim)

    def summed(self, piece_of: Callable[[int], jax.Array], dim: int) -> jax.Array:
        """Returns :meth:`scattered` of summands whose pieces are ``piece_of(distance)``, each asked for once."""
        distance, dtype = (self.size - 1) // 2, None
        narrow = lambda part: part.astype(dtype)
        last = piece_of(distance + 1) if self.size % 2 == 0 else None
        up = [piece_of(n) for n in range(1, distance + 1)]
        down = [piece_of(-n) for n in range(1, distance + 1)]
        own = piece_of(0)
        dtype, wide = own.dtype, jnp.promote_types(own.dtype, jnp.float32)
        up, down = [x.astype(wide) for x in up], [x.astype(wide) for x in down]
        if self.size == 2 and last is not None:
            return narrow(own.astype(wide) + self.shifted(last, 1).astype(wide))
        if last is not None:
            half = last.shape[dim] // 2
            first, second = jax.lax.split(last, (half, last.shape[dim] - half), dim)
            up[-1] = _add_at_end(up[-1], self.shifted(first, 1).astype(wide), dim, last=False)
            down[-1] = _add_at_end(down[-1], self.shifted(second, -1).astype(wide), dim, last=True)
        total_up, total_down = up[-1], down[-1]
        for a, b in zip(reversed(up[:-1]), reversed(down[:-1]), strict=True):
            total_up = a + self.shifted(narrow(total_up), 1).astype(wide)
            total_down = b + self.shifted(narrow(total_down), -1).astype(wide)
        received = self.shifted(narrow(total_up), 1).astype(wide) + self.shifted(narrow(total_down), -1).astype(wide)
        return narrow(own.astype(wide) + received)

    def summed_halves(self, part_of: Callable[[int, int, int], jax.Array], size: int, dim: int) -> jax.Array:
        """Returns :meth:`scattered` of summands that are read in parts, of which :meth:`halves` is the reverse.

        Args:
          part_of: ``part_of(distance, start, size)`` returns ``size`` entries along ``dim``, from ``start``, of the
            piece of the device ``distance`` places after this one; each is asked for once.
          size: the size of a piece along ``dim``.
          dim: the dim along which the result is scattered.
        """
        half = size // 2
        if self.size == 2 or half == 0:
            return self.summed(lambda distance: part_of(distance, 0, size), dim)
        up, down = part_of(self.size - 1, 0, half), part_of(1, half, size - half)
        dtype, wide = up.dtype, jnp.promote_types(up.dtype, jnp.float32)
        added = lambda received, own: (received.astype(wide) + own.astype(wide)).astype(dtype)
        for hop in range(1, self.size - 1):
            own_up, own_down = part_of(self.size - 1 - hop, 0, half), part_of(1 + hop, half, size - half)
            up, down = added(self.shifted(up, 1), own_up), added(self.shifted(down, -1), own_down)
        own = part_of(0, 0, size)
        return added(jnp.concatenate([self.shifted(up, 1), self.shifted(down, -1)], dim), own)


def _add_at_end(x: jax.Array, part: jax.Array, dim: int, *, last: bool) -> jax.Array:
    """Returns ``x`` with ``part`` added to its first or last entries along ``dim``."""
    left = x.shape[dim] - part.shape[dim]
    padding = (left, 0, 0) if last else (0, left, 0)
    pads = [padding if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return x + jax.lax.pad(part, jnp.zeros((), part.dtype), pads)


def _rings(axes: tuple[str, ...], rings: tuple[int, ...]) -> list[Ring]:
    """Returns the rings, outermost first."""
    count = jax.lax.axis_size(axes)
    sizes = rings or (count,)
    strides = list(itertools.accumulate(reversed(sizes), lambda a, b: a * b, initial=1))[-2::-1]
    return [Ring(axes, count, size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
