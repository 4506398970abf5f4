"""The bias that balances a router's experts without a loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import ConfigError
from jaxpar.parallel.experts.balance import expert_counts
from jaxpar.parallel.experts.routing import Routing
from jaxpar.utils.arrays import at_least_fp32

BIAS = "router_bias"
"""The last part of the path of a bias that :func:`balanced_bias` updates."""
_UNNOTICED = 2.0**-60
"""Scale of the bias's gradient: its square is below the rounding of any norm of gradients."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class BalancedBiases:
    """The state of an optimizer that moves biases by their gradients' signs; a node without arrays.

    A step finds it, and neither casts these biases nor sends their gradients in a dtype of its precision. The signs
    would not survive: in 16 bits a gradient of this scale is 0, or a sum over microbatches has another sign.

    Attributes:
      paths: of the biases in the parameters.
    """

    paths: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, params: Any) -> BalancedBiases:
        """Returns the state for biases, a tree like the parameters without all others."""
        name = lambda key: jax.tree_util.keystr((key,), simple=True)
        return cls(frozenset(tuple(map(name, keys)) for keys, _ in jax.tree_util.tree_leaves_with_path(params)))


def balanced_biases(opt_state: Any) -> frozenset[tuple[str, ...]]:
    """Returns the paths of the parameters that :func:`balanced_bias` moves, from an optimizer's state."""
    is_state = lambda x: isinstance(x, BalancedBiases)
    states = filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state))
    return frozenset[tuple[str, ...]]().union(*(state.paths for state in states))


def update_bias(bias: jax.Array, counts: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Returns the bias for the next step (balancing without an auxiliary loss, arXiv:2408.15664).

    An expert that was chosen more often than the mean is lowered by ``rate``, one that was chosen less often is raised.

    Args:
      bias: the router's bias ``[experts]``.
      counts: the choices of each expert in the batch ``[experts]``, over all devices (:func:`expert_counts`).
      rate: the change; DeepSeek-V3 uses 0.001.

    Raises:
      ConfigError: the shapes differ.

    >>> import jax.numpy as jnp
    >>> update_bias(jnp.zeros(3), jnp.array([6.0, 4.0, 2.0]), 0.5).tolist()
    [-0.5, 0.0, 0.5]
    """
    if jnp.ndim(bias) != 1 or jnp.shape(counts) != jnp.shape(bias):
        raise ConfigError(
            f"update_bias: counts must be of the shape of bias, [experts], got {list(jnp.shape(counts))} and "
            f"{list(jnp.shape(bias))}. Remedy: pass the bias and expert_counts(routing) of one layer."
        )
    return bias - (rate * jnp.sign(_excess(counts))).astype(bias.dtype)


def bias_loss(bias: jax.Array, routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Returns 0, whose gradient in the bias has the sign of each expert's load relative to the mean.

    A step that descends along the sign of this gradient is :func:`update_bias`. So the bias is a parameter like any
    other: it is updated once per step from the choices of all microbatches, stages and devices, and it needs no carried
    state. :func:`balanced_bias` is such an optimizer. The gradient is far too small to change a norm of gradients.

    Args:
      bias: the bias ``[experts]``, a parameter.
      routing: the routing of the tokens ``[batch, seq]``.
      mask: as for :func:`load_balance_loss`.

    Raises (when it is differentiated):
      ConfigError: the bias is in fp16, which cannot hold its gradient.

    >>> import jax, jax.numpy as jnp
    >>> from jaxpar.parallel.experts.routing import Router
    >>> routing = Router(experts=2, k=1)(jnp.array([[[1.0, 0.0]]]))
    >>> value, grad = jax.value_and_grad(bias_loss)(jnp.zeros(2), routing)
    >>> float(value), jnp.sign(grad).tolist()
    (0.0, [1.0, -1.0])
    """
    excess = _excess(jax.lax.stop_gradient(expert_counts(routing, mask)))
    # By a power of two, so that the sums over microbatches and devices stay exact.
    scale = _UNNOTICED / 2 ** (routing.experts.size * bias.size).bit_length()
    return jnp.sum((_differentiable(bias) - jax.lax.stop_gradient(bias)) * (excess * scale))


def _excess(counts: jax.Array) -> jax.Array:
    """Returns how far the counts are above their mean, times the number of experts.

    The sign is exact for whole counts. ``counts - mean(counts)`` is not: XLA divides by multiplying with a reciprocal,
    so that a balanced expert would move too.
    """
    counts = at_least_fp32(counts)
    experts, total = counts.shape[-1], jnp.sum(counts)
    near = jnp.round(total / experts)
    return (counts - near) * experts - (total - near * experts)


@jax.custom_jvp
def _differentiable(bias: jax.Array) -> jax.Array:
    return bias


@_differentiable.defjvp
def _check_gradient(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    if jnp.finfo(primals[0].dtype).smallest_subnormal > _UNNOTICED:
        raise ConfigError(
            f"bias_loss: the bias {list(primals[0].shape)} is {primals[0].dtype}, in which its gradient is 0. Remedy: "
            "an fp32 parameter, and tx = jp.moe.balanced_bias(tx, rate), whose bias a step does not cast."
        )
    return primals[0], tangents[0]


def balanced_bias(tx: optax.GradientTransformation, rate: float, name: str = BIAS) -> Any:
    """Returns the optimizer ``tx``, but parameters called ``name`` move by ``rate`` against their gradients' signs.

    A step with this optimizer keeps these parameters and their gradients in their own dtype, whatever its precision.

    Args:
      tx: the optimizer of all other parameters.
      rate: the step of the bias (0.001 in DeepSeek-V3).
      name: the last part of the bias's path.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros(1), "router_bias": jnp.zeros(2)}
    >>> tx = balanced_bias(optax.sgd(1.0), 0.5)
    >>> grads = {"w": jnp.ones(1), "router_bias": jnp.array([1e-18, -1e-18])}
    >>> {path: x.tolist() for path, x in tx.update(grads, tx.init(params), params)[0].items()}
    {'router_bias': [-0.5, 0.5], 'w': [-1.0]}
    """
    move = lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * jnp.sign(g), grads), state)
    step = optax.GradientTransformation(BalancedBiases.of, move)

    def label(params: Any) -> Any:
        is_bias = lambda path: jax.tree_util.keystr(path[-1:], simple=True) == name
        return jax.tree_util.tree_map_with_path(lambda path, _: "bias" if is_bias(path) else "others", params)

    return optax.partition({"bias": step, "others": tx}, label)
