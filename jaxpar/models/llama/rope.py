"""Frequencies of rotary positions (Su et al. 2021, arXiv:2104.09864), and how they are stretched to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import ConfigError
from jaxpar.utils.checks import INT32, Range

_Positive = Annotated[float, Range(0, 1e12, above=True)]
Divisor = Annotated[float, Range(1e-12, 1e12)]
"""Of frequencies: those of a smaller number are beyond fp32."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a model are stretched beyond the context length of its pretraining.

    Attributes:
      kind: ``linear`` divides all frequencies by ``factor`` (Chen et al. 2023, arXiv:2306.15595). ``llama3`` (Llama
        3.1) and ``yarn`` (Peng et al. 2023, arXiv:2309.00071) divide those of pairs that turn fewer than ``slow_turns``
        times within ``original_seq``, keep those of pairs that turn more than ``fast_turns`` times, and blend both in
        between: ``llama3`` linearly in the number of turns, ``yarn`` linearly in the number of the pair.
      factor: the stretch.
      original_seq: the context length of the pretraining, in positions.
      slow_turns, fast_turns: see ``kind``.
      attention_factor: ``yarn`` multiplies rotated queries and keys by this; ``None``: 0.1 ln(``factor``) + 1, or the
        quotient of the two scales below.
      mscale, mscale_all_dim: scales of DeepSeek: ``yarn`` multiplies rotated queries and keys by m(``mscale``) /
        m(``mscale_all_dim``), and the scores of latent attention by m(``mscale_all_dim``)², where m(s) is
        0.1 s ln(``factor``) + 1.
      truncate: ``yarn`` rounds the numbers of the pairs where blending starts and ends to whole pairs.

    Raises:
      ConfigError: ``fast_turns`` is not greater than ``slow_turns``.

    >>> RopeScaling("yarn", factor=40.0).magnitude(1.0)
    1.3688879454113936
    """

    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    factor: Divisor = 8.0
    original_seq: Annotated[int, Range(1, INT32)] = 8192
    slow_turns: _Positive = 1.0
    fast_turns: _Positive = 4.0
    attention_factor: _Positive | None = None
    mscale: _Positive | None = None
    mscale_all_dim: _Positive | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.fast_turns <= self.slow_turns:
            raise ConfigError(
                f"rope_scaling: fast_turns must be greater than slow_turns={self.slow_turns}, got {self.fast_turns}. "
                "Remedy: slow_turns: 1, and fast_turns: 4 (llama3) or 32 (yarn)."
            )

    def magnitude(self, scale: float) -> float:
        """Returns m(``scale``); see ``mscale``."""
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def rotated_factor(self) -> float:
        """The factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """The factor of the scores of latent attention."""
        return self.magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Returns the angles per position of each rotary pair, fp32 [dim / 2].

    Args:
      dim: the numbers of a head that are rotated.
      theta: the base of the frequencies.
      scaling: the stretch, if there is one.

    >>> frequencies(4, 100.0, RopeScaling("linear", factor=2.0)).tolist()
    [0.5, 0.05000000074505806]
    """
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    slow, fast = scaling.slow_turns, scaling.fast_turns
    if scaling.kind == "llama3":
        turns = scaling.original_seq * frequency / (2 * math.pi)
        keep = jnp.clip((turns - slow) / (fast - slow), 0, 1)
    else:
        keep = 1 - jnp.asarray(_yarn_ramp(dim, theta, scaling), jnp.float32)
    return frequency * (keep + (1 - keep) / scaling.factor)


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns for each rotary pair, [dim / 2], which part of it is stretched."""
    per_pair = dim / (2 * math.log(theta))
    ends = [
        per_pair * math.log(scaling.original_seq / (2 * math.pi * n)) for n in (scaling.fast_turns, scaling.slow_turns)
    ]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
    first, last = max(first, 0), min(last, dim - 1)
    # The difference may be negative, if all pairs turn more often; the published code then stretches them all.
    return np.clip((np.arange(dim // 2) - first) / (last - first or 1e-3), 0, 1)
