"""Selects the implementation of an attention from the layout, the sizes of queries and keys, and the devices."""

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
"""The maximum number of scores per head for which ``auto`` picks ``dense``: one tile."""
ROOM = 64
"""``auto`` considers ``gather`` only if the gathered keys, values and gradients fit 1 / ROOM of a device's memory."""


@dataclass(frozen=True)
class Choice:
    """An implementation, its kernel (empty for plain JAX), and the reason for the choice."""

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
    """Returns the implementation and the kernel that a request resolves to.

    Args:
      asked: the requested implementation, or ``auto``.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      spread: the mesh axes that shard each dim of queries and keys.
      sizes: the sizes of the mesh axes.
      heads_axis: the mesh axes that may exchange heads.
      kernel: returns the kernel for an implementation.
      asks: the options that determine the cost. ``None`` for a causal mask, with tokens reordered once for all layers.
      links: the links of the mesh's devices. With links ``auto`` picks the fastest implementation, otherwise the one
        that sends the fewest bytes.

    Raises:
      LayoutError: the implementation does not support dims sharded in this way.
    """
    seq, said = spread.q[1], f"impl {asked!r} was asked for"
    if asked == "dense":
        return Choice("dense", "", said)
    if spread.q[3] or spread.kv[3]:
        if asked == "auto":
            return Choice("dense", "", "the head dim is split")
        split = listing(spread.q[3] or spread.kv[3])
        raise LayoutError(
            f"attention(impl={asked!r}): it wants the head dim whole, but the layout splits it over {split}. Remedy: "
            f"impl='auto' or 'dense'."
        )
    over = lambda axes: listing(axes) if axes else "nothing"
    apart = f"the queries' sequence is split over {over(seq)}, the keys' over {over(spread.kv[1])}"
    if asked in ("auto", "split_kv") and _merges(spread):
        return Choice(
            "split_kv", "", f"{apart}: what each device finds in its keys is merged" if asked == "auto" else said
        )
    if asked == "split_kv":
        raise LayoutError(
            f"attention(impl='split_kv'): it wants queries whole, and keys split over axes that split nothing of the "
            f"queries, but {apart}. Remedy: impl='auto'."
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
            f"attention(impl='flash'): it wants the sequence whole, but the layout splits it over {listing(seq)}. "
            f"Remedy: impl='auto', or one for a split sequence: 'ring', 'ulysses', 'gather'."
        )
    if asked != "auto":
        return _by(asked, said, kernel(asked))
    names = ["ulysses", "hybrid", "ring"]
    if asks is not None and asks.order in ("zigzag", "striped") and not asks.free:
        names.remove("ulysses")  # it has no ring, so a ring order cannot apply
    links = links if q.dtype.itemsize <= 4 else None  # vendors publish no fp64 peak
    # Bytes alone cannot rank ``gather``: it sends as much as a ring, but none of it overlaps with compute.
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
    """Whether ``split_kv`` applies: the keys' sequence is sharded over axes over which the queries are replicated."""
    taken = {axis for axes in spread.q for axis in axes}
    return bool(spread.kv[1]) and not spread.q[1] and not taken & set(spread.kv[1]) and spread.q[0] == spread.kv[0]


def _told(ranked: list[tuple[str, Cost]], links: Links | None) -> str:
    """Describes the cost of each implementation, cheapest first."""
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
    """Returns the bytes of gathered keys and values and of their gradients, at four bytes per gradient."""
    shares = [axis for axes in (spread.kv[0], spread.kv[2]) for axis in axes]
    numbers = 2.0 * k.shape[0] * k.shape[1] * k.shape[2] * k.shape[3]
    for axis in shares:
        numbers /= sizes[axis]
    return numbers * (q.dtype.itemsize + 4)


def choosing(callback: Callable[[str, Any, Any, Choice], None]) -> AbstractContextManager[None]:
    """While active, each ``auto`` attention calls ``callback(call_site, q, k, choice)``."""
    return attention_observer(callback)


def observed(site: Callable[[], str], q: Any, k: Any, picked: Choice) -> None:
    """Reports a choice of ``auto`` to the callback of :func:`choosing`, if there is one."""
    if attention_observer.value is not None:
        attention_observer.value(site(), q, k, picked)


def _by(impl: str, why: str, found: KernelChoice) -> Choice:
    how = f"by the kernel {found.kernel!r}" if found.kernel else f"in plain jax, as {found.why}"
    return Choice(impl, found.kernel, f"{why}; {how}")


def sends(
    impl: str, q: Any, k: Any, spread: Spread, sizes: Mapping[str, int], heads_axis: tuple[str, ...] = ("ulysses",)
) -> float:
    """Returns the bytes that a device sends in one forward and one backward pass of causal attention.

    A ring of n devices sends keys and values n - 1 times in each pass, and their gradients (four bytes per number)
    n - 1 times. A head exchange sends queries, results, keys, values and all their gradients once. Tokens are assumed
    to be in the ring's order already.

    Args:
      impl: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      spread: the mesh axes that shard each dim of queries and keys.
      sizes: the sizes of the mesh axes.
      heads_axis: the mesh axes that may exchange heads.

    Returns:
      Bytes; 0 if the implementation does not support this sharding.
    """
    found = cost(impl, q, k, spread, sizes, heads_axis)
    return 0 if found is None else found.sent
