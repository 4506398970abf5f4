"""Selects the accelerator kernel that computes an attention, or reports why none can."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.tiled.padding import up
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, TileSpec

Kernel = Literal["", "splash", "tiles", "mha"]
"""JAX's splash (TPU, full sequences), jaxpar's tiles (TPU, also in rings), JAX's mha (GPU); empty for plain JAX."""
LIST = 2**16
"""The maximum number of tiles in a list, which a TPU holds in scalar memory."""
BLOCK = 512
_GPU_KERNEL = "jax.experimental.pallas.ops.gpu.attention"
"""It is deprecated. Where jax has removed it, attention runs in plain JAX."""


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
    lengths: tuple[int, int] | None = None,
    split: bool = False,
) -> KernelChoice:
    """Returns the kernel for one device's work.

    Args:
      platform: the platform of the mesh's devices, such as ``tpu``.
      arrays: queries, keys and values ``[batch, seq, heads, head_dim]``, as arrays or shapes.
      rules: mask, scale, soft cap and dropout.
      array_options: array options.
      offset: the position of the first query.
      lengths: number of queries and of keys that the device computes at a time, if not those of ``arrays``.
      split: whether the queries also attend to keys of other devices.
    """
    q, k, v = arrays
    rows, columns = lengths or (q.shape[1], k.shape[1])
    one_size = rows == columns and q.shape[3] == v.shape[3]
    segments = array_options.segments
    only_segments = not offset and all(x is None for x in array_options._replace(segments=None))
    none = lambda why: KernelChoice("", why)
    if platform not in ("tpu", "gpu"):
        return none(f"kernels run only on TPU and GPU, but the mesh has {platform} devices")
    if q.dtype.itemsize > 4:
        return none(f"the kernel computes in float32, but the queries are {q.dtype.name}")
    if segments is not None and any(x.dtype.itemsize > 4 for x in segments):
        return none("the kernel compares segment_ids in int32, but they are traced int64")
    if platform == "gpu":
        if not _has_gpu_kernel():
            return none(f"this jax ({jax.__version__}) no longer has the GPU kernel {_GPU_KERNEL}")
        if split:
            return none("the GPU kernel requires an unsharded sequence")
        if not only_segments or rules != TileSpec(Mask(causal=rules.mask.causal), rules.scale):
            return none("the kernel supports only a causal mask or none, segment_ids and a scale")
        if segments is not None and segments[0] is not segments[1]:
            return none("the kernel requires the same segment_ids for queries and keys")
        if not one_size:
            return none("the kernel requires as many queries as keys, and one head_dim for queries, keys and values")
        return KernelChoice("mha", "")
    features = {
        "bias": array_options.bias is not None,
        "alibi": array_options.slopes is not None,
        "dropout": bool(rules.dropout),
        "mask functions": rules.mask.where is not None,
    }
    if unsupported := [name for name, given in features.items() if given]:
        return none(f"the kernel does not support {' or '.join(unsupported)}")
    if (tiles := math.prod(up(length, BLOCK) // BLOCK for length in (rows, columns))) > LIST:
        return none(f"the kernel supports at most {LIST} tiles, but {rows} queries and {columns} keys need {tiles}")
    # splash requires every query to see some key. Under every mask a query sees itself if its position is also a key's.
    return KernelChoice("splash" if only_segments and one_size and not split else "tiles", "")


def _has_gpu_kernel() -> bool:
    try:
        return importlib.util.find_spec(_GPU_KERNEL) is not None
    except ModuleNotFoundError:  # one of its packages is gone
        return False
