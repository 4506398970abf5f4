"""What attention in tiles computes: how much of the scores, and how often in a step."""

from __future__ import annotations

from jaxpar.parallel.attention.split.partition import in_lanes
from jaxpar.parallel.attention.tiled.padding import LANES
from jaxpar.planning.search.plan import Plan

_TILE = 512
"""The most queries and keys of a tile."""
_RECOMPUTED = 3.75
"""From so many forward passes in a traced step on, its backward pass computes attention again."""


def is_recomputed(traced_passes: float) -> bool:
    """Returns whether a backward pass runs attention's forward pass again, by the passes of the traced step."""
    return traced_passes > _RECOMPUTED


def passes_in_tiles(plan: Plan, platform: str, traced_passes: float) -> float:
    """Returns attention's work in a step, in forward passes of two matmuls.

    The gradient kernels compute scores and their gradients twice: three matmuls for queries, four for keys and values.
    Tiles in plain JAX compute them once, in five matmuls.

    Args:
      plan: the plan.
      platform: of its devices.
      traced_passes: those of a step whose scores are one array.

    >>> passes_in_tiles(Plan(), "tpu", 3.5), passes_in_tiles(Plan(context=2), "gpu", 4.0)
    (4.5, 4.5)
    """
    kernels = platform == "tpu" or (platform == "gpu" and plan.context == 1)
    return (4.5 if kernels else 3.5) + is_recomputed(traced_passes)


def computed_share(plan: Plan, seq: int) -> float:
    """Returns the fraction of all pairs of queries and keys that tiles under a causal mask compute.

    Tiles above the diagonal are skipped. Along a ring a device has an early and a late part of the sequence; where they
    are shorter than a tile may be, a tile has both, and none is skipped.

    Args:
      plan: the plan.
      seq: tokens of the whole sequence.

    >>> [computed_share(Plan(context=ring), 1024) for ring in (1, 2, 4, 8)]
    [0.75, 0.625, 0.5625, 1.0]
    """
    part = seq // (2 * plan.context if plan.context > 1 else 1)
    if part < LANES:
        return 1.0
    return min((seq + in_lanes(part, _TILE)) / (2 * seq), 1.0)
