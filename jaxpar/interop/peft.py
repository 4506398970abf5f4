"""Adapters of PEFT in and out: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written in shards.

A weight ``[outputs, inputs]`` of PEFT has ``lora_A`` ``[rank, inputs]`` and ``lora_B`` ``[outputs, rank]``. PEFT itself
is not needed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.interop.account import check_tensors
from jaxpar.interop.folder import read_parameters, write_folder
from jaxpar.interop.peft_config import CONFIG, config_fields, read_rank_and_alpha
from jaxpar.interop.safetensors import SPELLED, StoredTensor, lay_out, read_header
from jaxpar.interop.tensor_map import TensorRule, tensor_rules
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.model.lora_targets import Adapter, LoraConfig
from jaxpar.training.state import TrainState
from jaxpar.utils.multihost import settled

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def read_lora(directory: str | os.PathLike[str], config: LlamaConfig) -> LoraConfig:
    """Returns rank, alpha and targets of an adapter, for :func:`jaxpar.lora.adapt`.

    Args:
      directory: the adapter's folder.
      config: the configuration of the model that it is for.

    Raises:
      CheckpointError: a file is missing, or no tensor belongs to a weight of the model.
      ConfigError: a field of ``adapter_config.json`` is not implemented, and not neutral.
      DamagedError: a file is malformed.
    """
    root = Path(directory)
    rank, alpha = read_rank_and_alpha(root)
    tensors = _read_tensors(root)
    targets = [rule.path for rule in tensor_rules(config) if _modules(rule, tensors)]
    if not targets:
        raise CheckpointError(
            f"{root / TENSORS} has no adapter of a weight of the model; its first tensor is "
            f"{next(iter(tensors), 'missing')!r:.200}. Remedy: an adapter for a model of the same family."
        )
    return LoraConfig(rank, alpha, tuple(targets))


def load(directory: str | os.PathLike[str], state: TrainState, config: LlamaConfig) -> TrainState:
    """Returns the state with the adapters of a PEFT adapter, sharded as the state's are.

    Each process reads the bytes of its own shards. All processes call it, and see the same files.

    Args:
      directory: the adapter's folder.
      state: of an adapted model, with arrays.
      config: the configuration of the model.

    Raises:
      CheckpointError: tensors are missing, unexpected, or of another shape or dtype: all are listed.
      ConfigError: rank or alpha differ, a field of ``adapter_config.json`` is not implemented, or PEFT cannot express
        the state's adapters.
      DamagedError: a file is malformed.
    """
    root, kind = Path(directory), _kind(state)
    leaves = {show(path): leaf for path, leaf in leaves_with_paths(state.params)}
    rules = {rule.path: rule for rule in _rules(kind.adapters, config)}

    def check() -> dict[str, StoredTensor]:
        rank, alpha = read_rank_and_alpha(root)
        own = next(iter(leaves.values())).shape[-1]  # of lora_a, which comes first
        for name, theirs, ours in (("rank", rank, own), ("alpha", alpha, kind.scale * own)):
            if abs(theirs - ours) > 1e-6 * ours:
                raise ConfigError(
                    f"{root} has adapters of {name} {theirs:g}, but those of the model have {ours:g}. Remedy: {name}: "
                    f"{theirs:g}."
                )
        tensors = _read_tensors(root)
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        words = {"holds": "the adapters of the model", "remedy": "an adapter of this model, and targets as it has them"}
        check_tensors(rules.values(), shapes, tensors, str(root), **words)
        return tensors

    tensors = settled(check)

    params, _ = settled(lambda: read_parameters(rules, tensors, state.params))
    return dataclasses.replace(state, params=params)


def export(
    directory: str | os.PathLike[str], state: TrainState, config: LlamaConfig, *, base: str | None = None
) -> None:
    """Writes the adapters of a state as PEFT reads them.

    Each process writes its own shards into one file. The folder gets its name when it is complete.

    Args:
      directory: the folder to create; it must not exist.
      state: of an adapted model, with or without its frozen weights.
      config: the configuration of the model.
      base: name or folder of the model without adapters, as PEFT loads it.

    Raises:
      CheckpointError: the folder exists.
      ConfigError: PEFT cannot express the state's adapters.
    """
    kind = _kind(state)
    leaves = {show(path): leaf for path, leaf in leaves_with_paths(state.params)}
    rules = list(_rules(kind.adapters, config))
    shapes = {
        name: (SPELLED[leaves[rule.path].dtype.name], rule.shape(tuple(leaves[rule.path].shape)))
        for rule in rules
        for _, name in rule.names(tuple(leaves[rule.path].shape))
    }
    rank = next(iter(leaves.values())).shape[-1]
    fields = config_fields(rank, kind.scale * rank, _target_modules(kind.adapters, config, shapes), base)

    def in_one_file(here: Path) -> dict[str, StoredTensor]:
        found = lay_out(here, dict(sorted(shapes.items())), 2**62)
        return {name: dataclasses.replace(tensor, file=here / TENSORS) for name, tensor in found.items()}

    write_folder(directory, in_one_file, [(rule, leaves[rule.path]) for rule in rules], {}, (CONFIG, fields))


def _kind(state: TrainState) -> LoraKind:
    kind = state.metadata.kind
    if not isinstance(kind, LoraKind):
        raise ConfigError(
            "peft: the model of the state has no adapters. Remedy: make_model = jp.lora.adapt(make_model, "
            "jp.lora.LoraConfig())."
        )
    return kind


def _rules(adapters: tuple[Adapter, ...], config: LlamaConfig) -> Iterator[TensorRule]:
    """Yields the rules of both arrays of each adapter."""
    rules = {rule.path: rule for rule in tensor_rules(config)}
    for adapter in adapters:
        path = show(adapter.path)
        if path not in rules:
            raise ConfigError(f"peft: the model of the configuration has no weight {path}. Remedy: its configuration.")
        yield from _pair(rules[path], adapter)


def _pair(rule: TensorRule, adapter: Adapter) -> tuple[TensorRule, TensorRule]:
    """Returns the rules of ``lora_a`` and ``lora_b`` of a weight."""
    theirs, ours = rule.pattern.split(" -> ")
    dims = ours.split()
    inputs, outputs = dims[: adapter.inputs], dims[adapter.inputs :]
    rows, columns = (list(group) for group in rule.groups)
    spell = lambda group: f"({' '.join(group)})" if len(group) > 1 else group[0]
    module, is_lookup = _PREFIX + rule.name.removesuffix(".weight"), (rows, columns) == (inputs, outputs)
    if is_lookup and rule.path == "embedding":
        names = ("lora_embedding_A", "lora_embedding_B")
    elif (rows, columns) == (outputs, inputs):
        names = ("lora_A.weight", "lora_B.weight")
    else:
        raise ConfigError(
            f"peft: the adapter of {rule.path} sums over {inputs}, but PEFT's over {columns} ({theirs}). Remedy: leave "
            "lora.inputs out."
        )
    turned = lambda dims: rule.interleaved if "d" in dims else 0
    a = f"r {spell(inputs)} -> {' '.join(inputs)} r"
    b = f"{spell(outputs)} r -> r {' '.join(outputs)}"
    return (
        TensorRule(f"{rule.path}/lora_a", f"{module}.{names[0]}", a, rule.first_layer, turned(inputs)),
        TensorRule(f"{rule.path}/lora_b", f"{module}.{names[1]}", b, rule.first_layer, turned(outputs)),
    )


def _modules(rule: TensorRule, tensors: Mapping[str, Any]) -> bool:
    """Whether tensors have the adapter of the first row of a parameter."""
    first = rule.name.removesuffix(".weight").format(layer=rule.first_layer, expert=0)
    return any(f"{_PREFIX}{first}.{name}" in tensors for name in ("lora_A.weight", "lora_embedding_A"))


def _target_modules(adapters: tuple[Adapter, ...], config: LlamaConfig, names: Mapping[str, Any]) -> list[str]:
    """Returns the ends of the names of all modules with adapters, or full names where another module has the same."""
    chosen = {show(adapter.path) for adapter in adapters}
    last = lambda rule: rule.name.removesuffix(".weight").rsplit(".", 1)[-1]
    others = {last(rule) for rule in tensor_rules(config) if rule.path not in chosen}
    if not any(last(rule) in others for rule in tensor_rules(config) if rule.path in chosen):
        return sorted({last(rule) for rule in tensor_rules(config) if rule.path in chosen})
    return sorted({name.removeprefix(_PREFIX).split(".lora_")[0] for name in names})


def _read_tensors(root: Path) -> dict[str, StoredTensor]:
    file = root / TENSORS
    if file.is_file():
        return read_header(file)
    pickled = (root / "adapter_model.bin").is_file()
    what = "only a pickle file, which can run code and is not read" if pickled else f"no {TENSORS}"
    raise CheckpointError(f"{root} has {what}. Remedy: save_pretrained(DIR) of PEFT, which writes safetensors.")
