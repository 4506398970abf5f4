"""What a run trains: the model itself, adapters of it (``model.lora``), or a model with rounded weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jaxpar as jp
from jaxpar.app.config import RunConfig
from jaxpar.app.lora import with_adapters
from jaxpar.app.model_config import model_table
from jaxpar.app.quantize_config import QuantizeSettings, quantize_config
from jaxpar.errors import ConfigError
from jaxpar.models.llama import LlamaConfig
from jaxpar.training.model import MakeModel

KEY = "model.quantize"


def quantize_settings(model: Mapping[str, Any]) -> QuantizeSettings | None:
    """Returns which weights a run rounds, from its table ``model``; ``None`` if it rounds none.

    Raises:
      ConfigError: a key or value is wrong.
    """
    return model_table(model, "quantize", QuantizeSettings, "{bits: 4, group: 32}")


def trained_model(config: RunConfig, make_model: MakeModel, model: LlamaConfig | None) -> MakeModel:
    """Returns the ``make_model`` of what a run trains.

    Args:
      config: of the run.
      make_model: of the model itself.
      model: the configuration of a built-in model; ``None`` for one of the user's own.

    Raises:
      ConfigError: a value is wrong, or another setting excludes adapters or rounded weights.
    """
    settings, adapted = quantize_settings(config.model), with_adapters(config, make_model)
    if settings is None:
        return adapted
    for key, value, why in (
        ("model.lora", config.model.get("lora"), "adapters are not rounded, and weights are frozen"),
        ("parallel.offload.parameters", config.parallel.offload.parameters, "weights are rounded on the device"),
    ):
        if value is not None:
            raise ConfigError(f"{KEY} does not support {key}: {why}. Remedy: leave one of them out.")
    return jp.compression.quantize_aware(make_model, quantize_config(settings, model, KEY))
