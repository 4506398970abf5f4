"""The dispatches: how the rows of one device's tokens reach their experts, and how the results return.

- ``ragged``: one row per choice, in slices of one expert each, so that the rows arrive sorted by expert.
- ``deduplicated``: one row per device that holds any of a token's experts; that device adds the results of its experts
  before it sends the row back.
- ``gather``: every device gets all tokens of the others, and they add what each has computed.
- ``all_to_all``: a fixed number of rows for each expert.

Each has the router's weight multiply the hidden row, before the last matmul: its gradient then needs neither the
results nor that matmul, so a layer that is recomputed sends its rows once more and not twice.

Shape suffixes: T tokens, K choices, D embed, N devices, E experts, L experts of a device, R rows, C capacity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.hierarchical import all_to_all_local
from jaxpar.parallel.experts.exchange import RowSlices, Wire, exchange, round_trip
from jaxpar.parallel.experts.grouped_matmul import equal_groups_matmul, grouped_matmul
from jaxpar.parallel.experts.options import LOCAL, DispatchPlan
from jaxpar.parallel.experts.rows import from_rows, row_order, slots, to_rows, values_to_rows
from jaxpar.utils.scope_facts import expected_rows

type GroupedMatmul = Callable[[jax.Array, jax.Array], jax.Array]
"""``matmul(rows [rows, k], w [local experts, k, n]) -> [rows, n]``: each row times the matrix of its expert."""
type ExpertFn = Callable[..., jax.Array]
"""``expert_fn(rows, row_weights, matmul, *weights) -> rows``: what the experts compute; see :func:`swiglu`."""
type Experts = Callable[[jax.Array, jax.Array, GroupedMatmul], jax.Array]
"""An :data:`ExpertFn` with its weights."""


def swiglu(
    rows_RD: jax.Array, row_weights_R: jax.Array, matmul: GroupedMatmul, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """The experts of Mixtral and DeepSeek: a gated MLP (Shazeer 2020, arXiv:2002.05202).

    Args:
      rows_RD: the rows of all experts of this device ``[rows, embed]``.
      row_weights_R: the router's weight of each row ``[rows]``.
      matmul: multiplies each row with the matrix of its expert.
      gate, up: ``[local experts, embed, expert_mlp]``.
      down: ``[local experts, expert_mlp, embed]``.

    Returns:
      The result of each row times its weight ``[rows, embed]``.
    """
    wide = row_weights_R.dtype
    hidden = jax.nn.silu(matmul(rows_RD, gate).astype(wide)) * matmul(rows_RD, up).astype(wide)
    return matmul((hidden * row_weights_R[:, None]).astype(rows_RD.dtype), down)


class ExpertTokens(NamedTuple):
    """The tokens of one device, or a piece of them, and the choices of the devices that exchange rows with it.

    Every device knows the choices of all, and so computes where each row goes. A row could carry its weight instead,
    but on TPU one number takes as many bytes as 128.

    Attributes:
      x: this device's tokens ``[tokens, embed]``.
      experts: their experts ``[tokens, k]`` int32; the number of experts for a choice that is dropped.
      weights: the router's weights of the tokens of all devices, ``[devices, tokens, k]`` in fp32 or wider.
      all_experts: the experts of the tokens of all devices, ``[devices, tokens, k]`` int32.
    """

    x: jax.Array
    experts: jax.Array
    weights: jax.Array
    all_experts: jax.Array


def run(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    """Returns the weighted sum of the results of each token's experts ``[tokens, embed]``.

    Args:
      plan: the dispatch.
      experts: what the experts of this device compute.
      tokens: this device's tokens.
    """
    return _DISPATCHES[plan.dispatch](plan, experts, tokens)


def _local(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    return _on_this_device(plan, experts, tokens.x, tokens.weights[0], tokens.experts)


def _on_this_device(
    plan: DispatchPlan, experts: Experts, x_TD: jax.Array, weight_TK: jax.Array, local_TK: jax.Array
) -> jax.Array:
    """Returns the sum of the results of those of a token's experts that this device has; the others are ``L``."""
    at = row_order(local_TK, plan.sizes.local_experts, plan.most_rows)
    matmul = functools.partial(_matmul, plan, at.sizes)
    return from_rows(experts(to_rows(x_TD, at), values_to_rows(weight_TK, at), matmul), at)


def _matmul(plan: DispatchPlan, sizes: jax.Array, rows: jax.Array, w: jax.Array) -> jax.Array:
    with expected_rows(plan.expected_rows):
        return grouped_matmul(rows, w, sizes)


def _send(plan: DispatchPlan, rows: int, x: jax.Array, there: RowSlices, back: RowSlices) -> jax.Array:
    """Returns :func:`exchange`; its scope states how many rows a device sends if the routing is balanced."""
    s = plan.sizes
    copies = s.distinct_devices if plan.dispatch == "deduplicated" else s.k
    with expected_rows(math.ceil(plan.piece_tokens * copies)):
        return exchange(Wire(plan.axes, plan.native), rows, x, there, back)


def _local_index(plan: DispatchPlan, expert_NTK: jax.Array) -> jax.Array:
    """Returns the index of each expert among those of this device, or their number for an expert of another one.

    The result is ``[tokens of all devices, k]``.
    """
    count = plan.sizes.local_experts
    index = expert_NTK - jax.lax.axis_index(plan.axes) * count
    return jnp.where((index >= 0) & (index < count), index, count).reshape(-1, expert_NTK.shape[-1])


def _count(index: jax.Array, size: int) -> jax.Array:
    """Returns how often each number below ``size`` occurs in each ``index[device]``: ``[devices, size]`` int32."""
    found = index.reshape(index.shape[0], -1, 1) == jnp.arange(size, dtype=index.dtype)
    return jnp.sum(found, axis=1, dtype=jnp.int32)


def _ragged(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    at = row_order(tokens.experts, plan.sizes.experts)
    trip = round_trip(_count(tokens.all_experts, plan.sizes.experts), jax.lax.axis_index(plan.axes))
    # The rows arrive in the order of the choices of all devices, sorted by expert.
    arrived = row_order(_local_index(plan, tokens.all_experts), plan.sizes.local_experts, plan.most_rows)
    row_weights = values_to_rows(tokens.weights.reshape(-1, plan.sizes.k), arrived)
    rows = _send(plan, plan.most_rows, to_rows(tokens.x, at), trip.there, trip.back)
    y = experts(rows, row_weights, functools.partial(_matmul, plan, arrived.sizes))
    return from_rows(_send(plan, at.order.shape[0], y, trip.back, trip.there), at)


def _deduplicated(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    s, (count, k) = plan.sizes, tokens.experts.shape
    me = jax.lax.axis_index(plan.axes)
    device_NTK = jnp.minimum(tokens.all_experts // s.local_experts, s.devices)
    earlier = jnp.tril(jnp.ones((k, k), bool), -1)
    repeated = ((device_NTK[..., :, None] == device_NTK[..., None, :]) & earlier).any(-1)
    # Of a token's choices on one device, the first stands for all.
    device_NTK = jnp.where(repeated, s.devices, device_NTK)
    at = row_order(device_NTK[me], s.devices, count * min(k, s.devices))
    trip = round_trip(_count(device_NTK, s.devices), me)
    received = s.devices * count
    rows = _send(plan, received, to_rows(tokens.x, at), trip.there, trip.back)
    # The rows arrive in the order of the tokens of all devices.
    local_MK = _local_index(plan, tokens.all_experts)
    elsewhere = (local_MK == s.local_experts).all(-1, keepdims=True)
    arrived = row_order(elsewhere.astype(jnp.int32), 1, received)
    weight_RK = to_rows(tokens.weights.reshape(-1, k), arrived)
    local_RK = jnp.where(arrived.live[:, None], local_MK[arrived.order], s.local_experts)
    y = _on_this_device(plan, experts, rows, weight_RK, local_RK)
    return from_rows(_send(plan, at.order.shape[0], y, trip.back, trip.there), at)


def _gather(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    axes, k = plan.token_axes, plan.sizes.k
    x_TD = jax.lax.all_gather(tokens.x, axes, tiled=True) if axes else tokens.x
    local_TK = _local_index(plan, tokens.all_experts)
    y_TD = _on_this_device(plan, experts, x_TD, tokens.weights.reshape(-1, k), local_TK)
    if axes:
        y_TD = jax.lax.psum_scatter(y_TD, axes, scatter_dimension=0, tiled=True)
    others = tuple(axis for axis in plan.axes if axis not in axes)
    return jax.lax.psum(y_TD, others) if others else y_TD


def _all_to_all(plan: DispatchPlan, experts: Experts, tokens: ExpertTokens) -> jax.Array:
    s, capacity = plan.sizes, plan.capacity
    assert capacity is not None  # checked by check_options
    at = slots(tokens.experts, s.experts, capacity)
    own_weights = jax.lax.dynamic_index_in_dim(tokens.weights, jax.lax.axis_index(plan.axes), keepdims=False)
    there = functools.partial(all_to_all_local, axes=plan.axes, split_dim=0, concat_dim=1)
    back = functools.partial(all_to_all_local, axes=plan.axes, split_dim=1, concat_dim=0)
    by_expert = lambda x: x.reshape(s.experts, capacity, *x.shape[1:])
    rows_LCD, weights_LC = (there(by_expert(x)) for x in (to_rows(tokens.x, at), values_to_rows(own_weights, at)))
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    y = experts(flat(rows_LCD), flat(weights_LC), equal_groups_matmul)
    return from_rows(flat(back(y.reshape(*rows_LCD.shape[:2], -1))), at)


_DISPATCHES = {
    LOCAL: _local,
    "ragged": _ragged,
    "deduplicated": _deduplicated,
    "gather": _gather,
    "all_to_all": _all_to_all,
}
