"""``attention``: causal attention on global arrays, by the best means that the accelerator and the layout allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxpar.attn.blocks import SAVED
from jaxpar.attn.mha import mha
from jaxpar.attn.splash import splash
from jaxpar.errors import LayoutError, listing
from jaxpar.layout import current_layout, hint
from jaxpar.rules import Axes, resolve
from jaxpar.topology import platform_of

Q_DIMS = ("batch", "seq", "heads", "head_dim")
KV_DIMS = ("batch", "seq", "kv_heads", "head_dim")
KERNELS = {"tpu": splash, "gpu": mha}
"""Platform → the kernel that is ``flash`` there."""


def attention(
    q_BSHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    *,
    impl: Literal["auto", "dense", "flash"] = "auto",
    q_dims: Sequence[str | None] = Q_DIMS,
    kv_dims: Sequence[str | None] = KV_DIMS,
) -> jax.Array:
    """Causal softmax attention, scaled by 1 / sqrt(head_dim), under the ambient layout.

    Args:
      q_BSHD: queries [batch, seq, heads, head_dim].
      k_BSKD, v_BSKD: keys and values [batch, seq, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
      impl: ``dense`` builds the scores [seq, seq]; ``flash`` never does, and is there on TPU and GPU, where the layout leaves
        seq and head_dim whole, for four bytes a number at most; ``auto`` takes ``flash`` where it is there.
      q_dims, kv_dims: logical dims of queries and of keys and values.

    Returns:
      [batch, seq, heads, head_dim], laid out as the queries.

    Raises:
      LayoutError: the dims do not fit the layout, or ``flash`` was asked for where it is not there.
    """
    q, k, v = hint(q_BSHD, *q_dims), hint(k_BSKD, *kv_dims), hint(v_BSKD, *kv_dims)
    q_axes, kv_axes = _axes(q, q_dims), _axes(k, kv_dims)
    why_not = _no_flash(q_axes, kv_axes, q.dtype)
    if impl == "flash" and why_not:
        raise LayoutError(f"attention(impl='flash'): {why_not}. Remedy: impl='auto' or 'dense'.")
    if impl == "dense" or why_not:
        return checkpoint_name(hint(jax.nn.dot_product_attention(q, k, v, is_causal=True), *q_dims), SAVED)
    if q_axes[2] != kv_axes[2]:
        # A shard of the queries' heads would meet the wrong keys: give every query head its own, split alike.
        k, v = (hint(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2), *q_dims) for x in (k, v))
        kv_axes = q_axes
    return _sharded(KERNELS[platform_of(current_layout().mesh)], q_axes, kv_axes)(q, k, v)


def _axes(x: jax.Array, dims: Sequence[str | None]) -> tuple[Axes, ...]:
    """The mesh axes of each dim of ``x``, without those that an enclosing ``shard_map`` has made manual."""
    layout, manual = current_layout(), jax.sharding.get_abstract_mesh().manual_axes
    sizes = {axis: 1 if axis in manual else size for axis, size in layout.sizes.items()}
    return resolve(layout.rules, sizes, tuple(dims), x.shape, itemsize=x.dtype.itemsize).axes


def _no_flash(q_axes: Sequence[Axes], kv_axes: Sequence[Axes], dtype: Any) -> str:
    """Why the kernel cannot run here; empty where it can."""
    platform = platform_of(current_layout().mesh)
    if platform not in KERNELS:
        return f"its kernels run on TPU and GPU, but the mesh is of {platform} devices"
    if dtype.itemsize > 4:
        return f"its kernel computes in float32, but the queries are {dtype.name}"
    for dim, size in ((1, "sequence"), (3, "head dim")):
        split = q_axes[dim] or kv_axes[dim]
        if split:
            return f"it wants the {size} whole, but the layout splits it over {listing(split)}"
    return ""


def _sharded(local: Callable[..., jax.Array], q_axes: Sequence[Axes], kv_axes: Sequence[Axes]) -> Callable[..., Any]:
    """``local`` on each device's shards: a kernel is opaque to the partitioner."""
    q_spec, kv_spec = (PartitionSpec(*(axes or None for axes in split)) for split in (q_axes, kv_axes))
    free = set(current_layout().mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)
    if not free:  # an enclosing shard_map has made every axis manual: these are the shards
        return local
    # The kernel does not say over which axes its results vary.
    return jax.shard_map(local, in_specs=(q_spec, kv_spec, kv_spec), out_specs=q_spec, axis_names=free, check_vma=False)
