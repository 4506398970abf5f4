"""Build a run's pipeline from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jaxpar as jp
from jaxpar.app.config import PipelineConfig
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS


def make_pipeline(
    config: PipelineConfig | None, mesh: Mapping[str, Any], layers: int
) -> jp.Pipeline | jp.pipeline.Asynchronous | None:
    """Return the pipeline that ``parallel.pipeline`` configures, or ``None`` without one.

    Args:
      config: the table ``parallel.pipeline``, or ``None``.
      mesh: the sizes of the mesh axes.
      layers: the number of layers of the model.

    Raises:
      ConfigError: the mesh has stages but the table is missing, the number of stages is open (-1), or an option or
        offset is invalid.
    """
    stages = mesh.get("pipeline", 1)
    if config is None:
        if stages != 1:
            raise ConfigError(
                f"mesh: pipeline is {stages}, but parallel.pipeline, which assigns layers to the stages, is not set. "
                f"Remedy: parallel.pipeline: {{schedule: 1f1b, microbatches: {2 * stages if stages > 0 else 8}}}."
            )
        return None
    if stages == -1:
        raise ConfigError(
            "mesh: pipeline is -1, but a schedule requires a fixed number of stages. Remedy: set pipeline to a number, "
            "and data: -1."
        )
    try:
        if config.schedule in ASYNCHRONOUS:
            return _asynchronous(config, stages, layers)
        schedule = jp.pipeline.schedule(
            config.schedule,
            stages,
            config.microbatches,
            chunks=config.virtual_stages,
            sequence_chunks=config.sequence_chunks,
        )
        layers_per_piece = _layers(config.offset, layers, schedule.pieces.count)
        return jp.Pipeline(
            schedule,
            config.activation_checkpointing,
            layers_per_piece,
            config.grad_reduction,
            config.executor,
            config.recompute,
            config.embedding,
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
            f"parallel.pipeline: recompute is {list(pipeline.recompute)}, but under remat 'full' every layer already "
            "keeps only its input, so recompute has no effect. Remedy: parallel.remat: none (or dots, save_outputs), "
            "which decides what the other layers keep."
        )


def _asynchronous(config: PipelineConfig, stages: int, layers: int) -> jp.pipeline.Asynchronous:
    """The pipeline of a schedule that is not drained between steps."""
    supported: tuple[tuple[str, Any, Any], ...] = (
        ("virtual_stages", config.virtual_stages, 1),
        ("sequence_chunks", config.sequence_chunks, 1),
        ("executor", config.executor, "lockstep"),
        ("recompute", config.recompute, ()),
        ("embedding", config.embedding, "per_step"),
    )
    for name, value, default in supported:
        if value != default:
            raise ConfigError(
                f"parallel.pipeline: {name} is {value!r}, but under {config.schedule!r} each stage has one piece of "
                f"the model, and all stages do the same work in every tick. Remedy: leave {name} out."
            )
    offset = _layers(config.offset, layers, stages)
    return jp.pipeline.Asynchronous(
        config.schedule, stages, config.microbatches, config.activation_checkpointing, offset, config.grad_reduction
    )


def _layers(offset: tuple[int, ...], layers: int, pieces: int) -> tuple[int, ...]:
    """The number of layers of each piece; empty if all pieces have the same number."""
    if not offset:
        return ()
    share, rest = divmod(layers - sum(offset), pieces)
    if len(offset) != pieces or rest or share + min(offset) < 1:
        raise ConfigError(
            f"parallel.pipeline: offset is {list(offset)}, {len(offset)} numbers that sum to {sum(offset)}, but "
            f"{layers} layers in {pieces} pieces require {pieces} numbers, a sum that leaves a multiple of {pieces}, "
            f"and at least one layer in each piece. Remedy: an offset such as "
            f"{[1, *(0,) * (pieces - 2), -1] if pieces > 1 else [0]}, or a number of layers that is a multiple of "
            f"{pieces}."
        )
    return tuple(share + more for more in offset)
