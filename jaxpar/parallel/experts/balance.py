"""Losses that balance a router's experts.

On global arrays these functions are ordinary array code. Where a step makes mesh axes manual (ZeRO stage 1, one
reduction for all microbatches, pipelines), each device calls them on its own tokens, and the step then averages their
results over the devices as it averages the loss. The numbers of choices per expert are therefore summed over these
axes, and everything else is a mean over the device's tokens: the average has the value and the gradient of the loss of
all tokens.

Shape suffixes: B batch, S sequence, X experts.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.parallel.experts.routing import Routing, finite_tokens
from jaxpar.parallel.manual_axes import manual_axes_of
from jaxpar.sharding.rules import Axes
from jaxpar.utils.arrays import at_least_fp32

Per = Literal["batch", "sequence", "global"]
PERS: tuple[str, ...] = get_args(Per)
_DEFAULT_AXES: dict[str, Axes] = {"batch": ("replica", "data", "expert"), "seq": ("context", "ulysses")}
"""The mesh axes assumed to shard a dim if no rule names it."""


def load_balance_loss(
    routing: Routing, per: Per = "batch", *, mask: jax.Array | None = None, counts: jax.Array | None = None
) -> jax.Array:
    """Returns a loss that is smallest where all experts are chosen equally often.

    It is ``experts * sum_i(f_i * P_i)`` (Switch, arXiv:2101.03961; GShard; Mixtral). ``f_i`` is the fraction of all
    choices that fall on expert ``i`` and has no gradient; ``P_i`` is the mean probability of the expert. For any ``k``
    the loss is 1 if all ``f_i`` or all ``P_i`` are equal.

    Args:
      routing: the routing of the tokens ``[batch, seq]``.
      per: what the fractions are counted over.

        * ``batch``: all tokens of this call: those of one microbatch, on all devices.
        * ``sequence``: the tokens of each sequence (DeepSeek-V3, arXiv:2412.19437). The result is the mean over
          sequences.
        * ``global``: ``counts``, or if there are none, as ``batch``.
      mask: weight of each token ``[batch, seq]``; 0 leaves it out. Sequences then weigh as much as their tokens. The
        loss must return the sum of the mask as the metric ``weight``, as for any mean over tokens, so that devices and
        microbatches are averaged with their weights.
      counts: for ``global``, the number of choices of each expert ``[experts]``, such as the sum of
        :func:`expert_counts` over the microbatches of a batch.

    Returns:
      A scalar, fp32 or wider. It is 0 if all weights are 0.

    Raises:
      ConfigError: ``per`` is unknown, a shape does not fit, or ``counts`` are given but not read.

    >>> import jax.numpy as jnp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> same = jnp.zeros((2, 8, 4))  # equal probabilities
    >>> float(load_balance_loss(Router(experts=4, k=2)(same)))
    1.0
    """
    _check(routing, per, mask, counts)
    p_BSX = routing.probabilities
    if counts is not None:
        chosen = sum_over_devices(at_least_fp32(counts)[None], ("batch", "seq"))
    elif per == "sequence":
        chosen = sum_over_devices(_counts(routing, mask), ("seq",))
    else:
        chosen = expert_counts(routing, mask)[None]
    chosen = chosen.astype(p_BSX.dtype)
    total = jnp.sum(chosen, -1, keepdims=True)
    fraction = jax.lax.stop_gradient(chosen / jnp.where(total == 0, 1, total))  # [batch or 1, experts]
    p_BX = jnp.sum(p_BSX if mask is None else p_BSX * mask[..., None].astype(p_BSX.dtype), 1)
    return p_BSX.shape[-1] * jnp.sum(fraction * p_BX) / weight_of_tokens(routing, mask)


def router_z_loss(routing: Routing, *, mask: jax.Array | None = None) -> jax.Array:
    """Returns the mean of ``logsumexp(logits) ** 2``, which keeps logits small (ST-MoE, arXiv:2202.08906).

    A token without a finite maximum of its logits counts as 0.

    Args:
      routing: the routing of the tokens ``[batch, seq]``.
      mask: as for :func:`load_balance_loss`.

    Returns:
      A scalar, fp32 or wider. It is 0 if all weights are 0.

    Raises:
      ConfigError: a shape does not fit.

    >>> import math, jax.numpy as jnp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> float(router_z_loss(Router(experts=4, k=2)(jnp.zeros((2, 8, 4))))) - math.log(4) ** 2 < 1e-6
    True
    """
    _check(routing, "batch", mask, None)
    used_BS = finite_tokens(routing.logits) if mask is None else finite_tokens(routing.logits) & (mask != 0)
    safe_BSX = jnp.where(used_BS[..., None], routing.logits, 0)  # 0 times the square of a huge logit would be NaN
    loss_BS = jnp.where(used_BS, jax.nn.logsumexp(safe_BSX, -1) ** 2, 0)
    return jnp.sum(loss_BS if mask is None else loss_BS * mask.astype(loss_BS.dtype)) / weight_of_tokens(routing, mask)


def expert_counts(routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Returns how many choices fall on each expert, over all devices: fp32 ``[experts]``, without a gradient.

    Args:
      routing: the routing of the tokens ``[batch, seq]``.
      mask: weight of each token ``[batch, seq]``.

    Raises:
      ConfigError: a shape does not fit.
    """
    _check(routing, "batch", mask, None)
    return sum_over_devices(jnp.sum(_counts(routing, mask), 0), ("batch", "seq"))


def _counts(routing: Routing, mask: jax.Array | None) -> jax.Array:
    """Returns the choices of each expert in each sequence of this device, ``[batch, experts]``."""
    match = routing.experts[..., None] == jnp.arange(routing.probabilities.shape[-1])
    weight = jnp.ones((), jnp.float32) if mask is None else at_least_fp32(mask)[..., None, None]
    return jax.lax.stop_gradient(jnp.sum(match * weight, (1, 2)))


def sum_over_devices(x: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """Returns the sum over the manual axes that shard these dims, ``batch`` or ``seq``."""
    axes = tuple(dict.fromkeys(axis for dim in dims for axis in manual_axes_of(dim, _DEFAULT_AXES[dim])))
    return jax.lax.psum(x, axes) if axes else x


def weight_of_tokens(routing: Routing, mask: jax.Array | None) -> jax.Array:
    """Returns the weight of this device's tokens, or 1 if it is 0."""
    if mask is None:
        return jnp.asarray(routing.experts[..., 0].size, routing.logits.dtype)
    total = jnp.sum(mask.astype(routing.logits.dtype))
    return jnp.where(total == 0, 1, total)


def _check(routing: Routing, per: str, mask: jax.Array | None, counts: jax.Array | None) -> None:
    *tokens, experts = routing.probabilities.shape
    if per not in PERS:
        raise ConfigError(
            f"load_balance_loss: per must be 'batch', 'sequence' or 'global', got {per!r}.{did_you_mean(per, PERS)} "
            "Remedy: use 'batch' for Mixtral's loss, 'sequence' for DeepSeek-V3's."
        )
    if len(tokens) != 2:
        raise ConfigError(
            f"routing: the logits must be [batch, seq, experts], got shape {[*tokens, experts]}. Remedy: reshape them "
            "before the Router is called; a batch without sequences is [batch, 1, experts]."
        )
    if mask is not None and list(jnp.shape(mask)) != tokens:
        raise ConfigError(
            f"routing: mask must be [batch, seq], here {tokens}, got shape {list(jnp.shape(mask))}. Remedy: pass one "
            "weight per token."
        )
    if counts is not None and per != "global":
        raise ConfigError(
            f"load_balance_loss: counts must be left out with per={per!r}, got an array. Remedy: use per='global', "
            "which takes the fractions from counts."
        )
    if counts is not None and jnp.shape(counts) != (experts,):
        raise ConfigError(
            f"load_balance_loss: counts must be of shape [{experts}], one number per expert, got shape "
            f"{list(jnp.shape(counts))}. Remedy: pass the sum of expert_counts(routing) over microbatches."
        )
