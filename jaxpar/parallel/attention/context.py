"""``Context``: how all layers of a model compute attention over a sharded sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.errors import ConfigError, LayoutError, did_you_mean
from jaxpar.parallel.attention.attention import attention, qkv_sharding
from jaxpar.parallel.attention.attention_local import attention_local, roles
from jaxpar.parallel.attention.cost_model import AttentionRequest, QKVSharding
from jaxpar.parallel.attention.mask import Mask
from jaxpar.parallel.attention.options import IMPLS, KV_GRAD_DTYPES, Impl
from jaxpar.parallel.attention.select import select_here
from jaxpar.parallel.attention.split.token_order import ORDERS, permutation
from jaxpar.parallel.collectives.gather_reduce import axes_of
from jaxpar.parallel.manual_axes import manual_axes_of
from jaxpar.sharding.layout import current_layout
from jaxpar.sharding.resolve import num_shards_over
from jaxpar.sharding.rules import Axes
from jaxpar.utils.checks import is_count

BALANCED = "balanced"
"""A ring order that balances packed documents; each batch contains it, from :func:`jaxpar.context.balanced_packing`."""
HEADS_AXIS = ("ulysses",)
type TokenOrder = str | jax.Array | None
"""A token order: a name, the position of each token [seq], or ``None`` for the natural order."""


@dataclass(frozen=True)
class Context:
    """The options that every layer of a model passes to :func:`jaxpar.attention`.

    Attributes:
      impl: the implementation, any but ``split_kv``.
      load_balance: the order of the tokens along the devices of a ring: ``contiguous``, ``zigzag``, ``striped`` or
        ``balanced``. The model reorders tokens, targets and positions once, before the first layer. ``balanced`` takes
        the order from the batch; see :meth:`reorder_tokens`. Default: zigzag if there is a ring and the sequence
        divides, else contiguous.
      grad_dtype: the dtype in which devices send gradients of keys and values, ``float32`` or ``bfloat16``.
      block: the maximum number of tokens on a tile's side; ``None`` picks a size for the device.
      keep_gathered_kv: for ``gather``: keep the gathered keys and values for the backward pass, if the remat policy
        saves attention outputs.

    Raises:
      ConfigError: a name is unknown, ``block`` is not a positive integer, or ``keep_gathered_kv`` is set and ``impl``
        is not ``gather``.

    >>> import jax
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch=None, seq="context", heads=None, kv_heads=None, head_dim=None)
    >>> q = jax.ShapeDtypeStruct((1, 1024, 8, 64), "bfloat16")
    >>> with jp.Layout(jp.MeshSpec(context=8).abstract(), rules):
    ...     Context(impl="ring").ring(q, q), Context(impl="gather", load_balance="striped").load_balance
    (8, 'striped')
    """

    impl: Impl = "auto"
    load_balance: str | None = None
    grad_dtype: str | None = None
    block: int | None = None
    keep_gathered_kv: bool = False

    def __post_init__(self) -> None:
        # A model shards its queries like its keys, so split_kv would have nothing to merge.
        checks = (
            ("impl", self.impl, tuple(name for name in IMPLS if name != "split_kv")),
            ("load_balance", self.load_balance, (None, *ORDERS, BALANCED)),
            ("grad_dtype", self.grad_dtype, (None, *KV_GRAD_DTYPES)),
        )
        for name, value, known in checks:
            if value not in known:
                names = [option for option in known if option is not None]
                raise ConfigError(
                    f"context: {name} must be one of {', '.join(names)}, got "
                    f"{value!r}.{did_you_mean(str(value), names)}"
                )
        if self.block is not None and not is_count(self.block):
            raise ConfigError(f"context: block must be a number of tokens >= 1, got {self.block!r}.")
        if self.keep_gathered_kv and self.impl != "gather":
            raise ConfigError(
                f"context: keep_gathered_kv is true, but only impl gather gathers keys and values, and impl is "
                f"{self.impl!r}. Remedy: set impl: gather, or leave keep_gathered_kv out."
            )

    def reorder_tokens(
        self, q: Any, k: Any, *arrays_BS: Any, order_BS: Any = None
    ) -> tuple[TokenOrder, Any, tuple[Any, ...]]:
        """Returns the token order, the positions ``[1, seq]`` in that order, and the arrays reordered.

        The order and the positions are ``None`` if the natural order is kept.

        Args:
          q, k: queries and keys of a layer ``[batch, seq, heads, head_dim]``, as arrays or shapes.
          arrays_BS: arrays ``[batch, seq]`` to reorder, such as tokens and targets.
          order_BS: the order in the batch: the position of each token ``[batch, seq]``, the same in all rows. Ignored
            if there is no ring.

        Raises:
          NoLayoutError: no layout is ambient.
          LayoutError: the order is ``balanced`` and ``order_BS`` is ``None``.
        """
        ring, seq = self.ring(q, k, given=order_BS is not None), q.shape[1]
        order: Any = self.load_balance or ("zigzag" if seq % (2 * ring) == 0 else "contiguous")
        if ring == 1 or (order == "contiguous" and order_BS is None):
            return None, None, arrays_BS
        if order == BALANCED and order_BS is None:
            raise LayoutError(
                f"context: load_balance is 'balanced' over a ring of {ring} devices, but the batch has no 'order'. "
                f"Remedy: set batch['order'] = np.tile(jp.context.balanced_packing(segment_ids, {ring}), (batch, 1)); "
                f"in 'jaxpar train' set data.packing: true; or set load_balance: zigzag."
            )
        at: Any = permutation(order, seq, ring) if order_BS is None else order_BS[0]
        name = order if order_BS is None else at
        return name, jax.numpy.asarray(at)[None], tuple(x[:, at] for x in arrays_BS)

    def ring(self, q: Any, k: Any, *, given: bool = False) -> int:
        """Returns the number of devices in a layer's ring under the ambient layout; 1 if there is no ring.

        Args:
          q, k: queries and keys of a layer ``[batch, seq, heads, head_dim]``, as arrays or shapes.
          given: whether the batch contains an order.

        Raises:
          NoLayoutError: no layout is ambient.
          LayoutError: the implementation does not support queries and keys sharded in this way.
        """
        order = "given" if given or self.load_balance == BALANCED else self.load_balance
        return self._select(q, k, qkv_sharding(q, k), order)[1]

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        order: TokenOrder,
        segment_ids: jax.Array | None = None,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """Returns causal attention of tokens stored in the given order.

        Args:
          q: queries ``[batch, seq, heads, head_dim]``.
          k, v: keys and values ``[batch, seq, kv_heads, head_dim]``.
          order: the order of the tokens, as :meth:`reorder_tokens` returns it.
          segment_ids: the document of each token ``[batch, seq]``, in the same order; negative for padding.
          window: a query sees this many keys, its own and those before it; ``None`` for all.
          scale, softcap: as for :func:`jaxpar.attention`.

        Returns:
          The result ``[batch, seq, heads, head_dim]``.

        Raises:
          NoLayoutError, LayoutError, ConfigError: as :func:`jaxpar.attention`.
        """
        # With order=None a ring would reorder into zigzag by itself, so an explicit contiguous must be passed on.
        order = ("contiguous" if self.load_balance == "contiguous" else None) if order is None else order
        how: dict[str, Any] = {"kv_grad_dtype": self.grad_dtype, "block": self.block, "segment_ids": segment_ids}
        how |= {"keep_gathered_kv": self.keep_gathered_kv, "scale": scale, "softcap": softcap}
        how["mask"] = None if window is None else Mask(window=window)
        if axes := manual_axes_of("seq"):
            impl, ring_size = self._settled(q, k, num_seq_shards())
            # The tokens were ordered before the shard_map, or stay as they are: no layer may reorder them again.
            order = order or ("contiguous" if ring_size > 1 else None)
            return attention_local(q, k, v, impl=impl, axis=axes, heads_axis=HEADS_AXIS, order=order, **how)
        return attention(q, k, v, impl=self.impl, order=order, **how)

    def settled_order(self, q: Any, k: Any, num_shards: int = 1) -> str | None:
        """Returns the name of the token order if a ``shard_map`` shards the sequence; ``None`` for contiguous.

        The result is the same inside the ``shard_map`` and before it.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes, with any batch size.
          num_shards: number of devices over which the ``shard_map`` has sharded the sequence of ``q`` and ``k``.

        Raises:
          NoLayoutError: no layout is ambient.
          ConfigError: the order is ``balanced``, which applies to a batch and not to its microbatches.
        """
        if self.load_balance == BALANCED:
            raise ConfigError(
                "context: a pipeline does not support load_balance 'balanced'. Remedy: set load_balance: zigzag."
            )
        _, ring = self._settled(q, k, num_shards)
        order = self.load_balance or ("zigzag" if q.shape[1] * num_shards % (2 * ring) == 0 else "contiguous")
        return None if ring == 1 or order == "contiguous" else order

    def settled_ring(self, q: Any, k: Any) -> int:
        """Returns the number of devices in the ring inside a ``shard_map`` that shards the sequence.

        Args:
          q, k: queries and keys of a layer, as arrays or shapes, with any batch size.

        Raises:
          NoLayoutError: no layout is ambient.
        """
        return self._settled(q, k, 1)[1]

    def _settled(self, q: Any, k: Any, num_shards: int) -> tuple[Any, int]:
        """Returns the implementation inside a ``shard_map`` that shards the sequence, and the size of its ring."""
        q, k = (jax.ShapeDtypeStruct((1, x.shape[1] * num_shards, *x.shape[2:]), x.dtype) for x in (q, k))
        axes: tuple[Axes, ...] = ((), axes_of(current_layout(), "seq"), (), ())
        return self._select(q, k, QKVSharding(axes, axes), self.load_balance)

    def _select(self, q: Any, k: Any, sharding: QKVSharding, order: str | None) -> tuple[Any, int]:
        """Returns the implementation for queries and keys that are sharded in this way, and the size of its ring."""
        request = AttentionRequest(order=order, free=True, kv_grad_dtype=self.grad_dtype)
        impl = select_here(self.impl, q, k, sharding, heads_axis=HEADS_AXIS, request=request).impl
        ring, _ = roles(impl, sharding.kv[1], HEADS_AXIS)
        return impl, num_shards_over(ring, current_layout().sizes)


def num_seq_shards() -> int:
    """Returns the number of devices over which an enclosing ``shard_map`` has sharded the sequence."""
    return num_shards_over(manual_axes_of("seq"), current_layout().sizes)


AUTO = Context()
