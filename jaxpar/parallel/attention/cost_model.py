"""What an attention over a split sequence costs a device: scores that it computes, bytes that it sends, and, where the devices are known,
seconds.

A model as that of :mod:`jaxpar.sharding.hardware.links`, of peaks and bytes. A ring's hops go beside the tiles of the keys that are there; exchanges of heads,
gathers, the way into zigzag and back, and the last step of the gradients go beside nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpar.errors import LayoutError
from jaxpar.parallel.attention.attention_local import roles
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.partition import side
from jaxpar.parallel.attention.split.token_order import ORDERS, positions, zigzag_pairs
from jaxpar.parallel.attention.split.ulysses import repeats
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.rules import Axes

BLOCK = 512
CAUSAL = Mask(causal=True)
FORWARD, BACKWARD = 2, 5
"""Matmuls of a tile."""


@dataclass(frozen=True)
class Spread:
    """The mesh axes of each dim of queries, and of keys and values."""

    q: tuple[Axes, ...]
    kv: tuple[Axes, ...]


@dataclass(frozen=True)
class AttentionRequest:
    """What of an attention's options costs are counted from.

    Attributes:
      mask: which keys a query sees; of a function of positions, and of packed documents, nothing is taken to be hidden.
      order: how tokens lie, a name, or ``given`` by positions; ``None`` where a ring may lay them out itself.
      free: they do not lie so yet, but are brought into the order of a ring, if there is one, once for all layers.
      kv_grad_dtype: the dtype of travelling gradients.
      offset: the first query's position.
      hops: whether mask and order tell which hops of a ring see nothing; arrays may decide it.
    """

    mask: Mask = CAUSAL
    order: str | None = None
    free: bool = False
    kv_grad_dtype: str | None = None
    offset: int = 0
    hops: bool = True


class CostParts(NamedTuple):
    """How an implementation splits an attention. Bytes are those of one device.

    Attributes:
      ring, heads: the mesh axes of a ring, or of a gather, and of the exchange of heads.
      around, apart: devices along them.
      queries, keys: bytes of the queries, and of keys and values (repeated as far as the exchange wants it).
      gradients: bytes of the keys' and values' gradients, as they travel.
      exchanged: bytes before heads are exchanged, of queries, keys and values with their gradients and results.
      per_score: batch × heads × head_dim of the scores that one device computes.
      lengths: tokens of queries and keys along the ring.
    """

    ring: Axes
    heads: Axes
    around: int
    apart: int
    queries: float
    keys: float
    gradients: float
    exchanged: float
    per_score: float
    lengths: tuple[int, int]


@dataclass(frozen=True)
class Cost:
    """Of one device, forward and backward.

    Attributes:
      sent: bytes.
      compute: seconds of the critical path; a ring waits in each hop for the slowest device.
      exposed: seconds of sending with nothing beside it, and by which a hop outlasts its compute.
    """

    sent: float
    compute: float = 0.0
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def cost(
    impl: str,
    q: Any,
    k: Any,
    spread: Spread,
    sizes: Mapping[str, int],
    heads_axis: tuple[str, ...] = ("ulysses",),
    asked: AttentionRequest | None = None,
    links: Links | None = None,
) -> Cost | None:
    """What ``impl`` costs; ``None`` where it does not fit.

    Args:
      impl: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
      q, k: arrays or shapes [batch, seq, heads, head_dim].
      sizes: of the mesh axes.
      asked: ``None`` for a causal mask, and tokens brought into a ring's order once.
      links: of the devices; without them there are bytes and no seconds.
    """
    asked = asked or AttentionRequest(free=True)
    parts = _parts(impl, q, k, spread, sizes, heads_axis, asked)
    if parts is None:
        return None
    order, relay = _order(asked, parts)
    if impl == "ulysses" or parts.around == 1:
        hops: tuple[int, ...] = (0,)
        path: Any = np.array([work(asked.mask, parts.lengths, asked.offset, 1, "contiguous").sum()])
    else:
        done = work(asked.mask, parts.lengths, asked.offset, parts.around, order)
        hops = tuple(h for h in range(parts.around) if h == 0 or not asked.hops or done[:, h].any())
        path = np.array([done.sum(1).max()]) if impl == "gather" else done.max(0)[list(hops)]
    ways = parts.around
    sent = parts.exchanged * (parts.apart - 1) / parts.apart
    # Of queries, result and their gradients, and of keys, values and theirs; the gradients as wide as sums.
    moved = 4 * parts.queries + parts.keys * (1 + 4 / min(4, q.dtype.itemsize)) if relay else 0.0
    pairs = zigzag_pairs(ways) if relay else ()
    leaving = [sum(a != b for a, b in some) / ways for some in pairs]
    sent += sum(moved / 2 * share for share in leaving)
    if impl == "gather":
        sent += (ways - 1) * (2 * parts.keys + parts.gradients)
    else:
        sent += (len(hops) - 1) * (2 * parts.keys + parts.gradients)
    if links is None:
        return Cost(sent)
    flops = 2 * parts.per_score / _rate(links, q.dtype.itemsize)
    exposed = links.seconds("all-to-all", parts.heads, parts.exchanged * (parts.apart - 1) / parts.apart)
    exposed += sum(links.permute(parts.ring, moved / 2, some) for some in pairs)
    if impl == "gather":
        gathers = links.seconds("all-gather", parts.ring, 2 * (ways - 1) * parts.keys)
        exposed += gathers + links.seconds("reduce-scatter", parts.ring, (ways - 1) * parts.gradients)
    elif len(hops) > 1:
        exposed += _waits(links, parts, hops, path * flops)
    return Cost(sent, float(path.sum() * flops * (FORWARD + BACKWARD)), exposed)


def _waits(links: Links, parts: CostParts, hops: tuple[int, ...], seconds: Any) -> float:
    """Seconds by which sending outlasts computing; ``seconds`` are those of one matmul of each hop."""
    shift = lambda steps: [(i, (i + steps) % parts.around) for i in range(parts.around)]
    send = lambda size, steps: links.permute(parts.ring, size, shift(steps))
    waits, gaps = 0.0, [b - a for a, b in itertools.pairwise(hops)]
    for n, gap in enumerate(gaps):
        coming = send(parts.keys, gap)
        waits += max(0.0, coming - FORWARD * seconds[n])
        # Back, gradients follow their keys, one hop behind.
        following = send(parts.gradients, gaps[n - 1]) if n > 1 else 0.0
        waits += max(0.0, coming + following - BACKWARD * seconds[n])
    if len(gaps) > 1:
        waits += max(0.0, send(parts.gradients, gaps[-1]) - BACKWARD * seconds[-1])
    return waits + send(parts.gradients, -hops[-1] % parts.around)


def _rate(links: Links, itemsize: int) -> float:
    """Of matmuls at jax's default precision."""
    device = links.accelerator
    return device.rate("bf16") if itemsize <= 2 or device.tf32 is None else device.rate("tf32")


def _order(asked: AttentionRequest, parts: CostParts) -> tuple[str, bool]:
    """How the tokens lie on a ring's devices, and whether it brings them there itself."""
    if asked.order in ORDERS and asked.order != "zigzag":
        return str(asked.order), False
    even = all(length % (2 * parts.around) == 0 for length in parts.lengths)
    if asked.order is not None or asked.free:  # of a given order it is taken that it is as even
        return "zigzag" if even else "contiguous", False
    relay = even and asked.mask.sides == (None, 0) and asked.mask.chunk is None
    return ("zigzag" if relay else "contiguous"), relay and parts.around > 1


def _parts(
    impl: str,
    q: Any,
    k: Any,
    spread: Spread,
    sizes: Mapping[str, int],
    heads_axis: tuple[str, ...],
    asked: AttentionRequest,
) -> CostParts | None:
    share = lambda axes: math.prod(sizes[axis] for axis in axes)
    try:
        ring, heads = roles(impl, spread.q[1], heads_axis)
    except LayoutError:
        return None
    around, apart = share(ring), share(heads)
    local_heads, kv_heads = q.shape[2] // share(spread.q[2]), k.shape[2] // share(spread.kv[2])
    if local_heads % apart:
        return None
    batch, repeat = q.shape[0] / share(spread.q[0]), repeats(kv_heads, apart)
    each = q.dtype.itemsize * batch * q.shape[3] / share(spread.q[1])
    queries, keys = each * q.shape[1] * local_heads, 2 * each * k.shape[1] * kv_heads
    wide = 2 if asked.kv_grad_dtype == "bfloat16" else 4
    exchanged = (4 * queries + 2 * keys * repeat) if apart > 1 else 0.0
    gradients = keys * repeat * wide / min(4, q.dtype.itemsize)
    per_score = batch * local_heads / apart * q.shape[3]
    lengths = q.shape[1], k.shape[1]
    return CostParts(ring, heads, around, apart, queries, keys * repeat, gradients, exchanged, per_score, lengths)


@functools.lru_cache(maxsize=256)
def work(mask: Mask, lengths: tuple[int, int], offset: int, ways: int, order: str) -> Any:
    """Scores of the tiles that the mask leaves, [ways, hops]: in hop h a device has the keys of the one h places before it.

    From the first and last positions of blocks; of a long sequence in larger blocks.

    >>> (work(Mask(causal=True), (4096, 4096), 0, 2, "zigzag") // 512**2).tolist()
    [[10, 8], [10, 8]]
    """
    parts = 2 if order == "zigzag" and ways > 1 else 1
    if min(lengths) < ways * parts:
        return np.zeros((ways, ways), int)
    ends, sides = [], []
    for length, first in zip(lengths, (offset, 0), strict=True):
        each = side(length // ways // parts, max(BLOCK, length // 512))
        at = np.stack([np.asarray(positions(order, length, ways, i)) for i in range(ways)])  # type: ignore[arg-type]
        # A last block that is not full ends where the others of its device do.
        starts = np.arange(0, at.shape[1], each)
        low, high = np.minimum.reduceat(at, starts, 1), np.maximum.reduceat(at, starts, 1)
        ends.append((low + first, high + first))
        sides.append(each)
    (q_low, q_high), (k_low, k_high) = ends
    flat = lambda x: x.reshape(-1)
    some, _ = mask.bounds((flat(q_low)[:, None], flat(q_high)[:, None]), (flat(k_low)[None], flat(k_high)[None]))
    tiles = np.broadcast_to(some, (q_low.size, k_low.size)).reshape(ways, q_low.shape[1], ways, k_low.shape[1])
    pairs = tiles.sum((1, 3)) * sides[0] * sides[1]
    index = np.arange(ways)
    return pairs[index[:, None], (index[:, None] - index[None]) % ways]
