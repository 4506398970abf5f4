"""All-gathers and reduce-scatters as permutes: every piece straight to its device, or round rings, both ways at once.

As many bytes as the collectives that they stand for. But a compiler lets a permute run beside whatever does not wait for it; a TPU's lets no
reduce-scatter, and few all-gathers. Straight, no piece waits for another, so one product beside them hides all; but on a torus they share links. Round
a ring along each dim of the torus, one dim after the other, every hop is one link, and waits for the hop before; sums go on from hop to hop, each made
in fp32 and sent in the dtype of what is summed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def ppermute_all_gather(x: jax.Array, axes: Sequence[str], *, dim: int, rings: Sequence[int] = ()) -> jax.Array:
    """``jax.lax.all_gather(x, axes, axis=dim, tiled=True)`` inside a ``shard_map``; its gradient is :func:`ppermute_reduce_scatter`.

    Args:
      x: a device's piece.
      axes: of the devices whose pieces are brought together.
      dim: along which the pieces stand.
      rings: the sizes of the rings that the devices form, outermost first, as :meth:`jaxpar.sharding.hardware.links.Links.rings` has them; if empty, pieces go straight.

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
    """``jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)`` inside a ``shard_map``; its gradient is :func:`ppermute_all_gather`.

    Args:
      x: a device's share of the sum, whole.
      axes, dim, rings: as of :func:`ppermute_all_gather`.
    """
    return _scatter(tuple(axes), tuple(rings), dim, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(axes: tuple[str, ...], rings: tuple[int, ...], dim: int, x: jax.Array) -> jax.Array:
    for ring in reversed(_rings(axes, rings)):  # the innermost first, while pieces are smallest
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
class _Ring:
    """The devices of ``axes``, ``count`` of them, as rings of ``ways``; neighbours in one are ``stride`` apart."""

    axes: tuple[str, ...]
    count: int
    ways: int
    stride: int

    def here(self) -> jax.Array:
        """This device's place in its ring."""
        return jax.lax.axis_index(self.axes) // self.stride % self.ways

    def sent(self, x: jax.Array, step: int) -> jax.Array:
        """``x`` of the neighbour ``step`` places before."""
        to = lambda i: i + ((i // self.stride + step) % self.ways - i // self.stride % self.ways) * self.stride
        return jax.lax.ppermute(x, self.axes, [(i, to(i)) for i in range(self.count)])

    def gathered_straight(self, x: jax.Array, dim: int) -> jax.Array:
        """The pieces of all devices, in their order."""
        came = [x, *(self.sent(x, far) for far in range(1, self.ways))]
        # came[far] is of the device ``far`` places before; from the last to the first they stand in the order of the devices, begun behind this one.
        return jnp.roll(jnp.concatenate(came[::-1], dim), (self.here() + 1) * x.shape[dim], dim)

    def scattered_straight(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's piece of the sum."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        total = self.piece(x, 0, dim).astype(wide)
        for far in range(1, self.ways):
            total += self.sent(self.piece(x, far, dim), far).astype(wide)
        return total.astype(x.dtype)

    def piece(self, x: jax.Array, far: int, dim: int) -> jax.Array:
        """That of the device ``far`` places behind."""
        size = x.shape[dim] // self.ways
        return jax.lax.dynamic_slice_in_dim(x, (self.here() + far) % self.ways * size, size, dim)

    def gathered(self, x: jax.Array, dim: int) -> jax.Array:
        """The same, round the ring."""
        before, after = [x], [x]  # of the devices so many places before this one, and behind it
        for _ in range((self.ways - 1) // 2):
            before.append(self.sent(before[-1], 1))
            after.append(self.sent(after[-1], -1))
        came = [*after, *reversed(before[1:])]
        if self.ways % 2 == 0:
            came.insert(len(after), self._opposite(before[-1], after[-1], dim))
        # Rolled, no piece is written twice.
        return jnp.roll(jnp.concatenate(came, dim), self.here() * x.shape[dim], dim)

    def _opposite(self, before: jax.Array, after: jax.Array, dim: int) -> jax.Array:
        """The piece of the device opposite, of which each way brings a half."""
        if self.ways == 2:
            return self.sent(before, 1)
        half = before.shape[dim] // 2
        first, second = (jax.lax.split(x, (half, x.shape[dim] - half), dim) for x in (before, after))
        return jnp.concatenate([self.sent(first[0], 1), self.sent(second[1], -1)], dim)

    def scattered(self, x: jax.Array, dim: int) -> jax.Array:
        """The same, round the ring: two sums go round it, one each way, and end here."""
        size, wide = x.shape[dim] // self.ways, jnp.promote_types(x.dtype, jnp.float32)
        piece = lambda far: self.piece(x, far, dim).astype(wide)
        narrow = lambda part: part.astype(x.dtype)
        far = (self.ways - 1) // 2
        up, down = [piece(n) for n in range(1, far + 1)], [piece(-n) for n in range(1, far + 1)]
        if self.ways == 2:
            return narrow(piece(0) + self.sent(narrow(piece(1)), 1).astype(wide))
        if self.ways % 2 == 0:
            half = size // 2
            first, second = jax.lax.split(piece(far + 1), (half, size - half), dim)
            up[-1] = _added(up[-1], self.sent(narrow(first), 1).astype(wide), dim, last=False)
            down[-1] = _added(down[-1], self.sent(narrow(second), -1).astype(wide), dim, last=True)
        total_up, total_down = up[-1], down[-1]
        for a, b in zip(reversed(up[:-1]), reversed(down[:-1]), strict=True):
            total_up = a + self.sent(narrow(total_up), 1).astype(wide)
            total_down = b + self.sent(narrow(total_down), -1).astype(wide)
        came = self.sent(narrow(total_up), 1).astype(wide) + self.sent(narrow(total_down), -1).astype(wide)
        return narrow(piece(0) + came)


def _added(x: jax.Array, part: jax.Array, dim: int, *, last: bool) -> jax.Array:
    """``x`` and, in its first or last places, ``part`` of it."""
    left = x.shape[dim] - part.shape[dim]
    around = (left, 0, 0) if last else (0, left, 0)
    pads = [around if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return x + jax.lax.pad(part, jnp.zeros((), part.dtype), pads)


def _rings(axes: tuple[str, ...], rings: tuple[int, ...]) -> list[_Ring]:
    """Outermost first."""
    count = math.prod(jax.lax.axis_size(axis) for axis in axes)
    sizes = rings or (count,)
    strides = list(itertools.accumulate(reversed(sizes), lambda a, b: a * b, initial=1))[-2::-1]
    return [_Ring(axes, count, ways, stride) for ways, stride in zip(sizes, strides, strict=True) if ways > 1]
