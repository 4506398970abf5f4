"""Metrics of a routing: how evenly tokens are spread over experts, and how many choices are lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.parallel.experts.balance import expert_counts, sum_over_devices, weight_of_tokens
from jaxpar.parallel.experts.routing import Routing, finite_tokens


def routing_metrics(
    routing: Routing, dropped: jax.Array | float | None = None, *, mask: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns scalars that a loss can return as metrics: fp32, without a gradient.

    Where a step makes mesh axes manual, each device calls this on its own tokens; the average over devices, which the
    step computes, is the metric of all tokens (see :func:`~jaxpar.parallel.experts.balance.load_balance_loss`).

    Args:
      routing: the routing of the tokens ``[batch, seq]``.
      dropped: the fraction of choices that were dropped, as the dispatch returns it.
      mask: weight of each token ``[batch, seq]``; 0 leaves it out. The loss must return the sum of the mask as the
        metric ``weight``.

    Returns:
      A dict of the metrics. ``expert_load_max`` is the choices of the most chosen expert, relative to the mean of all
      experts: 1 if they are balanced, at most the number of experts. ``router_entropy`` is the entropy of the
      probabilities, in nats, mean over tokens. ``router_nonfinite`` is the number of tokens whose logits have no finite
      maximum, over all devices; the mean over microbatches, as for every metric. ``dropped_fraction`` is ``dropped``,
      if given.

    Raises:
      ConfigError: a shape does not fit.

    >>> import jax.numpy as jnp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> routing = Router(experts=4, k=1)(1e9 * jnp.eye(4)[None])  # each token has an expert of its own
    >>> {name: float(value) for name, value in routing_metrics(routing).items()}
    {'expert_load_max': 1.0, 'router_entropy': 0.0, 'router_nonfinite': 0.0}
    """
    routing = jax.lax.stop_gradient(routing)
    counts = expert_counts(routing, mask)
    mean = jnp.mean(counts)
    entropy_BS = jnp.sum(jax.scipy.special.entr(routing.probabilities), -1)
    lost_BS = ~finite_tokens(routing.logits)
    if mask is not None:
        entropy_BS, lost_BS = entropy_BS * mask.astype(entropy_BS.dtype), lost_BS & (mask != 0)
    metrics = {
        "expert_load_max": jnp.max(counts) / jnp.where(mean == 0, 1, mean),
        "router_entropy": jnp.sum(entropy_BS) / weight_of_tokens(routing, mask),
        "router_nonfinite": sum_over_devices(jnp.sum(lost_BS, dtype=jnp.float32), ("batch", "seq")),
    }
    if dropped is not None:
        metrics["dropped_fraction"] = jax.lax.stop_gradient(jnp.asarray(dropped))
    return {name: value.astype(jnp.float32) for name, value in metrics.items()}
