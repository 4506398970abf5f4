"""``Router``: which experts each token is sent to, and with which weights.

Shape suffixes: X experts, K experts that a token chooses, G groups of experts; ``...`` stands for the tokens' dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.utils.arrays import at_least_fp32
from jaxpar.utils.checks import is_count

Score = Literal["softmax", "sigmoid"]
SCORES: tuple[str, ...] = get_args(Score)
LOGITS = "router_logits"
"""The checkpoint name of routers' logits and biases: weights that they come from are gathered exactly."""
_BEST_OF_GROUP = 2
"""The number of a group's scores whose sum decides whether the group is kept (DeepSeek-V3)."""


class Routing(NamedTuple):
    """The routing of tokens to experts. Floats are fp32, or fp64 if the logits are.

    Attributes:
      weights: weights of the chosen experts ``[..., k]``. Those of a token without a finite maximum of its logits are
        NaN.
      experts: the indices of the chosen experts ``[..., k]``, int32, distinct, the best score first.
      probabilities: the scores of all experts, divided by their sum, ``[..., experts]``. Without a finite maximum of
        the logits they are all equal.
      logits: the router's logits ``[..., experts]``.
    """

    weights: jax.Array
    experts: jax.Array
    probabilities: jax.Array
    logits: jax.Array


@dataclass(frozen=True)
class Router:
    """Routes every token to its ``k`` experts of the highest score.

    Scores, weights and probabilities are computed in fp32 or wider. Experts of equal score are chosen in the order of
    their indices. The choice has no gradient; weights and probabilities are differentiable in the logits.

    A token whose logits have no finite maximum (one is NaN or +inf, or all are -inf) is routed as if its logits were 0,
    with weights of NaN, and sends no gradient to its logits. All other tokens are unaffected. A logit of -inf gives an
    expert a score of 0.

    Attributes:
      experts: the number of experts.
      k: how many experts each token is sent to.
      score: ``softmax`` over all experts (Switch, GShard, Mixtral), or ``sigmoid`` of each logit (DeepSeek-V3).
      normalize: whether the weights of a token are divided by their sum.
      scale: factor of all weights, after they are normalized (DeepSeek's routed scaling factor).
      groups: the number of groups of consecutive experts, for group-limited routing (DeepSeek-V3, arXiv:2412.19437).
      groups_per_token: the number of groups that a token may choose experts from: those with the largest sum of their
        two best scores.

    Raises:
      ConfigError: an argument is out of range, or the arguments do not fit each other.

    >>> import jax.numpy as jnp
    >>> routing = Router(experts=4, k=2)(jnp.log(jnp.array([[1.0, 2.0, 1.0, 6.0]])))
    >>> routing.experts.tolist(), [round(float(w), 4) for w in routing.weights[0]]
    ([[3, 1]], [0.75, 0.25])
    """

    experts: int
    k: int
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
          ConfigError: one of them is out of range, or they do not fit each other.
        """
        for name in ("experts", "k", "groups", "groups_per_token"):
            value = getattr(self, name)
            if not is_count(value):
                raise ConfigError(
                    f"Router: {name} must be a whole number >= 1, got {value!r}. Remedy: use {name}=1 or more."
                )
        if self.score not in SCORES:
            raise ConfigError(
                f"Router: score must be 'softmax' or 'sigmoid', got {self.score!r}.{did_you_mean(self.score, SCORES)} "
                "Remedy: use 'softmax' for Mixtral, 'sigmoid' for DeepSeek-V3."
            )
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not (number and 0 < self.scale < math.inf):
            raise ConfigError(f"Router: scale must be a number > 0, got {self.scale!r}. Remedy: leave it out for 1.")
        if self.k > self.experts:
            raise ConfigError(
                f"Router: k must be at most the number of experts, {self.experts}, got {self.k}. Remedy: choose fewer "
                "experts per token, or add experts."
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.experts % self.groups:
            raise ConfigError(
                f"Router: groups must be a divisor of the number of experts, {self.experts}, got {self.groups}. "
                "Remedy: use another number of groups, or groups=1."
            )
        if self.groups_per_token > self.groups:
            raise ConfigError(
                f"Router: groups_per_token must be at most groups, {self.groups}, got {self.groups_per_token}. Remedy: "
                f"use groups_per_token={self.groups}, which does not limit the choice, or more groups."
            )
        size = self.experts // self.groups
        if self.groups_per_token * size < self.k:
            raise ConfigError(
                f"Router: groups_per_token must be at least {math.ceil(self.k / size)}, because a token chooses "
                f"k={self.k} experts and a group has {size}, got {self.groups_per_token}. Remedy: increase "
                "groups_per_token, or use fewer groups or a smaller k."
            )

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> Routing:
        """Returns the routing of tokens with these logits.

        Args:
          logits: the router's logits ``[..., experts]``, of any float dtype.
          bias: added to the scores ``[experts]`` for the choice of experts, not for their weights (balancing without an
            auxiliary loss, arXiv:2408.15664). It has no gradient.

        Raises:
          ConfigError: the shape of the logits or of the bias does not fit the number of experts.
        """
        self._check_shapes(logits, bias)
        logits_X = at_least_fp32(checkpoint_name(logits, LOGITS))
        bias = None if bias is None else checkpoint_name(bias, LOGITS)
        finite = finite_tokens(logits_X)[..., None]
        safe_X = jnp.where(finite, logits_X, 0)  # before any other operation, or NaN would be in gradients
        log_scores_X = safe_X if self.score == "softmax" else jax.nn.log_sigmoid(safe_X)
        probabilities_X = jax.nn.softmax(log_scores_X)
        scores_X = probabilities_X if self.score == "softmax" else jax.nn.sigmoid(safe_X)
        chosen_K = self._choose(jax.lax.stop_gradient(scores_X), bias)
        # The softmax of logarithms divides by the sum without 0 / 0 where all scores underflow.
        weights_K = _softmax(_pick(log_scores_X, chosen_K)) if self.normalize else _pick(scores_X, chosen_K)
        weights_K = jnp.where(finite, weights_K * self.scale, jnp.nan)
        return Routing(weights_K, chosen_K, probabilities_X, logits_X)

    def _check_shapes(self, logits: jax.Array, bias: jax.Array | None) -> None:
        if not jnp.ndim(logits) or logits.shape[-1] != self.experts:
            raise ConfigError(
                f"Router: the last dim of logits must be the number of experts, {self.experts}, got shape "
                f"{list(jnp.shape(logits))}. Remedy: project tokens to [..., {self.experts}], or set "
                "experts of the Router."
            )
        if bias is not None and jnp.shape(bias) != (self.experts,):
            raise ConfigError(
                f"Router: bias must be of shape [{self.experts}], one number per expert, got shape "
                f"{list(jnp.shape(bias))}. Remedy: use jnp.zeros({self.experts}) as the initial bias."
            )

    def _choose(self, scores_X: jax.Array, bias: jax.Array | None) -> jax.Array:
        if bias is not None:
            scores_X += jax.lax.stop_gradient(bias).astype(scores_X.dtype)
        if self.groups_per_token < self.groups:
            by_group = scores_X.reshape(*scores_X.shape[:-1], self.groups, -1)
            best = _pick(by_group, _first_best(by_group, min(_BEST_OF_GROUP, by_group.shape[-1])))
            kept = _first_best(best.sum(-1), self.groups_per_token)
            kept_G = (kept[..., None] == jnp.arange(self.groups)).any(-2)
            scores_X = jnp.where(kept_G[..., None], by_group, -jnp.inf).reshape(scores_X.shape)
        return _first_best(scores_X, self.k)


def finite_tokens(logits: jax.Array) -> jax.Array:
    """Returns whether the largest logit of each token is finite, bool ``[...]``, for logits ``[..., experts]``."""
    return jnp.isfinite(jnp.max(logits, -1))


def _first_best(scores_X: jax.Array, count: int) -> jax.Array:
    """Returns the distinct indices of the largest scores, int32 ``[..., count]``, largest first, then lowest index.

    It replaces ``jax.lax.top_k``: where that is a custom call (on CPUs; on TPUs it is a sort), XLA gathers all devices'
    tokens on each.
    """
    left_X = jnp.maximum(scores_X, jnp.finfo(scores_X.dtype).min)  # so that -inf marks only what is already chosen
    numbers_X = jnp.arange(scores_X.shape[-1], dtype=jnp.int32)
    chosen = []
    for _ in range(count):
        chosen.append(jax.lax.argmax(left_X, left_X.ndim - 1, jnp.int32))
        left_X = jnp.where(numbers_X == chosen[-1][..., None], -jnp.inf, left_X)
    return jnp.stack(chosen, -1)


def _pick(values_X: jax.Array, chosen_K: jax.Array) -> jax.Array:
    """Returns ``values_X[..., chosen_K]``; its gradient needs no scatter."""
    match_KX = chosen_K[..., None] == jnp.arange(values_X.shape[-1])
    return jnp.sum(jnp.where(match_KX, values_X[..., None, :], 0), -1)


def _softmax(x_K: jax.Array) -> jax.Array:
    """Returns the softmax, or zeros where all ``x_K`` are -inf."""
    some = jnp.max(x_K, -1, keepdims=True) > -jnp.inf
    return jnp.where(some, jax.nn.softmax(jnp.where(some, x_K, 0)), 0)
