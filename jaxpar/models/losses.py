"""Losses that never gather what is sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
    """Mean cross entropy, exact and vocabulary-parallel: the vocabulary dim is only ever reduced, never gathered.

    Args:
      logits_BSV: [batch, seq, vocab], any layout; reduced in at least fp32.
      targets_BS: [batch, seq] int, the right class of each position.
      mask_BS: [batch, seq], 0 where a position does not count.

    Returns:
      A scalar in nats per counted position (0 when none counts).

    >>> import jax.numpy as jnp
    >>> float(cross_entropy(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2), int)))  # log 4
    1.3862943649291992
    """
    logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # A comparison with iota instead of take_along_axis: each shard of the vocabulary looks at its own slice.
    vocab = jax.lax.broadcasted_iota(jnp.int32, logits_BSV.shape, logits_BSV.ndim - 1)
    right_BS = jnp.sum(jnp.where(vocab == targets_BS[..., None], logits_BSV, 0), axis=-1)
    loss_BS = lse_BS - right_BS
    if mask_BS is None:
        return loss_BS.mean()
    weight_BS = mask_BS.astype(loss_BS.dtype)
    return jnp.sum(loss_BS * weight_BS) / jnp.maximum(jnp.sum(weight_BS), 1)


def next_token_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """``loss_fn`` of a language model: ``batch`` holds ``tokens`` and ``targets``, each [batch, seq] int."""
    return cross_entropy(model(batch["tokens"]), batch["targets"])
