"""Token sampling: greedy, or drawn with each request's own PRNG key."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.sharding.layout import hint

NONE, BROKEN, PENDING = -1, -2, -3
"""Values that stand for a missing token: the request has ended; its logits are not finite; it is still between pipeline
stages."""
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""The smallest normal fp32 number. Devices flush smaller ones to 0."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at ``temperature`` 0, otherwise drawn from softmax(logits / temperature).

    Tokens that tie at the limit of ``top_k`` or ``top_p`` are kept.

    Attributes:
      temperature: 0 for greedy decoding, or a positive finite number.
      top_k: draw only from this many of the likeliest tokens; ``None`` for all.
      top_p: draw only from the smallest set of likeliest tokens whose probabilities reach this sum (nucleus sampling,
        Holtzman et al. 2020, arXiv:1904.09751). It applies after ``top_k``.

    Raises:
      ConfigError: a value is out of range, or ``top_k`` or ``top_p`` is set at temperature 0.

    >>> Sampling(temperature=0.8, top_p=0.95)
    Sampling(temperature=0.8, top_k=None, top_p=0.95)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"sampling: temperature must be 0 (greedy) or a finite positive number, got {self.temperature!r}."
            )
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ConfigError(
                f"sampling: top_k must be an integer of at least 1, got {self.top_k!r}. Remedy: omit it to "
                "sample from all tokens."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"sampling: top_p must be above 0 and at most 1, got {self.top_p!r}. Remedy: omit it to "
                "sample from all tokens."
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ConfigError(
                "sampling: top_k and top_p have no effect at temperature 0, which is greedy. Remedy: set a "
                "positive temperature, such as 1.0."
            )


def next_tokens(sampling: Sampling, logits_BV: jax.Array, keys_B: jax.Array, at_B: jax.Array) -> jax.Array:
    """Returns the next token of each row, [batch] int32; ``BROKEN`` where the logits are not finite.

    The token at position ``at`` is drawn with the row's key folded with ``at``. It is therefore the same in every
    layout and does not depend on the other requests of the batch.

    Args:
      sampling: the sampling options.
      logits_BV: [batch, vocab]; computed on in at least fp32.
      keys_B: a PRNG key per row [batch].
      at_B: position of the next token of each row [batch] int32.
    """
    z_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    best_B = jnp.max(z_BV, -1)
    if sampling.temperature == 0:
        # Not argmax: max and min reduce a sharded vocabulary to scalars, and ties go to the lowest id in every layout.
        vocab = jax.lax.broadcasted_iota(jnp.int32, z_BV.shape, 1)
        token_B = jnp.min(jnp.where(z_BV == best_B[:, None], vocab, z_BV.shape[1]), -1)
    else:
        # Subtract the maximum first: a division by a tiny temperature could overflow and make all positive logits
        # equal.
        z_BV = hint(z_BV - best_B[:, None], "batch", None) / max(sampling.temperature, _MIN_TEMPERATURE)
        gumbel = lambda key, at: jax.random.gumbel(jax.random.fold_in(key, at), z_BV.shape[1:], z_BV.dtype)
        token_B = jnp.argmax(_mask_unlikely(sampling, z_BV) + jax.vmap(gumbel)(keys_B, at_B), -1).astype(jnp.int32)
    return jnp.where(jnp.isfinite(best_B), token_B, BROKEN)


def _mask_unlikely(sampling: Sampling, z_BV: jax.Array) -> jax.Array:
    """Returns the logits with -inf for tokens that ``top_k`` and ``top_p`` exclude."""
    if sampling.top_k is not None and sampling.top_k < z_BV.shape[1]:
        z_BV = jnp.where(z_BV < jax.lax.top_k(z_BV, sampling.top_k)[0][:, -1:], -jnp.inf, z_BV)
    if sampling.top_p < 1:
        sorted_BV = -jnp.sort(-z_BV, -1)
        p_BV = jax.nn.softmax(sorted_BV, -1)
        kept_BV = jnp.cumsum(p_BV, -1) - p_BV < sampling.top_p  # the tokens before this one do not reach top_p
        least_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), -1, keepdims=True)
        z_BV = jnp.where(z_BV < least_B1, -jnp.inf, z_BV)
    return z_BV
