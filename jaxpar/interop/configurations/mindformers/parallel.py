"""Parallelism of a MindFormers configuration: ``parallel`` and ``parallel_config``."""

from __future__ import annotations

import math
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, put
from jaxpar.interop.configurations.layout import AxisSizes
from jaxpar.interop.configurations.mindformers.ignored import PARALLEL_CONFIG_IGNORED, PARALLEL_IGNORED
from jaxpar.interop.configurations.mindformers.model import HEADS, KV_HEADS, ImportedModel

_MODES = {"data_parallel": 0, "semi_auto_parallel": 1, "auto_parallel": 2, "hybrid_parallel": 3}
_SIZES = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
_ALGORITHMS = ("colossalai_cp", "ulysses_cp", "hybrid_cp")


def read_sizes(keys: ConfigKeys, model: ImportedModel) -> AxisSizes:
    """Returns the sizes of all axes, after the checks of MindFormers.

    Raises:
      ConfigError: the product of the sizes is not the number of devices, or a size does not fit the model.
    """
    keys.ignore_all(PARALLEL_IGNORED, "parallel.")
    keys.ignore_all(PARALLEL_CONFIG_IGNORED, "parallel_config.")
    keys.neutral("parallel.auto_pipeline", (False,), "jaxpar plan chooses the number of stages")
    keys.neutral("parallel.comm_fusion", ({},), "parallel.fusion sets sizes of collectives")
    if not keys.get("use_parallel", "bool", True):
        keys.translate("use_parallel", "mesh.data")
        keys.ignore_each(("parallel_config", "parallel"), "use_parallel is false: one device")
        return AxisSizes()
    keys.translate("use_parallel", "mesh")
    mode = keys.raw("parallel.parallel_mode")
    mode = 1 if mode is None else _MODES.get(str(mode).lower(), mode)
    if mode not in _MODES.values():
        raise keys.error("parallel.parallel_mode", f"must be 0, 1, 2 or 3, got {mode!r}")
    if mode == 0:
        if keys.options.devices is None:
            raise keys.error("parallel.parallel_mode", "is 0, pure data parallelism over all devices", "--devices N")
        keys.translate("parallel.parallel_mode", "mesh.data", "all devices")
        keys.ignore("parallel_config", "parallel_mode is 0: MindFormers resets all sizes to 1")
        return AxisSizes(data=keys.options.devices)
    if mode == 1:
        keys.translate("parallel.parallel_mode", "mesh")
    else:
        keys.refuse("parallel.parallel_mode", "jaxpar plan searches for a layout; here all sizes are given")
    sizes = _sizes(keys, model)
    _check_devices(keys, sizes)
    _check_dataset_strategy(keys)
    return sizes


def _sizes(keys: ConfigKeys, model: ImportedModel) -> AxisSizes:
    at = "parallel_config."
    data = keys.take(f"{at}data_parallel", "count", 1, "mesh.data")
    tensor = keys.take(f"{at}model_parallel", "count", 1, "mesh.model")
    stages = keys.take(f"{at}pipeline_stage", "count", 1, "mesh.pipeline")
    context, ulysses = _context(keys)
    expert = keys.take(f"{at}expert_parallel", "count", 1, "mesh.expert")
    _check_experts(keys, model, data * context * ulysses, expert)
    if data % expert:
        keys.refuse(f"{at}expert_parallel", f"must divide data_parallel={data}: here experts use those ranks only")
        expert = 1
    sequence = keys.take(f"{at}use_seq_parallel", "bool", False, "rules.residual_seq")
    if sequence and tensor == 1:
        keys.ignore(f"{at}use_seq_parallel", "model_parallel is 1")
    replicated = keys.take(f"{at}vocab_emb_dp", "bool", True, "rules.vocab")
    if replicated and stages > 1:
        keys.ignore(f"{at}vocab_emb_dp", "with pipeline stages MindFormers resets it to false")
    sequence, vocab = sequence and tensor > 1, not replicated or stages > 1
    sizes = AxisSizes(stages, data // expert, expert, context, ulysses, tensor, sequence, vocab)
    _check_model(keys, model, sizes)
    return sizes


def _context(keys: ConfigKeys) -> tuple[int, int]:
    """The sizes of the axes ``context`` and ``ulysses``."""
    at = "parallel_config."
    size = keys.take(f"{at}context_parallel", "count", 1, "mesh.context, mesh.ulysses")
    algorithm = keys.get(f"{at}context_parallel_algo", "text", _ALGORITHMS[0])
    degree = keys.get(f"{at}ulysses_degree_in_cp", "count", 1)
    if algorithm == "hybird_cp":  # the spelling of earlier versions
        algorithm = "hybrid_cp"
    if algorithm not in _ALGORITHMS:
        raise keys.error(f"{at}context_parallel_algo", f"must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if size == 1:
        keys.ignore_all({"context_parallel is 1": "context_parallel_algo ulysses_degree_in_cp"}, at)
        return 1, 1
    keys.translate(f"{at}context_parallel_algo", "parallel.context.impl")
    if algorithm == "hybrid_cp":
        keys.translate(f"{at}ulysses_degree_in_cp", "mesh.ulysses")
        if size % degree:
            raise keys.error(
                f"{at}ulysses_degree_in_cp",
                f"must divide context_parallel={size}, got {degree}",
                f"use {math.gcd(size, degree)}",
            )
        return size // degree, degree
    keys.ignore(f"{at}ulysses_degree_in_cp", f"context_parallel_algo is {algorithm}")
    return (1, size) if algorithm == "ulysses_cp" else (size, 1)


def context_options(keys: ConfigKeys, prefix: str, sizes: AxisSizes) -> dict[str, Any]:
    """Returns ``parallel.context``: the implementation of attention over a sharded sequence; empty if none is.

    Args:
      keys: the configuration.
      prefix: of the model's keys.
      sizes: of the axes.
    """
    path = f"{prefix}use_ring_attention"
    ring = keys.get(path, "bool", False)
    if sizes.context * sizes.ulysses == 1:
        keys.ignore(path, "context_parallel is 1")
        return {}
    if sizes.ulysses > 1:
        keys.ignore(path, "context_parallel_algo decides")
        return {"impl": "hybrid" if sizes.context > 1 else "ulysses"}
    keys.translate(path, "parallel.context.impl")
    return {"impl": "ring" if ring else "gather"}


def _check_devices(keys: ConfigKeys, sizes: AxisSizes) -> None:
    devices = keys.options.devices
    if devices is None or devices == sizes.devices:
        return
    values = {name: keys.get(f"parallel_config.{name}", "count", 1) for name in _SIZES}
    product = " × ".join(f"{name} {value}" for name, value in values.items() if value > 1) or "data_parallel 1"
    others = sizes.devices // values["data_parallel"]
    remedy = f"--devices {sizes.devices}"
    if devices % others == 0:
        remedy = f"data_parallel: {devices // others}, or {remedy}"
    raise keys.error("parallel_config", f"{product} = {sizes.devices} must be the {devices} devices", remedy)


def _check_experts(keys: ConfigKeys, model: ImportedModel, ranks: int, expert: int) -> None:
    path = "parallel_config.expert_parallel"
    if expert > 1 and model.layers is not None and model.experts == 1:
        raise keys.error(path, f"is {expert}, but the model has no experts", "leave it out")
    if model.experts > 1 and model.experts % expert:
        raise keys.error(path, f"must divide the {model.experts} experts, got {expert}")
    if ranks % expert:
        raise keys.error(path, f"must divide data_parallel × context_parallel = {ranks}, got {expert}")


def _check_model(keys: ConfigKeys, model: ImportedModel, sizes: AxisSizes) -> None:
    """Checks that heads, sequence and dims of the model divide by the sizes."""
    heads = sizes.model * sizes.ulysses
    at = "model_parallel × the Ulysses degree" if sizes.ulysses > 1 else "model_parallel"
    for name, names in (("heads", HEADS), ("kv_heads", KV_HEADS)):
        if name in model.fields and model.fields[name] % heads:
            path = keys.first([f"{model.prefix}{key}" for key in names])
            raise keys.error(path, f"must be a multiple of {at} = {heads}, got {model.fields[name]}")
    shards = sizes.context * sizes.ulysses * (sizes.model if sizes.sequence_parallel else 1)
    if model.seq is not None and model.seq % shards:
        parts = "context_parallel × model_parallel" if sizes.sequence_parallel else "context_parallel"
        raise keys.error(f"{model.prefix}seq_length", f"must be a multiple of {parts} = {shards}, got {model.seq}")


def _check_dataset_strategy(keys: ConfigKeys) -> None:
    path, data = "parallel.dataset_strategy", keys.get("parallel_config.data_parallel", "count", 1)
    strategy = keys.raw(path)
    if strategy is None or strategy == "full_batch" or keys.get("parallel.full_batch", "bool", True):
        keys.ignore(path, "each process reads its own rows")
        return
    if not isinstance(strategy, list) or not strategy or not all(isinstance(x, list) and x for x in strategy):
        raise keys.error(path, "must be a list of lists if full_batch is false", f"[[{data}, 1]]")
    if strategy[0][0] != data:
        raise keys.error(path, f"must begin with data_parallel={data}, got {strategy[0][0]}")
    columns = keys.get("train_dataset.input_columns", "list")
    if columns is not None and len(columns) != len(strategy):
        raise keys.error(path, f"must have one list for each of {len(columns)} input_columns, got {len(strategy)}")
    keys.ignore(path, "rows are sharded over data")


def write_optimizer_parallelism(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> None:
    """Writes ``parallel.optimizer``: the ZeRO stage that ``enable_parallel_optimizer`` and the recomputation mean.

    Raises:
      ConfigError: ``optimizer_weight_shard_size`` or ``parallel_optimizer_threshold`` is out of its range.
    """
    at, again = "parallel.parallel_optimizer_config.", "recompute_config.parallel_optimizer_comm_recompute"
    names = {name: f"{at}{name}" for name in ("gradient_accumulation_shard", "parallel_optimizer_threshold")}
    group_path, save = f"{at}optimizer_weight_shard_size", f"{at}optimizer_weight_shard_aggregated_save"
    keys.ignore(save, "checkpoints hold each piece once")
    if not keys.take("parallel.enable_parallel_optimizer", "bool", False, "parallel.optimizer.stage"):
        keys.ignore_each((*names.values(), group_path, again), "enable_parallel_optimizer is false")
        return
    scattered = keys.take(names["gradient_accumulation_shard"], "bool", False, "parallel.optimizer.stage")
    gathered_again = keys.take(again, "bool", False, "parallel.optimizer.stage")
    threshold = keys.take(names["parallel_optimizer_threshold"], "natural", 64, "parallel.optimizer.min_bytes")
    group = _group(keys, group_path, sizes)
    zero: dict[str, Any] = {"stage": 2 if scattered else 1, "min_bytes": f"{threshold}KiB"}
    if sizes.pipeline > 1:
        if gathered_again:
            keys.ignore(again, "a pipeline gathers weights once per step")
        zero["stage"] = 1
        if scattered:
            keys.translate(names["gradient_accumulation_shard"], "parallel.pipeline.grad_reduction")
            put(config, "parallel.pipeline.grad_reduction", "per_microbatch")
    elif gathered_again:
        zero["stage"] = 3
    put(config, "parallel.optimizer", zero | (sizes.zero_axes() if group is None else {"fsdp_group_size": group}))


def _group(keys: ConfigKeys, path: str, sizes: AxisSizes) -> int | None:
    """The number of devices among which a weight is sharded; ``None`` for all with the same weight."""
    value = keys.get(path, "integer", -1)
    if value == -1:
        keys.ignore(path, "all devices that have the same weights share them")
        return None
    ranks = sizes.data * sizes.expert
    if not 1 <= value <= ranks or ranks % value:
        raise keys.error(path, f"must be -1 or divide data_parallel={ranks}, got {value}", f"-1, or {ranks}")
    keys.translate(path, "parallel.optimizer.fsdp_group_size")
    if sizes.zero_axes():
        keys.refuse(path, "groups of devices are only formed along data, without context and expert parallelism")
        return None
    return value if value < ranks else None
