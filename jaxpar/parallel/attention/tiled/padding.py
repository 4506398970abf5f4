"""What kernels that work in blocks share: padding to whole blocks, and saying what the blocks cost.

A kernel wants sequences in whole blocks and a head dim of a size of its own. What is short of that is padded with zeros: a
causal mask hides padded keys from every real query, zero lanes add nothing to a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SAVED = "attention"
"""The name of what attention makes, for checkpoint policies: saved, its kernel does not run again."""

KEPT = "attention_keys"
"""The name of the keys and values of all devices, where ``keep`` is asked for: saved, they are not gathered again."""

LANES = 128
"""Of a TPU's registers: what is no multiple of them is filled up."""

FILL = -2
"""The segment of what fills up a block. Padding is given another: it is seen by padding, and what it makes is taken away."""


def up(size: int, multiple: int) -> int:
    """The least multiple that is no less than ``size``.

    >>> up(130, 128)
    256
    """
    return -(-size // multiple) * multiple


def pad(x_BSHD: jax.Array, seq: int, head_dim: int) -> jax.Array:
    """``x`` with zeros behind its sequence and its head dim, up to these sizes."""
    missing = (seq - x_BSHD.shape[1], head_dim - x_BSHD.shape[3])
    return jnp.pad(x_BSHD, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else x_BSHD


def visited(seq: int, block: int) -> int:
    """Scores that a causal kernel computes: blocks above the diagonal are never visited, those on it are computed whole.

    >>> visited(1024, 512) // 512**2
    3
    """
    blocks = seq // block
    return blocks * (blocks + 1) // 2 * block * block


def stated_flops(batch: int, heads: int, head_dim: int, *scores: int) -> str:
    """A scope name that tells an audit what the kernels do not: FLOPs of one matmul, in the forward and in the gradient kernels.

    ``scores`` are those that a kernel computes for a head: one number, or one for the forward and one for the gradient kernels.
    """
    return "_".join(["attention_matmul_flops", *(str(2 * batch * heads * n * head_dim) for n in scores)])
