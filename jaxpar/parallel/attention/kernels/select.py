"""Selects the accelerator kernel that computes an attention, or reports why none can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.tiled.padding import up
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, TileSpec

Kernel = Literal["", "splash", "tiles", "mha"]
"""JAX's splash (TPU, full sequences), jaxpar's tiles (TPU, also in rings), JAX's mha (GPU); empty for plain JAX."""
LIST = 2**16
"""The maximum number of tiles in a list, which a TPU holds in scalar memory."""
BLOCK = 512


class KernelChoice(NamedTuple):
    """A kernel, or the empty string and the reason why no kernel applies."""

    kernel: Kernel
    why: str


def find(
    platform: str,
    arrays: Sequence[Any],
    rules: TileSpec,
    beside: AttentionArrays,
    offset: int = 0,
    *,
    split: bool = False,
) -> KernelChoice:
    """Returns the kernel for one device's work.

    Args:
      platform: the platform of the mesh's devices, such as ``tpu``.
      arrays: queries, keys and values ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      rules: mask, scale, soft cap and dropout.
      beside: array options.
      offset: the position of the first query.
      split: whether the queries also attend to keys of other devices.
    """
    q, k, v = arrays
    none = lambda why: KernelChoice("", why)
    if platform not in ("tpu", "gpu"):
        return none(f"kernels run on TPU and GPU, but the mesh is of {platform} devices")
    if q.dtype.itemsize > 4:
        return none(f"the kernel computes in float32, but the queries are {q.dtype.name}")
    if beside.segments is not None and any(x.dtype.itemsize > 4 for x in beside.segments):
        return none("the kernel compares segment_ids in int32, but they are traced int64")
    if platform == "gpu":
        return none("on GPU the kernel wants the sequence whole") if split else _on_gpu(q, k, v, rules, beside, offset)
    several = (
        ("bias", beside.bias is not None),
        ("alibi", beside.slopes is not None),
        ("dropout", bool(rules.dropout)),
        ("function of positions", rules.mask.where is not None),
    )
    if asked := [name for name, there in several if there]:
        return none(f"the kernel takes no {' and no '.join(asked)}")
    if (tiles := math.prod(up(x.shape[1], BLOCK) // BLOCK for x in (q, k))) > LIST:
        return none(
            f"the kernel lists {LIST} tiles at most, but {q.shape[1]} queries and {k.shape[1]} keys are {tiles}"
        )
    # splash requires every query to see some key. Under every mask a query sees itself if its position is also a key's.
    itself = not split and alike(q, k, v) and not offset and all(x is None for x in beside._replace(segments=None))
    return KernelChoice("splash" if itself else "tiles", "")


def alike(q: Any, k: Any, v: Any) -> bool:
    """Whether queries, keys and values have the same length and the same head_dim."""
    return bool(q.shape[1:4:2] == k.shape[1:4:2] == v.shape[1:4:2])


def _on_gpu(q: Any, k: Any, v: Any, rules: TileSpec, beside: AttentionArrays, offset: int) -> KernelChoice:
    simple = rules == TileSpec(Mask(causal=rules.mask.causal), rules.scale)
    if not simple or any(x is not None for x in beside._replace(segments=None)) or offset:
        return KernelChoice("", "the kernel knows the causal mask and none, segments and a scale")
    if beside.segments is not None and beside.segments[0] is not beside.segments[1]:
        return KernelChoice("", "the kernel wants one segment_ids for queries and keys")
    if not alike(q, k, v):
        return KernelChoice("", "the kernel wants as many queries as keys, and one head_dim")
    return KernelChoice("mha", "")
