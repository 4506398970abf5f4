"""Build a run's pipeline from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jaxpar as jp
from jaxpar.app.config import PipelineConfig
from jaxpar.errors import ConfigError, JaxparError
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS

_MOST_UNITS = 2**15
"""Maximum forward passes of a schedule, whose orders are checked one by one: this many take 3 seconds."""


def make_pipeline(
    config: PipelineConfig | None, mesh: Mapping[str, Any], layers: int
) -> jp.Pipeline | jp.pipeline.Asynchronous | None:
    """Returns the pipeline that ``parallel.pipeline`` configures, or ``None`` without one.

    Args:
      config: the table ``parallel.pipeline``, or ``None``.
      mesh: the sizes of the mesh axes.
      layers: the number of layers in the stack that is cut into stages.

    Raises:
      ConfigError: the mesh has stages but the table is missing, the number of stages is open (-1), or an option is
        invalid.
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
    units = stages * config.microbatches * config.virtual_stages * config.sequence_chunks
    if units > _MOST_UNITS:
        raise ConfigError(
            f"parallel.pipeline: {stages} stages, microbatches: {config.microbatches}, virtual_stages: "
            f"{config.virtual_stages} and sequence_chunks: {config.sequence_chunks} are {units:,} forward passes, more "
            f"than {_MOST_UNITS:,}, the limit. Remedy: use fewer and larger microbatches."
        )
    try:
        if config.schedule in ASYNCHRONOUS:
            return _asynchronous(config, stages, layers)
        chunks: dict[str, Any] = {"chunks": config.virtual_stages, "sequence_chunks": config.sequence_chunks}
        schedule = jp.pipeline.schedule(config.schedule, stages, config.microbatches, **chunks)
        _check_layers(config, layers, schedule.pieces.count)
        own = {name: getattr(config, name) for name in ("executor", "recompute", "embedding", "head_grad_reduction")}
        return jp.Pipeline(schedule, **_shared(config), **own)
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
    names = ("virtual_stages", "sequence_chunks", "executor", "recompute", "embedding", "head_grad_reduction")
    for name in names:
        value = getattr(config, name)
        if value != getattr(PipelineConfig, name):  # the default
            raise ConfigError(
                f"parallel.pipeline: {name} is {value!r}, but under {config.schedule!r} each stage has one piece of "
                f"the model, and all stages do the same work in every tick. Remedy: leave {name} out."
            )
    _check_layers(config, layers, stages)
    return jp.pipeline.Asynchronous(config.schedule, stages, config.microbatches, **_shared(config))


def _shared(config: PipelineConfig) -> dict[str, Any]:
    """The options that every pipeline has."""
    names = ("activation_checkpointing", "grad_reduction", "layers_per_stage")
    return {name: getattr(config, name) for name in names}


def _check_layers(config: PipelineConfig, layers: int, pieces: int) -> None:
    """Raises if ``layers_per_stage`` does not divide the model's layers into the schedule's pieces."""
    each = config.layers_per_stage
    if each and (len(each) != pieces or sum(each) != layers or min(each) < 1):
        low, more = divmod(layers, pieces)
        raise ConfigError(
            f"parallel.pipeline: layers_per_stage is {list(each)}, {len(each)} numbers that sum to {sum(each)}, but "
            f"{layers} layers run in stages and the schedule has {pieces} pieces of at least one layer each. Remedy: "
            f"{pieces} numbers that sum to {layers}, such as {[low + 1] * more + [low] * (pieces - more)}."
        )
