"""The table ``model`` of a configuration, for built-in models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jaxpar as jp
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.models import llama
from jaxpar.models.moe import config as moe_config
from jaxpar.utils.checks import shown
from jaxpar.utils.yaml_config import build

FAMILIES = ("llama", *moe_config.FAMILIES)


def model_config(data: Mapping[str, Any], precision: jp.Precision) -> llama.LlamaConfig:
    """Returns the configuration of a built-in model, from ``model`` of a run's configuration.

    Raises:
      ConfigError: an unknown family, preset or field.
    """
    fields = {key: value for key, value in data.items() if key not in ("lora", "quantize")}
    if precision.compute is not None and fields.setdefault("dtype", precision.compute) != precision.compute:
        raise ConfigError(
            f"model: dtype is {fields['dtype']!r}, but precision sets compute: {precision.compute}. Remedy: leave "
            "model.dtype out."
        )
    family = fields.pop("family", None)
    if family not in FAMILIES:
        raise ConfigError(
            f"model: unknown family {family!r}.{did_you_mean(family, FAMILIES)} Families: {', '.join(FAMILIES)}. "
            "Remedy: for a model of your own, model: {factory: my_module:make_model, loss: my_module:loss}."
        )
    name = fields.pop("preset", "tiny")
    base = llama.preset(name) if family == "llama" else moe_config.preset(family, name)
    return build(type(base), {**asdict(base), **fields}, "model")


def model_table[T](model: Mapping[str, Any], name: str, kind: type[T], example: str) -> T | None:
    """Returns a table of ``model``, such as ``model.lora``, as a dataclass of this kind; ``None`` if it is not set.

    Args:
      model: the table ``model``.
      name: the key of the table in it.
      kind: the dataclass.
      example: such a table as YAML, for an error.

    Raises:
      ConfigError: it is not a mapping, or a key or a value is wrong.
    """
    table = model.get(name)
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise ConfigError(f"model.{name} must be a mapping, got {shown(table)}. Remedy: model.{name}: {example}.")
    return build(kind, table, f"model.{name}")
