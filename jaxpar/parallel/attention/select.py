"""Selects the implementation of an attention from the layout, the sizes of queries and keys, and the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import LayoutError, listing
from jaxpar.parallel.attention.cost_model import AttentionRequest, Cost, QKVSharding, cost
from jaxpar.parallel.attention.kernels.select import Kernel, KernelChoice
from jaxpar.sharding.hardware.links import Links, links_of
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.rules import Axes

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


def select_impl(
    requested: str,
    q: Any,
    k: Any,
    sharding: QKVSharding,
    sizes: Mapping[str, int],
    *,
    heads_axis: tuple[str, ...] = ("ulysses",),
    kernel: Callable[[str], KernelChoice] = lambda impl: KernelChoice("", "no kernel was requested"),
    request: AttentionRequest | None = None,
    links: Links | None = None,
) -> Choice:
    """Returns the implementation and the kernel that a request resolves to.

    Args:
      requested: the requested implementation, or ``auto``. A sequence that no axis shards is on the device already,
        so every implementation but ``dense`` and ``split_kv`` then runs as ``flash``.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      sharding: the mesh axes that shard each dim of queries and keys.
      sizes: the sizes of the mesh axes.
      heads_axis: the mesh axes that may exchange heads.
      kernel: returns the kernel for an implementation.
      request: the options that determine the cost. ``None`` for a causal mask, with tokens reordered once for all
        layers.
      links: the links of the mesh's devices. With links ``auto`` picks the fastest implementation, otherwise the one
        that sends the fewest bytes.

    Raises:
      LayoutError: the implementation does not support dims sharded in this way.

    >>> import jax
    >>> from jaxpar.context import QKVSharding
    >>> q = jax.ShapeDtypeStruct((1, 4096, 8, 64), "bfloat16")
    >>> axes = ((), ("context",), (), ())
    >>> select_impl("auto", q, q, QKVSharding(axes, axes), {"context": 8}).impl
    'ulysses'
    """
    seq, why = sharding.q[1], f"impl {requested!r} was requested"
    if requested == "dense":
        return Choice("dense", "", why)
    if sharding.q[3] or sharding.kv[3]:
        if requested == "auto":
            return Choice("dense", "", "the head dim is sharded")
        split = listing(sharding.q[3] or sharding.kv[3])
        raise LayoutError(
            f"attention(impl={requested!r}): the head dim must not be sharded, but the layout shards it over {split}. "
            f"Remedy: use impl='auto' or 'dense'."
        )
    describe = lambda axes: f"sharded over {listing(axes)}" if axes else "not sharded"
    where = f"the queries' sequence is {describe(seq)}, the keys' sequence is {describe(sharding.kv[1])}"
    if requested in ("auto", "split_kv") and _supports_split_kv(sharding):
        merged = f"{where}: the devices merge their partial results"
        return Choice("split_kv", "", merged if requested == "auto" else why)
    if requested == "split_kv":
        raise LayoutError(
            f"attention(impl='split_kv'): the queries' sequence must not be sharded, and the keys' sequence must be "
            f"sharded over axes that shard no dim of the queries, but {where}. Remedy: use impl='auto'."
        )
    if seq != sharding.kv[1]:
        if requested == "auto":
            return Choice("dense", "", "queries and keys are sharded over different axes")
        raise LayoutError(
            f"attention(impl={requested!r}): both sequences must be sharded over the same axes, but {where}. "
            f"Remedy: use the same rule for both, or impl='auto' or 'dense'."
        )
    if not seq:
        found = kernel("flash")
        if found.kernel:
            return _with_kernel("flash", "the sequence is not sharded" if requested == "auto" else why, found)
        if requested == "auto" and q.shape[1] * k.shape[1] <= DENSE:
            return Choice("dense", "", f"{q.shape[1]} × {k.shape[1]} scores fit one tile")
        return _with_kernel("flash", "the sequence is not sharded", found)
    if requested == "flash":
        raise LayoutError(
            f"attention(impl='flash'): the sequence must not be sharded, but the layout shards it over {listing(seq)}. "
            f"Remedy: use impl='auto', or an implementation for a sharded sequence: 'ring', 'ulysses', 'gather'."
        )
    if requested != "auto":
        return _with_kernel(requested, why, kernel(requested))
    names = ["ulysses", "hybrid", "ring"]
    if request is not None and request.order in ("zigzag", "striped") and not request.free:
        names.remove("ulysses")  # it has no ring, so a ring order cannot apply
    links = links if q.dtype.itemsize <= 4 else None  # vendors publish no fp64 peak
    # Bytes alone cannot rank ``gather``: it sends as much as a ring, but none of it overlaps with compute.
    if links is not None and _gathered(q, k, sharding, sizes) <= links.accelerator.hbm_bytes / ROOM:
        names.append("gather")
    counted = {impl: cost(impl, q, k, sharding, sizes, heads_axis, request, links) for impl in names}
    costs = {impl: c for impl, c in counted.items() if c is not None}
    ranked = sorted(costs.items(), key=lambda item: item[1].sent if links is None else item[1].seconds)
    best = ranked[0][0]
    return _with_kernel(best, _describe_costs(ranked, links), kernel(best))


def select_here(requested: str, q: Any, k: Any, sharding: QKVSharding, **options: Any) -> Choice:
    """Returns :func:`select_impl` for the devices of the ambient layout."""
    layout = current_layout()
    links = links_of(layout.mesh, layout.rings) if requested == "auto" else None
    return select_impl(requested, q, k, sharding, layout.sizes, links=links, **options)


def _supports_split_kv(sharding: QKVSharding) -> bool:
    """Whether ``split_kv`` applies: the keys' sequence is sharded over axes over which the queries are replicated."""
    q_axes = {axis for axes in sharding.q for axis in axes}
    replicated = not sharding.q[1] and not q_axes & set(sharding.kv[1])
    return bool(sharding.kv[1]) and replicated and sharding.q[0] == sharding.kv[0]


def _describe_costs(ranked: list[tuple[str, Cost]], links: Links | None) -> str:
    """Describes the cost of each implementation, cheapest first."""
    mib = lambda cost: f"{cost.sent / 2**20:.4g}"
    if links is None:
        return f"MiB sent per device, forward and backward: {', '.join(f'{impl} {mib(c)}' for impl, c in ranked)}"
    ms = lambda seconds: f"{1e3 * seconds:.3g}"
    parts = (
        f"{impl} {ms(c.seconds)} ({ms(c.compute)} compute, {ms(c.exposed)} exposed while sending {mib(c)} MiB)"
        for impl, c in ranked
    )
    return f"estimated ms, forward and backward, by the roofline of {links.name}: {', '.join(parts)}"


def _gathered(q: Any, k: Any, sharding: QKVSharding, sizes: Mapping[str, int]) -> float:
    """Returns the bytes of gathered keys and values and of their gradients, at four bytes per gradient."""
    num_shards = math.prod(sizes[axis] for axes in (sharding.kv[0], sharding.kv[2]) for axis in axes)
    return 2.0 * math.prod(k.shape) / num_shards * (q.dtype.itemsize + 4)


def _with_kernel(impl: str, why: str, found: KernelChoice) -> Choice:
    how = f"with the kernel {found.kernel!r}" if found.kernel else f"in plain JAX: {found.why}"
    return Choice(impl, found.kernel, f"{why}; {how}")


def bytes_sent(
    impl: str, q: Any, k: Any, sharding: QKVSharding, sizes: Mapping[str, int], heads_axis: Axes = ("ulysses",)
) -> float:
    """Returns the bytes that a device sends in one forward and one backward pass of causal attention.

    A ring of n devices sends keys and values n - 1 times in each pass, and their gradients (four bytes per number)
    n - 1 times. A head exchange sends queries, results, keys, values and all their gradients once. Tokens are assumed
    to be in the ring's order already.

    Args:
      impl: ``ring``, ``gather``, ``ulysses`` or ``hybrid``.
      q, k: queries and keys ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      sharding: the mesh axes that shard each dim of queries and keys.
      sizes: the sizes of the mesh axes.
      heads_axis: the mesh axes that may exchange heads.

    Returns:
      Bytes; 0 if the implementation does not support this sharding.

    >>> import jax
    >>> from jaxpar.context import QKVSharding
    >>> q = jax.ShapeDtypeStruct((1, 4096, 8, 64), "bfloat16")
    >>> axes = ((), ("context",), (), ())
    >>> {impl: bytes_sent(impl, q, q, QKVSharding(axes, axes), {"context": 8}) / 2**20 for impl in ("ring", "ulysses")}
    {'ring': 28.0, 'ulysses': 3.5}
    """
    found = cost(impl, q, k, sharding, sizes, heads_axis)
    return 0 if found is None else found.sent
