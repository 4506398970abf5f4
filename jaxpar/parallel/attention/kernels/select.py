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
    array_options: AttentionArrays,
    offset: int = 0,
    *,
    split: bool = False,
) -> KernelChoice:
    """Returns the kernel for one device's work.

    Args:
      platform: the platform of the mesh's devices, such as ``tpu``.
      arrays: queries, keys and values ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      rules: mask, scale, soft cap and dropout.
      array_options: array options.
      offset: the position of the first query.
      split: whether the queries also attend to keys of other devices.
    """
    q, k, v = arrays
    none = lambda why: KernelChoice("", why)
    if platform not in ("tpu", "gpu"):
        return none(f"kernels run only on TPU and GPU, but the mesh has {platform} devices")
    if q.dtype.itemsize > 4:
        return none(f"the kernel computes in float32, but the queries are {q.dtype.name}")
    if array_options.segments is not None and any(x.dtype.itemsize > 4 for x in array_options.segments):
        return none("the kernel compares segment_ids in int32, but they are traced int64")
    if platform == "gpu":
        return (
            none("the GPU kernel requires an unsharded sequence")
            if split
            else _on_gpu(q, k, v, rules, array_options, offset)
        )
    several = (
        ("bias", array_options.bias is not None),
        ("alibi", array_options.slopes is not None),
        ("dropout", bool(rules.dropout)),
        ("mask functions", rules.mask.where is not None),
    )
    if unsupported := [name for name, there in several if there]:
        return none(f"the kernel does not support {' or '.join(unsupported)}")
    if (tiles := math.prod(up(x.shape[1], BLOCK) // BLOCK for x in (q, k))) > LIST:
        return none(
            f"the kernel supports at most {LIST} tiles, but {q.shape[1]} queries and {k.shape[1]} keys need {tiles}"
        )
    # splash requires every query to see some key. Under every mask a query sees itself if its position is also a key's.
    itself = (
        not split and alike(q, k, v) and not offset and all(x is None for x in array_options._replace(segments=None))
    )
    return KernelChoice("splash" if itself else "tiles", "")


def alike(q: Any, k: Any, v: Any) -> bool:
    """Whether queries, keys and values have the same length and the same head_dim."""
    return bool(q.shape[1:4:2] == k.shape[1:4:2] == v.shape[1:4:2])


def _on_gpu(q: Any, k: Any, v: Any, rules: TileSpec, array_options: AttentionArrays, offset: int) -> KernelChoice:
    simple = rules == TileSpec(Mask(causal=rules.mask.causal), rules.scale)
    if not simple or any(x is not None for x in array_options._replace(segments=None)) or offset:
        return KernelChoice("", "the kernel supports only a causal mask or none, segment_ids and a scale")
    if array_options.segments is not None and array_options.segments[0] is not array_options.segments[1]:
        return KernelChoice("", "the kernel requires the same segment_ids for queries and keys")
    if not alike(q, k, v):
        return KernelChoice(
            "", "the kernel requires as many queries as keys, and one head_dim for queries, keys and values"
        )
    return KernelChoice("mha", "")
