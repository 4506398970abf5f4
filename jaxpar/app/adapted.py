"""Frozen weights and adapters of a run: where they come from, which weights adapters belong to, and their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpar as jp
from jaxpar.app.job import Job
from jaxpar.checkpoint.manifest import read
from jaxpar.errors import CheckpointError
from jaxpar.interop import peft
from jaxpar.training.model import MakeModel
from jaxpar.training.model.lora import LoraModel
from jaxpar.training.model.quantized import QuantizeAware
from jaxpar.utils.multihost import settled

DIGEST = "frozen_params"
"""The key of a checkpoint's metadata that says to which weights its adapters belong."""


def plain_model(make_model: MakeModel) -> MakeModel:
    """Returns the ``make_model`` of the same model without adapters and rounding."""
    return make_model.make_model if isinstance(make_model, LoraModel | QuantizeAware) else make_model


def frozen_weights(job: Job, layout: jp.Layout, like: Any = None) -> Any:
    """Returns the weights that a run with adapters freezes: those of ``train.init_from``, or else random ones.

    Args:
      job: the run.
      layout: of the weights.
      like: the weights as shapes with shardings, if these are not the layout's own.
    """
    folder, tx = job.config.train.init_from, optax.identity()
    if like is None and job.config.parallel.offload.parameters is not None:  # the plain model keeps none on the host
        like = jp.lora.frozen_params(jp.abstract_state(layout, job.make_model, job.tx))
    if folder is None:
        made = jp.init(layout, plain_model(job.make_model), tx, seed=job.config.train.seed).params
        return made if like is None else jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), made, like)
    shapes = jp.abstract_state(layout, plain_model(job.make_model), tx).params if like is None else like
    return settled(lambda: jp.restore(folder, {"params": shapes}, only=["params"], cast=True)["params"])


def first_adapted_state(job: Job, layout: jp.Layout) -> jp.TrainState:
    """Returns the state at step 0 of a run with adapters: new ones, or those of ``model.lora.adapter``."""
    options: dict[str, Any] = {"seed": job.config.train.seed, "precision": job.precision}
    state = jp.lora.init_from(layout, job.make_model, job.tx, frozen_weights(job, layout), **options)
    adapter = None if job.lora is None else job.lora.adapter
    return state if adapter is None else peft.load(adapter, state, job.llama)


def check_digest(metadata: Mapping[str, Any], own: Mapping[str, Any], where: Path | str, weights: str | None) -> None:
    """Checks that adapters of a checkpoint belong to these weights.

    Args:
      metadata: of the checkpoint.
      own: what a checkpoint with these weights would say.
      where: the checkpoint, for errors.
      weights: ``train.init_from``, for errors.

    Raises:
      CheckpointError: they belong to others.
    """
    theirs, ours = metadata.get(DIGEST), own.get(DIGEST)
    if theirs is not None and theirs != ours:
        raise CheckpointError(
            f"{where} has adapters of other weights: theirs have the digest {theirs}, those of "
            f"{weights or 'this run, which are random,'} have {ours}. Remedy: the train.init_from with which the "
            "adapters were trained."
        )


def merged_params(job: Job, layout: jp.Layout, like: Any, adapters: Any = None, folder: Path | None = None) -> Any:
    """Returns the weights of a run with its adapters added.

    Args:
      job, layout: the run.
      like: the weights as shapes with shardings.
      adapters: the trained adapters; by default those at step 0.
      folder: the checkpoint that they come from, which is compared with the weights.

    Raises:
      CheckpointError: the adapters belong to other weights.
    """
    frozen = frozen_weights(job, layout, like)
    if folder is not None:
        metadata = settled(lambda: read(folder).metadata)
        check_digest(metadata, {DIGEST: jp.lora.digest_of(frozen)}, folder, job.config.train.init_from)
    if adapters is None:
        state = jp.lora.init_from(layout, job.make_model, optax.identity(), frozen, seed=job.config.train.seed)
        lora = job.lora
        state = state if lora is None or lora.adapter is None else peft.load(lora.adapter, state, job.llama)
    else:
        abstract = jp.lora.without_frozen(jp.abstract_state(layout, job.make_model, optax.identity()))
        state = jp.lora.with_frozen(replace(abstract, params=adapters), frozen)
    return jp.lora.merge(state)
