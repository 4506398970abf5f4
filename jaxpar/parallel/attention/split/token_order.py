"""In which order a sequence's tokens lie on the devices it is split over.

Under a causal mask the devices of a contiguous split have work from one block to all; ``zigzag`` gives each device one chunk from the
front and its mirror image from the back (as Llama 3, arXiv:2407.21783, section 3.3.2), ``striped`` every n-th token (Brandon et al. 2023,
arXiv:2311.09431).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, did_you_mean

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: tuple[str, ...] = get_args(Order)


def positions(order: Order, length: int, ways: int, index: Any) -> Any:
    """Positions [length / ways] of the tokens that device ``index`` of ``ways`` has; a number or a traced one.

    >>> [positions("zigzag", 8, 2, index).tolist() for index in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    xp = np if isinstance(index, int) else jnp
    each = length // ways
    if order == "striped":
        return index + ways * xp.arange(each, dtype=np.int32)
    if order == "contiguous" or ways == 1:
        return index * each + xp.arange(each, dtype=np.int32)
    half = xp.arange(each // 2, dtype=np.int32)
    return xp.concatenate([index * (each // 2) + half, (2 * ways - 1 - index) * (each // 2) + half])


def permutation(order: Order, length: int, ways: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The position of each token, as they lie: ``x[:, permutation(...)]`` puts tokens in order into this one.

    Raises:
      ConfigError: no such order.
      LayoutError: the sequence does not divide.

    >>> permutation("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check(order, length, ways)
    return np.concatenate([np.asarray(positions(order, length, ways, index)) for index in range(ways)])


def into_zigzag(x: jax.Array, axes: Sequence[str], dim: int, *, back: bool = False) -> jax.Array:
    """A device's tokens of a contiguous split for those of a zigzag one, or ``back``; inside of a shard_map over ``axes``.

    Every half goes straight to its new home, so each device sends and receives as much as it has.
    """
    ways = math.prod(jax.lax.axis_size(axis) for axis in axes)
    if ways == 1:
        return x
    half = x.shape[dim] // 2
    low, high = (jax.lax.slice_in_dim(x, i * half, (i + 1) * half, axis=dim) for i in (0, 1))
    even = jax.lax.axis_index(axes) % 2 == 0
    # Device r has chunks 2r and 2r + 1, or the chunks r and 2n - 1 - r; of either pair one is even.
    pairs = zigzag_pairs(ways)
    if back:
        low, high = jnp.where(even, low, high), jnp.where(even, high, low)
        pairs = [[(b, a) for a, b in some] for some in pairs]
    low, high = (jax.lax.ppermute(part, axes, some) for part, some in zip((low, high), pairs, strict=True))
    if not back:
        low, high = jnp.where(even, low, high), jnp.where(even, high, low)
    return jnp.concatenate([low, high], axis=dim)


def zigzag_pairs(ways: int) -> list[list[tuple[int, int]]]:
    """Of the first and of the second halves of the devices' tokens, (from, to) on the way into zigzag.

    >>> zigzag_pairs(2)
    [[(0, 0), (1, 1)], [(0, 1), (1, 0)]]
    """
    home = lambda chunk: min(chunk, 2 * ways - 1 - chunk)
    return [[(r, home(2 * r + odd)) for r in range(ways)] for odd in (0, 1)]


def check_given(order: Any, length: int, what: str) -> None:
    """Raises where there are not as many positions as tokens."""
    if len(order) != length:
        raise LayoutError(
            f"attention: {what} has {length} tokens, but order has {len(order)} positions. Remedy: one for each token of all devices, as "
            f"of jp.balanced_packing(...); and as many keys as queries."
        )


def check(order: str, length: int, ways: int, what: str = "seq") -> None:
    """Raises where ``length`` tokens cannot lie in this order on so many devices."""
    if order not in ORDERS:
        raise ConfigError(
            f"attention: unknown order {order!r}.{did_you_mean(order, ORDERS)} The orders are: {', '.join(ORDERS)}."
        )
    parts = 2 * ways if order == "zigzag" and ways > 1 else ways
    if length % parts:
        more = -length % parts
        other = f", or order='striped', which wants a multiple of {ways}" if parts > ways and not length % ways else ""
        raise LayoutError(
            f"attention: {what} has {length} tokens, but order {order!r} over {ways} devices wants a multiple of {parts}. Remedy: "
            f"pad=True (adds {more} tokens that nothing sees){other}."
        )
