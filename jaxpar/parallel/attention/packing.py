"""``balanced_packing``: an order of packed documents that gives all devices of a ring equal work.

Zigzag balances the triangle of a single causal document. With packed documents, one device may still get the expensive
ends of several long documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.attention.load_balance import Ints, grid
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.token_order import by_hop
from jaxpar.utils.checks import is_count

CAUSAL = Mask(causal=True)
TRIES = 4000
"""The maximum number of swaps to try; about half a second for 64 pieces."""


def balanced_packing(
    segment_ids: Any, num_shards: int, *, mask: Mask = CAUSAL, chunks: int = 8, impl: Literal["ring", "gather"] = "ring"
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns an order of packed documents that gives the devices of a ring nearly equal work.

    The function cuts the sequence into ``chunks * num_shards`` pieces and gives each device ``chunks`` of them: the
    heaviest remaining piece goes to the device with the least work so far (Graham 1969). It also tries zigzag and
    striped pieces, starts from the best of the three, and then swaps pairs of pieces if that shortens the critical
    path. The result is therefore never worse than zigzag.

    Args:
      segment_ids: integers ``[seq]``, or ``[batch, seq]`` for rows that share one order; their work is summed. For n
        documents, ``np.repeat(range(n), lengths)``. Negative ids are padding.
      num_shards: number of devices.
      mask: which keys a query sees within its document.
      chunks: pieces per device, an even number. More pieces balance better and create more partially masked tiles.
      impl: ``ring`` minimizes the sum over hops of the slowest device's work; ``gather`` minimizes the busiest device's
        work.

    Returns:
      The position of each token, int32 ``[seq]``. ``x[:, order]`` reorders tokens, segments and targets, and ``order``
      then holds the positions of every row. Pass it as ``order`` to :func:`jaxpar.attention` and
      :func:`jaxpar.context.balance`. If ``block`` divides ``seq / (chunks * num_shards)``, no tile spans two pieces.

    Raises:
      ConfigError: ``chunks`` or ``impl`` is invalid.
      LayoutError: the sequence does not divide into ``chunks * num_shards`` pieces.

    >>> balanced_packing(np.repeat([0, 1], [4, 4]), 2, chunks=2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    ids = np.atleast_2d(np.asarray(segment_ids))
    seq = ids.shape[-1]
    if impl not in ("ring", "gather"):
        raise ConfigError(f"balanced_packing: impl must be 'ring' or 'gather', got {impl!r}.")
    if not is_count(chunks, 2) or chunks % 2:
        raise ConfigError(f"balanced_packing: chunks must be an even number >= 2, got {chunks!r}.")
    if seq % (chunks * num_shards):
        fits = [n for n in range(2, chunks, 2) if seq % (n * num_shards) == 0]
        other = f" or chunks={fits[-1]}" if fits else ""
        raise LayoutError(
            f"balanced_packing: {seq} tokens cannot be split evenly into {chunks} pieces for each of {num_shards} "
            f"devices. Remedy: use a multiple of {chunks * num_shards} tokens{other}."
        )
    length = seq // (chunks * num_shards)
    work = sum(grid(mask, np.arange(seq)[None], length, row).visible for row in ids)
    cost = lambda owner: _cost(work, owner, num_shards, impl)
    owner = min(_candidates(np.asarray(work).sum(1), num_shards, chunks), key=cost)
    owner = _swapped(owner, cost)
    pieces = np.argsort(owner, kind="stable")
    return (pieces[:, None] * length + np.arange(length)).reshape(-1).astype(np.int32)


def _candidates(load: Ints, num_shards: int, chunks: int) -> Iterator[Ints]:
    """Yields the device of each piece [chunks * num_shards] for zigzag, striped and heaviest-first."""
    half = np.repeat(np.arange(num_shards), chunks // 2)
    yield np.concatenate([half, half[::-1]])
    yield np.arange(len(load)) % num_shards
    owner, total, room = np.zeros(len(load), np.int64), np.zeros(num_shards), np.full(num_shards, chunks)
    for piece in np.argsort(-load, kind="stable"):
        device = int(np.argmin(np.where(room > 0, total, np.inf)))
        owner[piece], total[device], room[device] = device, total[device] + load[piece], room[device] - 1
    yield owner


def _cost(work: Any, owner: Ints, num_shards: int, impl: str) -> tuple[float, float]:
    """Returns the quantity that ``impl`` minimizes, and a second one that breaks ties."""
    one_hot = np.eye(num_shards)[owner]
    hops = by_hop(one_hot.T @ work @ one_hot)
    busiest = float(hops.sum(1).max())
    return (float(hops.max(0).sum()), busiest) if impl == "ring" else (busiest, float((hops.sum(1) ** 2).sum()))


def _swapped(owner: Ints, cost: Callable[[Ints], tuple[float, float]]) -> Ints:
    """Returns ``owner`` after random swaps of two pieces, keeping each swap that lowers the cost."""
    best, rng = cost(owner), np.random.default_rng(0)
    for a, b in rng.integers(0, len(owner), (min(TRIES, len(owner) ** 2), 2)):
        if owner[a] == owner[b]:
            continue
        swapped = owner.copy()
        swapped[[a, b]] = owner[[b, a]]
        if (new := cost(swapped)) < best:
            owner, best = swapped, new
    return owner
