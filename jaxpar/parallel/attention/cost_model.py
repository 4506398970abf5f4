"""Cost model of attention over a sharded sequence: bytes that a device sends and, on known devices, seconds.

It is a roofline model of peak rates and bytes, as in :mod:`jaxpar.sharding.hardware.links`. A ring's hop overlaps with
the tiles of the keys already received. Head exchanges, gathers, the reordering into zigzag and back, and the last step
of the gradients are exposed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpar.errors import LayoutError
from jaxpar.parallel.attention.attention_local import roles
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.split.partition import side, visible_blocks
from jaxpar.parallel.attention.split.token_order import ORDERS, by_hop, positions_of_all, zigzag_pairs
from jaxpar.parallel.attention.split.ulysses import repeats
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes

BLOCK = 512
CAUSAL = Mask(causal=True)
FORWARD, BACKWARD = 2, 5
"""Matmuls per tile in the forward and in the backward pass."""


@dataclass(frozen=True)
class QKVSharding:
    """The mesh axes that shard each dim of the queries, and of the keys and values.

    Attributes:
      q: for each of the dims ``[batch, seq, heads, head_dim]`` of the queries a tuple of axes, major to minor.
      kv: the same for the dims ``[batch, seq, kv_heads, head_dim]`` of the keys and values.

    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4, context=8).abstract(), jp.Rules(batch="data", seq="context"))
    >>> axes = layout.resolve(("batch", "seq", None, None)).axes
    >>> QKVSharding(q=axes, kv=axes).q
    (('data',), ('context',), (), ())
    """

    q: tuple[Axes, ...]
    kv: tuple[Axes, ...]


@dataclass(frozen=True)
class AttentionRequest:
    """The options of an attention that determine its cost.

    Attributes:
      mask: which keys a query sees. A ``where`` function and packed documents are assumed to hide nothing.
      order: the token order by name, or ``given`` for explicit positions; ``None`` if a ring may reorder the tokens
        itself.
      free: whether the caller reorders the tokens once for all layers if there is a ring.
      kv_grad_dtype: the dtype in which devices send gradients of keys and values.
      offset: the first query's position.
      hops: whether mask and order determine which hops of a ring see nothing; False if that depends on arrays.
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
      ring: the mesh axes of the ring or of the gather.
      heads: the mesh axes of the head exchange.
      ring_size: number of devices along ``ring``.
      exchange_size: number of devices along ``heads``.
      queries: bytes of the queries.
      keys: bytes of the keys and values, including the key heads repeated for the head exchange.
      gradients: bytes of the keys' and values' gradients, in the dtype in which they are sent.
      exchanged: bytes that enter head exchanges: queries, results, keys and values, and their gradients.
      per_score: batch × heads × head_dim of one device: the multiply-adds of one matmul per pair of query and key.
      lengths: number of queries and of keys along the ring.
    """

    ring: Axes
    heads: Axes
    ring_size: int
    exchange_size: int
    queries: float
    keys: float
    gradients: float
    exchanged: float
    per_score: float
    lengths: tuple[int, int]


@dataclass(frozen=True)
class Cost:
    """The cost of one forward and one backward pass on one device.

    Attributes:
      sent: bytes sent.
      compute: compute seconds on the critical path; each hop of a ring takes as long as its slowest device.
      exposed: seconds of communication that does not overlap with compute.
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
    sharding: QKVSharding,
    sizes: Mapping[str, int],
    heads_axis: tuple[str, ...] = ("ulysses",),
    request: AttentionRequest | None = None,
    links: Links | None = None,
) -> Cost | None:
    """Returns the cost of ``impl``, or ``None`` if it does not support this sharding.

    Args:
      impl: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      sharding: the mesh axes that shard each dim of queries and keys.
      sizes: the sizes of the mesh axes.
      heads_axis: the mesh axes that may exchange heads.
      request: the options that determine the cost. ``None`` for a causal mask, with tokens reordered once for all
        layers.
      links: the links of the devices. Without them only bytes are counted, and the seconds are 0.
    """
    request = request or AttentionRequest(free=True)
    wide = 2 if request.kv_grad_dtype == "bfloat16" else 4
    if (parts := _parts(impl, q, k, sharding, sizes, heads_axis, wide)) is None:
        return None
    order, relay = _order(request, parts)
    if impl == "ulysses" or parts.ring_size == 1:
        hops: tuple[int, ...] = (0,)
        path: Any = np.array([work(request.mask, parts.lengths, request.offset, 1, "contiguous").sum()])
    else:
        done = work(request.mask, parts.lengths, request.offset, parts.ring_size, order)
        hops = tuple(h for h in range(parts.ring_size) if h == 0 or not request.hops or done[:, h].any())
        path = np.array([done.sum(1).max()]) if impl == "gather" else done.max(0)[list(hops)]
    ring_size = parts.ring_size
    exchanged = parts.exchanged * (parts.exchange_size - 1) / parts.exchange_size
    # Reordering moves q, o, k, v and all their gradients; the gradients of k and v have the dtype of the sums.
    moved = 4 * parts.queries + parts.keys * (1 + 4 / min(4, q.dtype.itemsize)) if relay else 0.0
    pairs = zigzag_pairs(ring_size) if relay else ()
    leaving = [sum(a != b for a, b in some) / ring_size for some in pairs]
    sent = exchanged + sum(moved / 2 * share for share in leaving)
    sent += (ring_size - 1 if impl == "gather" else len(hops) - 1) * (2 * parts.keys + parts.gradients)
    if links is None:
        return Cost(sent)
    flops = 2 * parts.per_score / _rate(links, q.dtype.itemsize)
    exposed = links.seconds("all-to-all", parts.heads, exchanged)
    exposed += sum(links.permute(parts.ring, moved / 2, some) for some in pairs)
    if impl == "gather":
        gathers = links.seconds("all-gather", parts.ring, 2 * (ring_size - 1) * parts.keys)
        exposed += gathers + links.seconds("reduce-scatter", parts.ring, (ring_size - 1) * parts.gradients)
    elif len(hops) > 1:
        exposed += _exposed_sends(links, parts, hops, path * flops)
    return Cost(sent, float(path.sum() * flops * (FORWARD + BACKWARD)), exposed)


def _exposed_sends(links: Links, parts: CostParts, hops: tuple[int, ...], seconds: Any) -> float:
    """Returns the seconds by which sending outlasts computing; ``seconds`` is the time of one matmul in each hop."""
    shift = lambda steps: [(i, (i + steps) % parts.ring_size) for i in range(parts.ring_size)]
    send = lambda size, steps: links.permute(parts.ring, size, shift(steps))
    exposed, gaps = 0.0, [b - a for a, b in itertools.pairwise(hops)]
    for n, gap in enumerate(gaps):
        coming = send(parts.keys, gap)
        exposed += max(0.0, coming - FORWARD * seconds[n])
        # In the backward pass the gradients follow their keys one hop behind.
        following = send(parts.gradients, gaps[n - 1]) if n > 1 else 0.0
        exposed += max(0.0, coming + following - BACKWARD * seconds[n])
    if len(gaps) > 1:
        exposed += max(0.0, send(parts.gradients, gaps[-1]) - BACKWARD * seconds[-1])
    return exposed + send(parts.gradients, -hops[-1] % parts.ring_size)


def _rate(links: Links, itemsize: int) -> float:
    """Returns the peak rate of matmuls at JAX's default precision."""
    device = links.accelerator
    return device.rate("bf16") if itemsize <= 2 or device.tf32 is None else device.rate("tf32")


def _order(request: AttentionRequest, parts: CostParts) -> tuple[str, bool]:
    """Returns the token order of a ring, and whether the ring itself reorders the tokens."""
    if request.order in ORDERS and request.order != "zigzag":
        return str(request.order), False
    even = all(length % (2 * parts.ring_size) == 0 for length in parts.lengths)
    if request.order is not None or request.free:  # a given order is assumed to balance as well as zigzag
        return "zigzag" if even else "contiguous", False
    relay = even and request.mask.sides == (None, 0) and request.mask.chunk is None
    return ("zigzag" if relay else "contiguous"), relay and parts.ring_size > 1


def _parts(
    impl: str, q: Any, k: Any, sharding: QKVSharding, sizes: Mapping[str, int], heads_axis: Axes, wide: int
) -> CostParts | None:
    """Returns the parts, with ``wide`` bytes per gradient of a key; ``None`` if the sharding is not supported."""
    try:
        ring, heads = roles(impl, sharding.q[1], heads_axis)
    except LayoutError:
        return None
    ring_size, exchange_size = num_shards_over(ring, sizes), num_shards_over(heads, sizes)
    local_heads = q.shape[2] // num_shards_over(sharding.q[2], sizes)
    kv_heads = k.shape[2] // num_shards_over(sharding.kv[2], sizes)
    if local_heads % exchange_size:
        return None
    batch, repeat = q.shape[0] / num_shards_over(sharding.q[0], sizes), repeats(kv_heads, exchange_size)
    each = q.dtype.itemsize * batch * q.shape[3] / num_shards_over(sharding.q[1], sizes)
    queries, keys = each * q.shape[1] * local_heads, 2 * each * k.shape[1] * kv_heads
    exchanged = (4 * queries + 2 * keys * repeat) if exchange_size > 1 else 0.0
    gradients = keys * repeat * wide / min(4, q.dtype.itemsize)
    per_score = batch * local_heads / exchange_size * q.shape[3]
    lengths = q.shape[1], k.shape[1]
    return CostParts(
        ring, heads, ring_size, exchange_size, queries, keys * repeat, gradients, exchanged, per_score, lengths
    )


@functools.lru_cache(maxsize=256)
def work(mask: Mask, lengths: tuple[int, int], offset: int, num_shards: int, order: str) -> Any:
    """Counts the scores in visible tiles [num_shards, hops]. In hop h a device has the keys of the one h before it.

    The count uses only the minimum and maximum positions of blocks, and larger blocks for long sequences.

    >>> (work(Mask(causal=True), (4096, 4096), 0, 2, "zigzag") // 512**2).tolist()
    [[10, 8], [10, 8]]
    """
    parts = 2 if order == "zigzag" and num_shards > 1 else 1
    if min(lengths) < num_shards * parts:
        return np.zeros((num_shards, num_shards), int)
    blocks = [side(length // num_shards // parts, max(BLOCK, length // 512)) for length in lengths]
    q, k = (positions_of_all(order, length, num_shards) for length in lengths)  # type: ignore[arg-type]
    tiles = visible_blocks(mask, (q + offset, k), (blocks[0], blocks[1]))
    return by_hop(tiles.sum((1, 3)) * blocks[0] * blocks[1])
