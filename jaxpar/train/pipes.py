"""A run's pipeline, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jaxpar as jp
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.train.config import PipelineConfig


def make_pipeline(asked: PipelineConfig | None, mesh: Mapping[str, Any], layers: int) -> jp.Pipeline | None:
    """What ``parallel.pipeline`` asks for on a mesh, of so many layers.

    Raises:
      ConfigError: the mesh says nothing of stages, the key is missing for a mesh that has some, or an offset does not fit.
    """
    stages = mesh.get("pipeline", 1)
    if asked is None:
        if stages != 1:
            raise ConfigError(
                f"mesh: pipeline is {stages}, but parallel.pipeline says nothing of how the layers go over the stages. Remedy: parallel.pipeline: "
                f"{{schedule: 1f1b, microbatches: {2 * stages if stages > 0 else 8}}}."
            )
        return None
    if stages == -1:
        raise ConfigError(
            "mesh: pipeline is -1, but a schedule wants to know its stages. Remedy: a number, and data: -1."
        )
    try:
        schedule = jp.schedule(asked.schedule, stages=stages, microbatches=asked.microbatches, chunks=asked.chunks)
        return jp.Pipeline(schedule, asked.keeps, _layers(asked.offset, layers, schedule.pieces.count), asked.reduce)
    except ConfigError:
        raise
    except JaxparError as error:
        raise ConfigError(f"parallel.pipeline: {error}") from error


def _layers(offset: tuple[int, ...], layers: int, pieces: int) -> tuple[int, ...]:
    """How many layers each piece has."""
    if not offset:
        return ()
    share, rest = divmod(layers - sum(offset), pieces)
    if len(offset) != pieces or rest or share + min(offset) < 1:
        raise ConfigError(
            f"parallel.pipeline: offset is {list(offset)}, {len(offset)} numbers that sum to {sum(offset)}, but {layers} layers in {pieces} pieces "
            f"want {pieces} numbers, a sum that leaves a multiple of {pieces}, and one layer or more in each. Remedy: as "
            f"{[1, *(0,) * (pieces - 2), -1] if pieces > 1 else [0]}, or layers that the pieces divide."
        )
    return tuple(share + more for more in offset)
