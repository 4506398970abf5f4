"""Build a run's pipeline from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jaxpar as jp
from jaxpar.app.config import PipelineConfig
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS


def make_pipeline(
    asked: PipelineConfig | None, mesh: Mapping[str, Any], layers: int
) -> jp.Pipeline | jp.pipeline.Asynchronous | None:
    """Return the pipeline that ``parallel.pipeline`` configures, or ``None`` without one.

    Args:
      asked: the table ``parallel.pipeline``, or ``None``.
      mesh: the sizes of the mesh axes.
      layers: the number of layers of the model.

    Raises:
      ConfigError: the mesh has stages but the table is missing, the number of stages is open (-1), or an option or
        offset is invalid.
    """
    stages = mesh.get("pipeline", 1)
    if asked is None:
        if stages != 1:
            raise ConfigError(
                f"mesh: pipeline is {stages}, but parallel.pipeline says nothing of how the layers go over the stages. "
                f"Remedy: parallel.pipeline: {{schedule: 1f1b, microbatches: {2 * stages if stages > 0 else 8}}}."
            )
        return None
    if stages == -1:
        raise ConfigError(
            "mesh: pipeline is -1, but a schedule wants to know its stages. Remedy: a number, and data: -1."
        )
    try:
        if asked.schedule in ASYNCHRONOUS:
            return _asynchronous(asked, stages, layers)
        schedule = jp.pipeline.schedule(
            asked.schedule,
            stages,
            asked.microbatches,
            chunks=asked.virtual_stages,
            sequence_chunks=asked.sequence_chunks,
        )
        each = _layers(asked.offset, layers, schedule.pieces.count)
        return jp.Pipeline(
            schedule,
            asked.activation_checkpointing,
            each,
            asked.grad_reduction,
            asked.executor,
            asked.recompute,
            asked.embedding,
        )
    except ConfigError:
        raise
    except JaxparError as error:
        raise ConfigError(f"parallel.pipeline: {error}") from error


def check_recompute(pipeline: jp.Pipeline | jp.pipeline.Asynchronous | None, remat: str | jp.RematPolicy) -> None:
    """Reject ``recompute`` under a remat policy that already recomputes every layer.

    Raises:
      ConfigError: ``recompute`` is set and the policy is ``full``.
    """
    if isinstance(pipeline, jp.Pipeline) and pipeline.recompute and jp.RematPolicy.of(remat).policy == "full":
        raise ConfigError(
            f"parallel.pipeline: recompute is {list(pipeline.recompute)}, but by remat 'full' every layer keeps its "
            "input alone: there is nothing to choose. Remedy: parallel.remat: none (or dots, save_outputs), what the "
            "other layers keep."
        )


def _asynchronous(asked: PipelineConfig, stages: int, layers: int) -> jp.pipeline.Asynchronous:
    """The pipeline of a schedule that is not drained between steps."""
    asks: tuple[tuple[str, Any, Any], ...] = (
        ("virtual_stages", asked.virtual_stages, 1),
        ("sequence_chunks", asked.sequence_chunks, 1),
        ("executor", asked.executor, "lockstep"),
        ("recompute", asked.recompute, ()),
        ("embedding", asked.embedding, "per_step"),
    )
    for name, value, wanted in asks:
        if value != wanted:
            raise ConfigError(
                f"parallel.pipeline: {name} is {value!r}, but under {asked.schedule!r} each stage has one piece of the "
                f"model, and all stages do the same in every tick. Remedy: leave {name} out."
            )
    offset = _layers(asked.offset, layers, stages)
    return jp.pipeline.Asynchronous(
        asked.schedule, stages, asked.microbatches, asked.activation_checkpointing, offset, asked.grad_reduction
    )


def _layers(offset: tuple[int, ...], layers: int, pieces: int) -> tuple[int, ...]:
    """The number of layers of each piece; empty if all pieces have the same number."""
    if not offset:
        return ()
    share, rest = divmod(layers - sum(offset), pieces)
    if len(offset) != pieces or rest or share + min(offset) < 1:
        raise ConfigError(
            f"parallel.pipeline: offset is {list(offset)}, {len(offset)} numbers that sum to {sum(offset)}, but "
            f"{layers} layers in {pieces} pieces want {pieces} numbers, a sum that leaves a multiple of {pieces}, and "
            f"one layer or more in each. Remedy: as {[1, *(0,) * (pieces - 2), -1] if pieces > 1 else [0]}, or layers "
            "that the pieces divide."
        )
    return tuple(share + more for more in offset)
