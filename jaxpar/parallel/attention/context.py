"""``Context``: how a model's attention goes over a split sequence, said once for all its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import ConfigError, LayoutError, did_you_mean
from jaxpar.parallel.attention.attention import attention, shares
from jaxpar.parallel.attention.attention_local import attention_local, roles
from jaxpar.parallel.attention.cost_model import AttentionRequest, Spread
from jaxpar.parallel.attention.options import IMPLS, KV_GRAD_DTYPES, Impl
from jaxpar.parallel.attention.select import choice
from jaxpar.parallel.attention.split.token_order import ORDERS, permutation
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.rules import Axes
from jaxpar.utils.checks import is_count

BALANCED = "balanced"
"""The order of a ring whose devices have even work in packed documents: the batch brings it, as of :func:`jaxpar.balanced_packing`."""
HEADS_AXIS = ("ulysses",)
type Laid = str | jax.Array | None
"""How tokens lie: a name, the position of each [seq], or as they come."""


@dataclass(frozen=True)
class Context:
    """What :func:`jaxpar.attention` is given in every layer.

    Attributes:
      impl: the implementation.
      load_balance: how tokens lie along the devices of a ring; ``None`` for zigzag where there is a ring and the sequence divides, as they come
        elsewhere. Tokens are brought into it once, before the first layer, and with them targets and positions. ``balanced`` is what the
        batch brings as ``order``; see :meth:`laid`.
      grad_dtype: the dtype in which gradients of keys and values go from device to device.
      block: tokens of a tile's side, at most; ``None`` for what suits the device.
      keep_gathered_kv: for ``gather``: what is gathered in the forward pass stays for the backward pass, if the policy saves what attention makes.

    Raises:
      ConfigError: a name that is none, a block of no tokens, or ``keep_gathered_kv`` where nothing is gathered.
    """

    impl: Impl = "auto"
    load_balance: str | None = None
    grad_dtype: str | None = None
    block: int | None = None
    keep_gathered_kv: bool = False

    def __post_init__(self) -> None:
        # A model's queries are split as its keys are: nothing to merge.
        checks = (
            ("impl", self.impl, tuple(name for name in IMPLS if name != "split_kv")),
            ("load_balance", self.load_balance, (None, *ORDERS, BALANCED)),
            ("grad_dtype", self.grad_dtype, (None, *KV_GRAD_DTYPES)),
        )
        for name, value, known in checks:
            if value not in known:
                names = [option for option in known if option is not None]
                raise ConfigError(
                    f"context: {name} is {value!r}, but one of {', '.join(names)} is wanted.{did_you_mean(str(value), names)}"
                )
        if self.block is not None and not is_count(self.block):
            raise ConfigError(f"context: block is {self.block!r}, but a number of tokens, 1 or more, is wanted.")
        if self.keep_gathered_kv and self.impl != "gather":
            raise ConfigError(
                f"context: keep_gathered_kv is true, but keys and values are gathered by impl gather alone, and impl is {self.impl!r}. Remedy: impl: gather, "
                f"or leave keep_gathered_kv out."
            )

    def laid(self, q: Any, k: Any, *arrays_BS: Any, order_BS: Any = None) -> tuple[Laid, Any, tuple[Any, ...]]:
        """The order of the tokens, their positions [1, seq] where it is not the natural one, and arrays [batch, seq] in it.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes [batch, seq, heads, head_dim].
          order_BS: an order that comes with the batch: the position of each token, as they are to lie, the same in all rows. Where there
            is no ring it is not looked at.

        Raises:
          LayoutError: the order is ``balanced``, and none comes.
        """
        ring, seq = self.ring(q, k, given=order_BS is not None), q.shape[1]
        order: Any = self.load_balance or ("zigzag" if seq % (2 * ring) == 0 else "contiguous")
        if ring == 1 or (order == "contiguous" and order_BS is None):
            return None, None, arrays_BS
        if order == BALANCED and order_BS is None:
            raise LayoutError(
                f"context: load_balance is 'balanced' over a ring of {ring} devices, but the batch brings no 'order'. Remedy: batch['order'] = "
                f"np.tile(jp.balanced_packing(segment_ids, {ring}), (batch, 1)), in 'jaxpar train' data.packing: true, or load_balance: zigzag."
            )
        at: Any = permutation(order, seq, ring) if order_BS is None else order_BS[0]
        name = order if order_BS is None else at
        return name, jax.numpy.asarray(at)[None], tuple(x[:, at] for x in arrays_BS)

    def ring(self, q: Any, k: Any, *, given: bool = False) -> int:
        """Devices of the ring that a layer's queries and keys, or their shapes, call for under the ambient layout; 1 where there is none.

        Args:
          given: the batch brings an order.
        """
        order = "given" if given or self.load_balance == BALANCED else self.load_balance
        return shares(self.impl, q, k, asks=AttentionRequest(order=order, free=True, kv_grad_dtype=self.grad_dtype))[0]

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, order: Laid, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Causal attention of queries, keys and values whose tokens lie in this order, of documents [batch, seq] that lie so too."""
        # Asked for, contiguous is meant; else a ring lays out its tokens by itself.
        order = ("contiguous" if self.load_balance == "contiguous" else None) if order is None else order
        how: dict[str, Any] = {
            "kv_grad_dtype": self.grad_dtype,
            "block": self.block,
            "segment_ids": segment_ids,
            "keep_gathered_kv": self.keep_gathered_kv,
        }
        axes = _split_here()
        if axes:
            impl, around = self._settled(q, k, split_ways())
            # Laid out once for all layers, or as it comes: inside a map nothing is brought into another order.
            order = order or ("contiguous" if around > 1 else None)
            return attention_local(q, k, v, impl=impl, axis=axes, heads_axis=HEADS_AXIS, order=order, **how)
        return attention(q, k, v, impl=self.impl, order=order, **how)

    def settled_order(self, q: Any, k: Any, ways: int = 1) -> str | None:
        """The order by name that tokens are to lie in where a ``shard_map`` splits the sequence: the same inside of it, and before.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes; how many sequences they are does not matter.
          ways: devices that the map has split the sequence over.

        Raises:
          ConfigError: the order is ``balanced``, which is of a batch, not of its microbatches.
        """
        if self.load_balance == BALANCED:
            raise ConfigError(
                "context: load_balance is 'balanced', which a pipeline's stages cannot take. Remedy: load_balance: zigzag."
            )
        _, ring = self._settled(q, k, ways)
        order = self.load_balance or ("zigzag" if q.shape[1] * ways % (2 * ring) == 0 else "contiguous")
        return None if ring == 1 or order == "contiguous" else order

    def settled_ring(self, q: Any, k: Any) -> int:
        """How many devices go round in that order."""
        return self._settled(q, k, 1)[1]

    def _settled(self, q: Any, k: Any, ways: int) -> tuple[Any, int]:
        """The implementation inside of a map that splits the sequence, and how many devices its ring has."""
        layout = current_layout()
        q, k = (jax.ShapeDtypeStruct((1, x.shape[1] * ways, *x.shape[2:]), x.dtype) for x in (q, k))
        split: tuple[Axes, ...] = ((), _rule_axes(), (), ())
        how: dict[str, Any] = {"heads_axis": HEADS_AXIS}
        how["asks"] = AttentionRequest(order=self.load_balance, free=True, kv_grad_dtype=self.grad_dtype)
        how["links"] = links_of(layout.mesh) if self.impl == "auto" else None
        impl = choice(self.impl, q, k, Spread(split, split), layout.sizes, **how).impl if split[1] else "flash"
        ring, _ = roles(impl, split[1], HEADS_AXIS)
        return impl, math.prod(layout.sizes[axis] for axis in ring)


def _rule_axes() -> Axes:
    """The axes, larger than 1, over which the rules split ``seq``."""
    layout = current_layout()
    resolved = layout.resolve(("seq",))
    return () if resolved.problems else tuple(axis for axis in resolved.axes[0] if layout.sizes[axis] > 1)


def _split_here() -> Axes:
    """Those that an enclosing ``shard_map`` has made manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in _rule_axes() if axis in manual)


def split_ways() -> int:
    """Over how many devices an enclosing ``shard_map`` has split the sequence."""
    return math.prod(current_layout().sizes[axis] for axis in _split_here())


AUTO = Context()
