"""Orders of a sequence's tokens on the devices of a ring: ``contiguous``, ``zigzag`` and ``striped``.

Under a causal mask a contiguous split gives the first device one block of work and the last device all blocks.
``zigzag`` gives each device one chunk from the front and its mirror image from the back (Llama 3, arXiv:2407.21783,
section 3.3.2). ``striped`` gives each of n devices every n-th token (Brandon et al. 2023, arXiv:2311.09431).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError, LayoutError, unknown

Order = Literal["contiguous", "zigzag", "striped"]
ORDERS: tuple[str, ...] = get_args(Order)


def positions(order: Order, length: int, num_shards: int, index: Any) -> Any:
    """Returns the positions ``[length / num_shards]`` of the tokens on device ``index`` of ``num_shards``.

    The result is a numpy array for an integer ``index``, and a JAX array for a traced one.

    >>> [positions("zigzag", 8, 2, index).tolist() for index in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    xp = np if isinstance(index, int) else jnp
    each = length // num_shards
    if order == "striped":
        return index + num_shards * xp.arange(each, dtype=np.int32)
    if order == "contiguous" or num_shards == 1:
        return index * each + xp.arange(each, dtype=np.int32)
    half = xp.arange(each // 2, dtype=np.int32)
    return xp.concatenate([index * (each // 2) + half, (2 * num_shards - 1 - index) * (each // 2) + half])


def permutation(order: Order, length: int, num_shards: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the position of each stored token ``[length]``: ``x[:, permutation(...)]`` reorders natural tokens.

    Raises:
      ConfigError: the order is unknown.
      LayoutError: the sequence does not divide.

    >>> permutation("zigzag", 8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check(order, length, num_shards)
    return positions_of_all(order, length, num_shards).reshape(-1)


def positions_of_all(order: Order, length: int, num_shards: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the positions of every device's tokens ``[num_shards, length / num_shards]``."""
    return np.stack([positions(order, length, num_shards, index) for index in range(num_shards)])


def into_zigzag(x: jax.Array, axes: Sequence[str], dim: int, *, back: bool = False) -> jax.Array:
    """Exchanges a device's contiguous tokens for its zigzag tokens, or ``back``, inside a ``shard_map`` over ``axes``.

    Each half is sent directly to its destination, so a device sends and receives at most as many tokens as it stores.

    Args:
      x: this device's part of an array.
      axes: the mesh axes that shard the tokens, major to minor.
      dim: the dim of the tokens.
      back: exchange zigzag tokens for contiguous ones.
    """
    num_shards = jax.lax.axis_size(axes)
    if num_shards == 1:
        return x
    half = x.shape[dim] // 2
    low, high = (jax.lax.slice_in_dim(x, i * half, (i + 1) * half, axis=dim) for i in (0, 1))
    even = jax.lax.axis_index(axes) % 2 == 0
    # Device r has chunks 2r and 2r + 1 (contiguous) or r and 2n - 1 - r (zigzag). Each pair has exactly one even chunk.
    pairs = zigzag_pairs(num_shards)
    if back:
        low, high = jnp.where(even, low, high), jnp.where(even, high, low)
        pairs = [[(b, a) for a, b in some] for some in pairs]
    low, high = (jax.lax.ppermute(part, axes, some) for part, some in zip((low, high), pairs, strict=True))
    if not back:
        low, high = jnp.where(even, low, high), jnp.where(even, high, low)
    return jnp.concatenate([low, high], axis=dim)


def zigzag_pairs(num_shards: int) -> list[list[tuple[int, int]]]:
    """Returns (source, destination) pairs into zigzag, for the first and the second halves of the devices' tokens.

    >>> zigzag_pairs(2)
    [[(0, 0), (1, 1)], [(0, 1), (1, 0)]]
    """
    home = lambda chunk: min(chunk, 2 * num_shards - 1 - chunk)
    return [[(r, home(2 * r + odd)) for r in range(num_shards)] for odd in (0, 1)]


def by_hop(pairs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the work ``[queries' device, keys' device]`` of a ring as ``[queries' device, hop]``.

    In hop h a device has the keys of the device h places before it.

    >>> by_hop(np.array([[1, 2], [3, 4]])).tolist()
    [[1, 2], [4, 3]]
    """
    index = np.arange(len(pairs))
    return pairs[index[:, None], (index[:, None] - index[None]) % len(pairs)]


def check_given(order: Any, length: int, what: str) -> None:
    """Raises LayoutError if an explicit order does not have one position per token."""
    if len(order) != length:
        raise LayoutError(
            f"attention: {what} has {length} tokens, but order has {len(order)} positions. Remedy: pass one position "
            f"for each token of all devices, as jp.context.balanced_packing(...) returns them, and as many keys as "
            f"queries."
        )


def check(order: str, length: int, num_shards: int, what: str = "seq") -> None:
    """Raises ConfigError for an unknown order, LayoutError if ``num_shards`` devices cannot share ``length`` tokens."""
    if order not in ORDERS:
        raise ConfigError(f"attention: {unknown('order', order, ORDERS)}")
    parts = 2 * num_shards if order == "zigzag" and num_shards > 1 else num_shards
    if length % parts:
        more = -length % parts
        striped = f", or order='striped', which requires a multiple of {num_shards}"
        other = striped if parts > num_shards and not length % num_shards else ""
        raise LayoutError(
            f"attention: {what} has {length} tokens, but order {order!r} over {num_shards} devices requires a multiple "
            f"of {parts}. Remedy: use pad=True (adds {more} masked tokens){other}."
        )
