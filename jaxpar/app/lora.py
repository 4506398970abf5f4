"""The table ``model.lora`` of a configuration: adapters that are trained instead of the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jaxpar as jp
from jaxpar.app.config import RunConfig
from jaxpar.app.model_config import model_table
from jaxpar.errors import ConfigError, prefixed
from jaxpar.parallel.pipeline.schedules.async_window import ASYNCHRONOUS
from jaxpar.training.model import MakeModel


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters; see :class:`jaxpar.lora.LoraConfig`.

    Attributes:
      rank: the rank of the adapters.
      alpha: the product of an adapter is multiplied by ``alpha / rank``.
      targets: patterns of the paths of the weights that get adapters: ``[attention/q, mlp/*]``.
      inputs: the number of dims that a weight sums over, by pattern, where it is not found.
      adapter: folder of an adapter of PEFT to start from; by default they start at zero.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*",)
    inputs: dict[str, int] = field(default_factory=dict)
    adapter: str | None = None


def lora_settings(model: Mapping[str, Any]) -> LoraSettings | None:
    """Returns the adapters of a run from its table ``model``, or ``None`` if it trains the weights.

    Raises:
      ConfigError: a key or value is wrong.
    """
    return model_table(model, "lora", LoraSettings, "{rank: 8}")


def adapted_model(model: Mapping[str, Any], make_model: MakeModel) -> MakeModel:
    """Returns a ``make_model`` with the adapters of a table ``model``, if it has any.

    Raises:
      ConfigError: a key or value is wrong.
    """
    lora = lora_settings(model)
    if lora is None:
        return make_model
    with prefixed("model."):
        return jp.lora.adapt(make_model, jp.lora.LoraConfig(lora.rank, lora.alpha, lora.targets, lora.inputs))


def with_adapters(config: RunConfig, make_model: MakeModel) -> MakeModel:
    """Returns a ``make_model`` with the adapters of a run, if it has any.

    Raises:
      ConfigError: a value is wrong, or another setting excludes adapters.
    """
    lora, offload = lora_settings(config.model), config.parallel.offload
    pipeline = config.parallel.pipeline
    if lora is not None and pipeline is not None and pipeline.schedule in ASYNCHRONOUS:
        raise ConfigError(
            f"model.lora does not support parallel.pipeline.schedule: {pipeline.schedule}: it keeps several versions "
            "of all weights, also of those that are frozen. Remedy: schedule: 1f1b."
        )
    for key, value, why in (
        ("parallel.offload.path", offload.path, "the optimizer state of adapters is small"),
        ("optimizer.prune", config.optimizer.prune, "it prunes trained parameters, and weights are frozen"),
    ):
        if lora is not None and value is not None:
            raise ConfigError(f"model.lora does not support {key}: {why}. Remedy: leave {key} out.")
    if lora is not None and lora.adapter is not None and "factory" in config.model:
        raise ConfigError(
            "model.lora.adapter is for built-in models, but model.factory names one of your own. Remedy: leave it out."
        )
    return adapted_model(config.model, make_model)
