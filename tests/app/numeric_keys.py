"""Every key of a run's configuration that takes a number, and a run in which that key is in use."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from jaxpar.app.config import RunConfig
from jaxpar.app.lora import LoraSettings
from jaxpar.app.quantize_config import QuantizeSettings
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.moe.config import MoEConfig
from jaxpar.utils.yaml_config import merge

VALUES: tuple[Any, ...] = (-5, 0, 7 * 10**9, 7e9, float("nan"), float("inf"))
BASE: Mapping[str, dict[str, Any]] = {
    "checkpoint": {"checkpoint": {}},
    "checkpoint.best": {"checkpoint": {"best": {}}},
    "checkpoint.save_interval": {"checkpoint": {}},
    "data.blend": {"data": {"blend": [{"source": "synthetic"}]}},
    "generate.weights": {"generate": {"weights": {"bits": 8}}},
    "model.lora": {"model": {"lora": {"rank": 2}}},
    "model.quantize": {"model": {"quantize": {"bits": 8}}},
    "optimizer.muon": {"optimizer": {"name": "muon", "muon": {}}},
    "optimizer.prune": {"optimizer": {"prune": {"sparsity": 0.5}}},
    "parallel.optimizer": {"parallel": {"optimizer": {"stage": 1}}},
    "parallel.parameter_server": {"parallel": {"parameter_server": {}}},
    "parallel.pipeline": {"mesh": {"pipeline": 2}, "parallel": {"pipeline": {"microbatches": 2}}},
    "parallel.remat": {"parallel": {"remat": {"policy": "full"}}},
    "precision.": {"precision": {"compute": "bfloat16"}},
    "train.profile": {"train": {"profile": {}}},
    "train.spike": {"train": {"spike": {}}},
}
"""What a table needs beside the key, by the beginning of its path."""
NAMES = {
    "mesh": "data",
    "optimizer.options": "b1",
    "parallel.parameter_server.sync_every": 0,
    "precision.scale": "initial",
}
"""A name in a mapping, by the beginning of its path; elsewhere ``*``."""
MOE_FIELDS = {field.name for field in dataclasses.fields(MoEConfig)} - {
    field.name for field in dataclasses.fields(LlamaConfig)
}


def numeric_keys() -> list[str]:
    """The paths of the keys; ``[0]`` stands for an element of a list, ``{x}`` for a key of a mapping."""
    keys = [*_keys(RunConfig, "")]
    for kind, prefix in ((LlamaConfig, "model."), (MoEConfig, "model."), (LoraSettings, "model.lora.")):
        keys += _keys(kind, prefix)
    return [*dict.fromkeys([*keys, *_keys(QuantizeSettings, "model.quantize.")])]


def with_value(key: str, value: Any) -> dict[str, Any]:
    """A small run in which a key has a value, and the tables around it what they need."""
    run: dict[str, Any] = {"model": {"family": "llama"}, "mesh": {"data": 1}, "data": {"source": "synthetic"}}
    run = merge(run, next((base for prefix, base in BASE.items() if key.startswith(prefix)), {}))
    if key.startswith("model.") and key.split(".")[1].partition("[")[0] in MOE_FIELDS:
        run = merge(run, {"model": {"family": "mixtral"}})
    for part in reversed(key.split(".")):
        name, is_list, _ = part.partition("[")
        name = next((word for prefix, word in NAMES.items() if key.startswith(prefix)), "*") if name == "{x}" else name
        value = {name: [value] if is_list else value}
    return merge(run, value)


def _keys(cls: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        yield from _inside(hints[field.name], f"{prefix}{field.name}")


def _inside(hint: Any, path: str) -> Iterator[str]:
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        yield from _keys(typing.cast(type, hint), f"{path}.")
    elif origin is Annotated:
        yield from _inside(arguments[0], path)
    elif origin in (typing.Union, types.UnionType):
        for part in arguments:
            yield from _inside(part, path)
    elif origin in (tuple, list):
        yield from _inside(arguments[0], f"{path}[0]")
    elif origin is dict:
        yield from _inside(arguments[1], f"{path}.{{x}}")
    elif hint in (int, float) and not path.startswith(("compiler.", "trackers.")):  # passed on to others
        yield path
