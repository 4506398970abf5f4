"""``FlaxAttention``: ``attention`` as the ``attention_fn`` of Flax's attention modules, NNX and Linen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, listing
from jaxpar.parallel.attention.attention import attention
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.options import Impl


@dataclass(frozen=True)
class FlaxAttention:
    """``attention_fn`` for ``nnx.MultiHeadAttention`` and ``nn.MultiHeadDotProductAttention``.

    It calls :func:`jaxpar.attention` with Flax's mask, bias and dropout, and raises an error for whatever else that
    cannot do. As in Flax, every query sees every key unless a mask says otherwise. Two results differ from Flax's: a
    query that sees no key gets 0, not the mean of all values, and dropout draws other weights from the same key.

    Attributes:
      impl: as for :func:`jaxpar.attention`.
      mask: combined with the array that Flax passes. Prefer it, as in ``FlaxAttention(mask=jp.Mask())`` for causal
        attention: an array holds [seq, seq] numbers.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import jaxpar as jp
    >>> module = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=FlaxAttention(), rngs=nnx.Rngs(0))
    >>> with jp.unsharded():
    ...     module(jnp.ones((1, 4, 8)), is_causal=True).shape
    (1, 4, 8)
    """

    impl: Impl = "auto"
    mask: Mask = Mask(causal=False)  # noqa: RUF009, a mask is frozen

    # Linen passes only the arguments that the signature names, so all of them stand here.
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,  # jaxpar's softmax is always in fp32
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **others: Any,
    ) -> jax.Array:
        """Returns the attention ``[batch, seq, heads, head_dim]`` of arrays of this shape.

        Raises:
          ConfigError: Flax passes an argument that :func:`jaxpar.attention` has no equivalent for.
        """
        others |= {"precision": precision, "qk_attn_weights_einsum": qk_attn_weights_einsum}
        others |= {"attn_weights_value_einsum": attn_weights_value_einsum, "module (sow_weights)": module}
        if given := [name for name, x in others.items() if x is not None]:
            raise ConfigError(
                f"FlaxAttention: Flax passes {listing(sorted(given))}, which jp.attention cannot take. Remedy: leave "
                "these options of the attention module out, or use Flax's own attention for this module."
            )
        dropout = 0.0 if deterministic else dropout_rate
        if dropout and broadcast_dropout:
            raise ConfigError(
                f"FlaxAttention: dropout_rate is {dropout} with broadcast_dropout=True, which drops the same weights "
                "in all sequences and heads; jp.attention drops the weights of each independently. Remedy: create the "
                "attention module with broadcast_dropout=False."
            )
        q, k, v = (x if dtype is None else x.astype(dtype) for x in (query, key, value))
        seen = replace(self.mask, causal=True) if is_causal else self.mask
        bias, rng = _as_bias(bias, mask, (q.shape[1], k.shape[1])), dropout_rng if dropout else None
        # In Flax's own causal mask, the first query and the first key have the same position.
        start = 0 if is_causal and self.mask.sides == (None, None) else None
        return attention(q, k, v, impl=self.impl, mask=seen, bias=bias, dropout=dropout, key=rng, q_offset=start)


def _as_bias(bias: jax.Array | None, mask: jax.Array | None, tokens: tuple[int, int]) -> jax.Array | None:
    """Returns Flax's bias and mask, each broadcastable to ``[batch, heads, queries, keys]``, as one bias."""
    if mask is not None:
        hidden = jnp.where(mask, 0, -jnp.inf)
        bias = hidden if bias is None else hidden + bias
    if bias is None:
        return None
    lead = (1,) * (4 - bias.ndim) + bias.shape[: max(bias.ndim - 2, 0)]
    return jnp.broadcast_to(bias, (*lead[-2:], *tokens))
