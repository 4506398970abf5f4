"""``Context``: how a model's attention goes over a split sequence, said once for all its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.attn.asked import IMPLS, TRAVEL, Impl
from jaxpar.attn.dispatch import attention, shares
from jaxpar.attn.order import ORDERS, permutation
from jaxpar.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Context:
    """What :func:`jaxpar.attention` is given in every layer.

    Attributes:
      impl: the implementation.
      order: how tokens lie along the devices of a ring; ``None`` for zigzag where there is a ring and the sequence divides, as they come
        elsewhere. Tokens are brought into it once, before the first layer, and with them targets and positions.
      travel: the dtype in which gradients of keys and values go from device to device.
      block: tokens of a tile's side, at most; ``None`` for what suits the device.
      keep: for ``gather``: what is gathered in the forward pass stays for the backward pass, if the policy saves what attention makes.

    Raises:
      ConfigError: a name that is none, a block of no tokens, or ``keep`` where nothing is gathered.
    """

    impl: Impl = "auto"
    order: str | None = None
    travel: str | None = None
    block: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        checks = (
            ("impl", self.impl, IMPLS),
            ("order", self.order, (None, *ORDERS)),
            ("travel", self.travel, (None, *TRAVEL)),
        )
        for name, value, known in checks:
            if value not in known:
                names = [option for option in known if option is not None]
                raise ConfigError(
                    f"context: {name} is {value!r}, but one of {', '.join(names)} is wanted.{did_you_mean(str(value), names)}"
                )
        if self.block is not None and (
            isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1
        ):
            raise ConfigError(f"context: block is {self.block!r}, but a number of tokens, 1 or more, is wanted.")
        if self.keep and self.impl != "gather":
            raise ConfigError(
                f"context: keep is true, but keys and values are gathered by impl gather alone, and impl is {self.impl!r}. Remedy: impl: gather, "
                f"or leave keep out."
            )

    def laid(self, q: Any, k: Any, *arrays_BS: Any) -> tuple[str | None, jax.Array | None, tuple[Any, ...]]:
        """The order of the tokens, their positions [1, seq] where it is not the natural one, and arrays [batch, seq] in it.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes [batch, seq, heads, head_dim].
        """
        ring, _ = shares(self.impl, q, k)
        seq = q.shape[1]
        order: Any = self.order or ("zigzag" if seq % (2 * ring) == 0 else "contiguous")
        if ring == 1 or order == "contiguous":
            return None, None, arrays_BS
        at = permutation(order, seq, ring)
        return order, jnp.asarray(at)[None], tuple(x[:, at] for x in arrays_BS)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, order: str | None) -> jax.Array:
        """Causal attention of queries, keys and values whose tokens lie in this order."""
        # Asked for, contiguous is meant; else a ring lays out its tokens by itself.
        order = order or ("contiguous" if self.order == "contiguous" else None)
        return attention(q, k, v, impl=self.impl, order=order, travel=self.travel, block=self.block, keep=self.keep)


AUTO = Context()
