"""Which implementation a layout, the sizes of queries and keys, and the devices call for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import LayoutError, listing
from jaxpar.parallel.attention.cost_model import AttentionRequest, Cost, Spread, cost
from jaxpar.parallel.attention.kernels.select import Kernel, KernelChoice
from jaxpar.sharding.hardware.links import Links
from jaxpar.utils.contexts import attention_observer

DENSE = 512 * 512
"""So few scores of a head ``auto`` computes at once: they are no more than a tile."""
ROOM = 64
"""The part of a device's memory, one of so many, that keys of all devices may take for ``auto`` to gather them."""


@dataclass(frozen=True)
class Choice:
    """An implementation, the kernel that computes in it (empty for plain jax), and why."""

    impl: str
    kernel: Kernel
    why: str


def choice(
    asked: str,
    q: Any,
    k: Any,
    spread: Spread,
    sizes: Mapping[str, int],
    *,
    heads_axis: tuple[str, ...] = ("ulysses",),
    kernel: Callable[[str], KernelChoice] = lambda impl: KernelChoice("", "no kernel was asked for"),
    asks: AttentionRequest | None = None,
    links: Links | None = None,
) -> Choice:
    """What ``asked`` comes to.

    Args:
      q, k: arrays or shapes [batch, seq, heads, head_dim].
      sizes: of the mesh axes.
      kernel: what computes an implementation.
      asks: mask, order and dtype of travel; ``None`` for a causal mask and tokens brought into a ring's order once.
      links: of the mesh's devices. With them ``auto`` takes what takes the least time, without what sends the fewest bytes.

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
    over = lambda axes: listing(axes) if axes else "nothing"
    apart = f"the queries' sequence is split over {over(seq)}, the keys' over {over(spread.kv[1])}"
    if asked in ("auto", "split_kv") and _merges(spread):
        return Choice(
            "split_kv", "", f"{apart}: what each device finds in its keys is merged" if asked == "auto" else said
        )
    if asked == "split_kv":
        raise LayoutError(
            f"attention(impl='merge'): it wants queries whole, and keys split over axes that split nothing of the queries, but {apart}. Remedy: "
            f"impl='auto'."
        )
    if seq != spread.kv[1]:
        if asked == "auto":
            return Choice("dense", "", "queries and keys are split over different axes")
        raise LayoutError(
            f"attention(impl={asked!r}): {apart}. Remedy: the same rule for both, or impl='auto' or 'dense'."
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
    names = ["ulysses", "hybrid", "ring"]
    if asks is not None and asks.order in ("zigzag", "striped") and not asks.free:
        names.remove("ulysses")  # no ring, and so no order of its devices
    links = links if q.dtype.itemsize <= 4 else None  # of fp64 no maker tells
    # By bytes not ``gather``: it sends what a ring sends, which then does not travel while it computes.
    names += (
        ["gather"] if links is not None and _gathered(q, k, spread, sizes) <= links.accelerator.hbm_bytes / ROOM else []
    )
    counted = {impl: cost(impl, q, k, spread, sizes, heads_axis, asks, links) for impl in names}
    costs = {impl: c for impl, c in counted.items() if c is not None}
    by = (lambda c: c.sent) if links is None else (lambda c: c.seconds)
    best = min(costs, key=lambda impl: by(costs[impl]))
    ranked = sorted(costs.items(), key=lambda item: by(item[1]))
    return _by(best, _told(ranked, links), kernel(best))


def _merges(spread: Spread) -> bool:
    """Whether every device has all of the queries that belong to its keys, and others have other keys."""
    taken = {axis for axes in spread.q for axis in axes}
    return bool(spread.kv[1]) and not spread.q[1] and not taken & set(spread.kv[1]) and spread.q[0] == spread.kv[0]


def _told(ranked: list[tuple[str, Cost]], links: Links | None) -> str:
    """What each implementation costs, the cheapest first."""
    mib = lambda cost: f"{cost.sent / 2**20:.4g}"
    if links is None:
        return f"MiB that a device sends, forward and backward: {', '.join(f'{impl} {mib(c)}' for impl, c in ranked)}"
    ms = lambda seconds: f"{1e3 * seconds:.3g}"
    each = (
        f"{impl} {ms(c.seconds)} ({ms(c.compute)} of compute, {ms(c.exposed)} of waiting for {mib(c)} MiB)"
        for impl, c in ranked
    )
    return f"ms forward and backward by the roofline of {links.name}: {', '.join(each)}"


def _gathered(q: Any, k: Any, spread: Spread, sizes: Mapping[str, int]) -> float:
    """Bytes of the keys and values of all devices of a ring, and of their gradients in four bytes a number."""
    shares = [axis for axes in (spread.kv[0], spread.kv[2]) for axis in axes]
    numbers = 2.0 * k.shape[0] * k.shape[1] * k.shape[2] * k.shape[3]
    for axis in shares:
        numbers /= sizes[axis]
    return numbers * (q.dtype.itemsize + 4)


def choosing(callback: Callable[[str, Any, Any, Choice], None]) -> AbstractContextManager[None]:
    """While active, ``callback(call_site, q, k, choice)`` is told what ``auto`` takes."""
    return attention_observer(callback)


def observed(site: Callable[[], str], q: Any, k: Any, picked: Choice) -> None:
    if attention_observer.value is not None:
        attention_observer.value(site(), q, k, picked)


def _by(impl: str, why: str, found: KernelChoice) -> Choice:
    how = f"by the kernel {found.kernel!r}" if found.kernel else f"in plain jax, as {found.why}"
    return Choice(impl, found.kernel, f"{why}; {how}")


def sends(
    impl: str, q: Any, k: Any, spread: Spread, sizes: Mapping[str, int], heads_axis: tuple[str, ...] = ("ulysses",)
) -> float:
    """Bytes that a device sends in one forward and one backward pass of causal attention, tokens lying in a ring's order; 0 where the
    implementation does not fit.

    Keys and values, and with them their gradients in four bytes a number, go a whole ring; queries, results and their gradients are
    exchanged once each.
    """
    found = cost(impl, q, k, spread, sizes, heads_axis)
    return 0 if found is None else found.sent
