"""Which implementation a layout and the sizes of queries and keys call for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.attn.heads import repeats
from jaxpar.attn.kernels import Found, Kernel
from jaxpar.attn.local import roles
from jaxpar.errors import LayoutError, listing
from jaxpar.rules import Axes

DENSE = 512 * 512
"""So few scores of a head ``auto`` computes at once: they are no more than a tile."""


@dataclass(frozen=True)
class Choice:
    """An implementation, the kernel that computes in it (empty for plain jax), and why."""

    impl: str
    kernel: Kernel
    why: str


@dataclass(frozen=True)
class Spread:
    """The mesh axes of each dim of queries, and of keys and values."""

    q: tuple[Axes, ...]
    kv: tuple[Axes, ...]


def choice(
    asked: str,
    q: Any,
    k: Any,
    spread: Spread,
    sizes: Mapping[str, int],
    *,
    heads_axis: tuple[str, ...] = ("ulysses",),
    kernel: Callable[[str], Found] = lambda impl: Found("", "no kernel was asked for"),
) -> Choice:
    """What ``asked`` comes to.

    Args:
      q, k: arrays or shapes [batch, seq, heads, head_dim].
      sizes: of the mesh axes.
      kernel: what computes an implementation.

    Raises:
      LayoutError: the implementation cannot work with dims split in this way.
    """
    seq, said = spread.q[1], f"impl {asked!r} was asked for"
    if asked == "dense":
        return Choice("dense", "", said)
    if spread.q[3] or spread.kv[3]:
        if asked == "auto":
            return Choice("dense", "", "the head dim is split")
        split = listing(spread.q[3] or spread.kv[3])
        raise LayoutError(
            f"attention(impl={asked!r}): it wants the head dim whole, but the layout splits it over {split}. Remedy: impl='auto' or 'dense'."
        )
    if seq != spread.kv[1]:
        if asked == "auto":
            return Choice("dense", "", "queries and keys are split over different axes")
        raise LayoutError(
            f"attention(impl={asked!r}): the queries' sequence is split over {listing(seq) if seq else 'nothing'}, the keys' over "
            f"{listing(spread.kv[1]) if spread.kv[1] else 'nothing'}. Remedy: the same rule for both, or impl='dense'."
        )
    if not seq:
        found = kernel("flash")
        if found.kernel:
            return _by("flash", "the sequence is whole" if asked == "auto" else said, found)
        if asked == "auto" and q.shape[1] * k.shape[1] <= DENSE:
            return Choice("dense", "", f"{q.shape[1]} × {k.shape[1]} scores are no more than a tile")
        return _by("flash", "the sequence is whole", found)
    if asked == "flash":
        raise LayoutError(
            f"attention(impl='flash'): it wants the sequence whole, but the layout splits it over {listing(seq)}. Remedy: impl='auto', or one for "
            f"a split sequence: 'ring', 'ulysses', 'gather'."
        )
    if asked != "auto":
        return _by(asked, said, kernel(asked))
    # Not ``gather``: it sends what a ring sends, which then does not travel while it computes.
    sent = {impl: sends(impl, q, k, spread, sizes, heads_axis) for impl in ("ulysses", "hybrid", "ring")}
    sent = {impl: n for impl, n in sent.items() if n}
    best = min(sent, key=lambda impl: sent[impl])
    told = ", ".join(f"{impl} {n / 2**20:.4g}" for impl, n in sorted(sent.items(), key=lambda item: item[1]))
    return _by(best, f"MiB that a device sends, forward and backward: {told}", kernel(best))


def _by(impl: str, why: str, found: Found) -> Choice:
    how = f"by the kernel {found.kernel!r}" if found.kernel else f"in plain jax, as {found.why}"
    return Choice(impl, found.kernel, f"{why}; {how}")


def sends(
    impl: str, q: Any, k: Any, spread: Spread, sizes: Mapping[str, int], heads_axis: tuple[str, ...] = ("ulysses",)
) -> float:
    """Bytes that a device sends in one forward and one backward pass; 0 where the implementation does not fit.

    Keys and values, and with them their gradients in four bytes a number, go a whole ring; queries, results and their gradients are
    exchanged once each.
    """
    share = lambda axes: math.prod(sizes[axis] for axis in axes)
    try:
        ring, heads = roles(impl, spread.q[1], heads_axis)
    except LayoutError:
        return 0
    around, apart = share(ring), share(heads)
    local_heads = q.shape[2] // share(spread.q[2])
    if local_heads % apart:
        return 0
    each = q.dtype.itemsize * q.shape[0] / share(spread.q[0]) * q.shape[3] / share(spread.q[1])
    kv_heads = k.shape[2] // share(spread.kv[2])
    queries, keys = each * q.shape[1] * local_heads, 2 * each * k.shape[1] * kv_heads
    exchanged = (4 * queries + 2 * keys * repeats(kv_heads, apart)) * (apart - 1) / apart
    wider = 4 / min(4, q.dtype.itemsize)
    per_device = keys * repeats(kv_heads, apart)
    return exchanged + (around - 1) * per_device * (2 + wider)
