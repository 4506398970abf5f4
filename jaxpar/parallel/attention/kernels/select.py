"""Selects the accelerator kernel that computes an attention, or reports why none can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jaxpar.parallel.attention.kernels import gpu_cudnn
from jaxpar.parallel.attention.tiled.padding import up
from jaxpar.parallel.attention.tiled.tile import AttentionArrays, TileSpec

Kernel = Literal["", "splash", "tiles", "cudnn"]
"""JAX's splash (TPU, full sequences), jaxpar's tiles (TPU, also in rings), cuDNN's (GPU); empty for plain JAX."""
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
    lengths: tuple[int, int] | None = None,
    split: bool = False,
    attached: bool = False,
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
      attached: whether the devices are attached to this machine; then jax is asked whether it can lower the kernel.
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
        width = max(q.shape[3], v.shape[3])
        why = _why_not_cudnn(q, width, rules, array_options, offset, (rows, columns), split)
        if not why and attached:
            refused = gpu_cudnn.refusal(q, k.shape[2], rows, width, rules, segments)
            why = refused and f"jax cannot lower cuDNN's attention here: {refused}"
        return none(why) if why else KernelChoice("cudnn", "")
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
    # splash requires every query to see some key. Under every mask a query sees itself if its position is also a key's,
    # and its segment too.
    same = one_size and (segments is None or segments[0] is segments[1])
    return KernelChoice("splash" if only_segments and same and not split else "tiles", "")


def _why_not_cudnn(
    q: Any,
    width: int,
    rules: TileSpec,
    array_options: AttentionArrays,
    offset: int,
    lengths: tuple[int, int],
    split: bool,
) -> str:
    """Returns why cuDNN's attention cannot compute this; empty if it can."""
    if q.dtype.name not in gpu_cudnn.DTYPES:
        return f"cuDNN's attention takes {' and '.join(gpu_cudnn.DTYPES)}, but the queries are {q.dtype.name}"
    if split:
        return "cuDNN's attention requires an unsharded sequence"
    mask = rules.mask
    features = {
        "bias": array_options.bias is not None,
        "alibi": array_options.slopes is not None,
        "sinks": array_options.sinks is not None,
        "dropout": bool(rules.dropout),
        "a soft cap": rules.softcap is not None,
        "windows of later tokens": mask.sides[1] != 0 and mask.sides != (None, None),
        "prefixes": mask.prefix is not None or array_options.prefix is not None,
        "chunks": mask.chunk is not None,
        "mask functions": mask.where is not None,
        "q_offset": bool(offset) or array_options.offset is not None,
        "a given order": array_options.order is not None,
    }
    if unsupported := [name for name, given in features.items() if given]:
        return f"cuDNN's attention does not support {' or '.join(unsupported)}"
    rows, columns = lengths
    if rows != columns:
        return f"cuDNN's attention is used for as many queries as keys, but there are {rows} and {columns}"
    if width > gpu_cudnn.WIDEST:
        return f"cuDNN's attention takes a head_dim of at most {gpu_cudnn.WIDEST}, but it is {width}"
    if gpu_cudnn.is_masked(mask, array_options.segments, rows) and rows * columns > gpu_cudnn.MASKED:
        what = "segment_ids" if array_options.segments is not None else "an odd number of tokens"
        return (
            f"for {what} cuDNN's attention reads a mask of at most {gpu_cudnn.MASKED} scores of a sequence, but "
            f"{rows} queries and {columns} keys have {rows * columns}"
        )
    return ""
