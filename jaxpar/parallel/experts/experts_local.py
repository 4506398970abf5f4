"""``experts_local``: a mixture of experts on one device's tokens, for use inside a ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpar.parallel.experts import options
from jaxpar.parallel.experts.dispatch import ExpertFn, ExpertTokens, run, swiglu
from jaxpar.parallel.experts.exchange import exchange_of
from jaxpar.parallel.experts.options import Dispatch, DispatchPlan, ExpertSizes
from jaxpar.parallel.experts.rows import drop_over_capacity
from jaxpar.parallel.experts.select import select_dispatch
from jaxpar.parallel.manual_axes import check_manual
from jaxpar.sharding.layout import current_layout
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.call_site import call_site
from jaxpar.utils.contexts import ambient_layout, experts_observer


class Choices(Protocol):
    """What experts read of a routing: the weights and the experts of each token, both ``[..., k]``."""

    @property
    def weights(self) -> jax.Array: ...

    @property
    def experts(self) -> jax.Array: ...


def experts_local(
    x: jax.Array,
    routing: Choices,
    *weights: Any,
    axis: str | Sequence[str] = "expert",
    token_axis: str | Sequence[str] | None = None,
    expert_fn: ExpertFn = swiglu,
    dispatch: Dispatch = "auto",
    capacity_factor: float | None = None,
    pieces: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the results of each token's experts, inside a ``shard_map``.

    Args:
      x: this device's tokens ``[..., embed]``.
      routing: the weights and the experts of each token, as :class:`jaxpar.moe.Router` returns them.
      *weights: this device's experts, arrays ``[local experts, ...]``.
      axis: the mesh axes that shard the experts, major to minor; they must be manual.
      token_axis: those of them along which devices have different tokens; all by default.
      expert_fn, dispatch, capacity_factor, pieces: as for :func:`jaxpar.experts`.

    Returns:
      The results ``[..., embed]``, and the number of choices of this device that were dropped, an fp32 scalar.

    Raises:
      ConfigError: an option is unknown or out of range, or sizes do not fit each other.
      LayoutError: an axis is not manual here.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxpar.parallel.experts.routing import Router
    >>> def layer(x, logits, *weights):
    ...     return experts_local(x, Router(experts=8, k=2)(logits), *weights)[0]
    >>> shapes = [(64, 16), (64, 8), (8, 16, 4), (8, 16, 4), (8, 4, 16)]
    >>> with jax.set_mesh(jp.MeshSpec(expert=-1).build()):
    ...     run = jax.shard_map(layer, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    ...     jax.eval_shape(run, *map(jnp.ones, shapes)).shape
    (64, 16)
    """
    options.check_options(dispatch, capacity_factor, pieces)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    token_axes = axes if token_axis is None else (token_axis,) if isinstance(token_axis, str) else tuple(token_axis)
    check_manual(axes, "experts")
    k, embed = routing.experts.shape[-1], x.shape[-1]
    x_TD, expert_TK = x.reshape(-1, embed), routing.experts.reshape(-1, k)
    devices, token_devices = (jax.lax.axis_size(some) if some else 1 for some in (axes, token_axes))
    count = jax.tree.leaves(weights)[0].shape[0] * devices
    sizes = ExpertSizes(x_TD.shape[0], k, count, devices, token_devices)
    options.check_sizes(sizes, axes, pieces)
    kind = exchange_of(current_layout().mesh if ambient_layout.value else jax.sharding.get_abstract_mesh())
    row, limited = embed * x.dtype.itemsize, capacity_factor is not None
    choice = select_dispatch(dispatch, sizes, axes, token_axes, row, capacity=limited, ragged=kind != "none")
    pieces = options.pieces_for(sizes, capacity_factor) if pieces is None else pieces
    capacity = options.capacity_of(sizes, sizes.tokens // pieces, capacity_factor)
    plan = DispatchPlan(choice.dispatch, axes, token_axes, sizes, capacity, pieces, kind == "native")
    if experts_observer.value is not None:
        experts_observer.value(call_site(), plan, choice.why)
    experts = lambda rows, row_weights, matmul: expert_fn(rows, row_weights, matmul, *weights)
    kept_TK = _without_dropped(plan, expert_TK)
    dropped = jnp.sum(kept_TK != expert_TK, dtype=jnp.float32)
    share = lambda a: jax.lax.all_gather(a, token_axes) if token_axes else a[None]
    weight_NTK = share(at_least_fp32(routing.weights).reshape(-1, k))
    tokens = ExpertTokens(x_TD, kept_TK, weight_NTK, share(kept_TK))
    if pieces == 1:
        return run(plan, experts, tokens).reshape(*x.shape[:-1], -1), dropped
    # Each piece is recomputed, or the rows of all pieces would be kept, with room for the worst routing in each.
    step = jax.checkpoint(lambda carry, piece: (carry, run(plan, experts, piece)), prevent_cse=False)
    _, y = jax.lax.scan(step, None, _in_pieces(tokens, pieces))
    return y.reshape(*x.shape[:-1], y.shape[-1]), dropped


def _without_dropped(plan: DispatchPlan, expert_TK: jax.Array) -> jax.Array:
    """Returns the choices without those that exceed the capacity of an expert in a piece."""
    if plan.capacity is None:
        return expert_TK
    pieces_PTK = expert_TK.reshape(plan.pieces, -1, expert_TK.shape[1])
    drop = functools.partial(drop_over_capacity, experts=plan.sizes.experts, capacity=plan.capacity)
    return jax.vmap(drop)(pieces_PTK).reshape(expert_TK.shape)


def _in_pieces(tokens: ExpertTokens, pieces: int) -> ExpertTokens:
    """Returns the tokens as ``[pieces, ...]``."""
    own = lambda a: a.reshape(pieces, -1, a.shape[-1])
    all_devices = lambda a: jnp.moveaxis(a.reshape(a.shape[0], pieces, -1, a.shape[-1]), 1, 0)
    return ExpertTokens(
        own(tokens.x), own(tokens.experts), all_devices(tokens.weights), all_devices(tokens.all_experts)
    )
