"""``Context``: how a model's attention goes over a split sequence, said once for all its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.attn.asked import IMPLS, TRAVEL, Impl
from jaxpar.attn.choose import Spread, choice
from jaxpar.attn.dispatch import attention, shares
from jaxpar.attn.local import attention_local, roles
from jaxpar.attn.order import ORDERS, permutation
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.layout import current_layout
from jaxpar.rules import Axes

HEADS_AXIS = ("ulysses",)


def _split_here() -> Axes:
    """The axes over which the rules split ``seq`` that an enclosing ``shard_map`` has made manual."""
    layout, manual = current_layout(), jax.sharding.get_abstract_mesh().manual_axes
    resolved = layout.resolve(("seq",))
    axes = () if resolved.problems else resolved.axes[0]
    return tuple(axis for axis in axes if axis in manual and layout.sizes[axis] > 1)


@dataclass(frozen=True)
class Context:
    """What :func:`jaxpar.attention` is given in every layer.

    Attributes:
      impl: the implementation.
      order: how tokens lie along the devices of a ring; ``None`` for zigzag where there is a ring and the sequence divides, as they come
        elsewhere. Tokens are brought into it once, before the first layer, and with them targets and positions.
      travel: the dtype in which gradients of keys and values go from device to device.
      block: tokens of a tile's side, at most; ``None`` for what suits the device.

    Raises:
      ConfigError: a name that is none, or a block of no tokens.
    """

    impl: Impl = "auto"
    order: str | None = None
    travel: str | None = None
    block: int | None = None

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

    def laid(self, q: Any, k: Any, *arrays_BS: Any) -> tuple[str | None, jax.Array | None, tuple[Any, ...]]:
        """The order of the tokens, their positions [1, seq] where it is not the natural one, and arrays [batch, seq] in it.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes [batch, seq, heads, head_dim].
        """
        ring, _ = shares(self.impl, q, k)
        order = self._order(q.shape[1], ring)
        if order is None:
            return None, None, arrays_BS
        at = permutation(order, q.shape[1], ring)
        return order, jnp.asarray(at)[None], tuple(x[:, at] for x in arrays_BS)

    def order_here(self, q: Any, k: Any) -> str | None:
        """The order that :meth:`laid` has brought tokens into, inside of a ``shard_map`` that has split them: of one device's queries and keys."""
        axes = _split_here()
        ways = math.prod(current_layout().sizes[axis] for axis in axes)
        impl = self._impl_here(q, k, axes)
        ring, _ = roles(impl, axes, HEADS_AXIS)
        return self._order(q.shape[1] * ways, math.prod(current_layout().sizes[axis] for axis in ring))

    def _order(self, seq: int, ring: int) -> Any:
        order = self.order or ("zigzag" if seq % (2 * ring) == 0 else "contiguous")
        return None if ring == 1 or order == "contiguous" else order

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, order: str | None) -> jax.Array:
        """Causal attention of queries, keys and values whose tokens lie in this order."""
        # Asked for, contiguous is meant; else a ring lays out its tokens by itself.
        order = order or ("contiguous" if self.order == "contiguous" else None)
        axes = _split_here()
        if axes:
            impl: Any = self._impl_here(q, k, axes)
            # Laid out once for all layers, or as it comes: inside a map nothing is brought into another order.
            order = order or ("contiguous" if roles(impl, axes, HEADS_AXIS)[0] else None)
            return attention_local(
                q, k, v, impl=impl, axis=axes, heads_axis=HEADS_AXIS, order=order, travel=self.travel, block=self.block
            )
        return attention(q, k, v, impl=self.impl, order=order, travel=self.travel, block=self.block)

    def _impl_here(self, q: Any, k: Any, axes: Axes) -> str:
        """The implementation for tokens that an enclosing ``shard_map`` has split over these axes."""
        if not axes:
            return "flash"
        sizes = current_layout().sizes
        ways = math.prod(sizes[axis] for axis in axes)
        q, k = (jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * ways, *x.shape[2:]), x.dtype) for x in (q, k))
        split: tuple[Axes, ...] = ((), axes, (), ())
        return choice(self.impl, q, k, Spread(split, split), sizes, heads_axis=HEADS_AXIS, no_kernel="no matter").impl


AUTO = Context()
