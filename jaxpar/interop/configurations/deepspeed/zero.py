"""ZeRO and offload of a DeepSpeed configuration: ``zero_optimization``."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.deepspeed.ignored import OFFLOAD_IGNORED, ZERO_IGNORED
from jaxpar.interop.configurations.keys import ConfigKeys, put
from jaxpar.interop.configurations.layout import AxisSizes

_AT = "zero_optimization."


def write_zero(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> int:
    """Writes ``parallel.optimizer``, ``parallel.offload`` and int8 collectives; returns the ZeRO stage.

    Raises:
      ConfigError: an option requires another stage, or a group does not divide the data-parallel ranks.
    """
    keys.ignore_all(ZERO_IGNORED, _AT)
    keys.neutral(f"{_AT}zeropp_loco_param", ({},), "not built")
    keys.neutral(f"{_AT}zenflow", ({},), "not built")
    stage = keys.take(f"{_AT}stage", "natural", 0, "parallel.optimizer.stage")
    if stage > 3:
        raise keys.error(f"{_AT}stage", f"must be from 0 to 3, got {stage}")
    if stage:
        zero: dict[str, Any] = {"stage": stage, **sizes.zero_axes()}
        if group := _group(keys, "mics_shard_size", sizes, stage, "parallel.optimizer.fsdp_group_size"):
            zero["fsdp_group_size"] = group
        _persistence(keys, stage, zero)
        put(config, "parallel.optimizer", zero)
    if group := _group(keys, "zero_hpz_partition_size", sizes, stage, "parallel.reshard_after_forward"):
        put(config, "parallel.reshard_after_forward", group)
    for key, target in (("zero_quantized_weights", "gather"), ("zero_quantized_gradients", "reduce")):
        if keys.take(f"{_AT}{key}", "bool", False, f"precision.{target}"):
            _require(keys, f"{_AT}{key}", stage, 3)
            put(config, f"precision.{target}", "int8")
    keys.neutral(f"{_AT}zero_quantized_nontrainable_weights", (False,), "all weights train")
    _write_offload(keys, stage, config)
    return int(stage)


def _require(keys: ConfigKeys, path: str, stage: int, least: int) -> None:
    if stage < least:
        raise keys.error(path, f"requires stage {least}{' or more' if least < 3 else ''}, got stage {stage}")


def _group(keys: ConfigKeys, name: str, sizes: AxisSizes, stage: int, target: str) -> int | None:
    """The size of a group of devices; ``None`` for all."""
    path = f"{_AT}{name}"
    value = keys.take(path, "integer", 0, target)
    if value <= 1 or value == sizes.data:
        keys.ignore(path, "off" if value <= 1 else "all devices are one group")
        return None
    _require(keys, path, stage, 3)
    if sizes.data % value:
        raise keys.error(path, f"must divide the {sizes.data} data-parallel ranks, got {value}")
    if sizes.zero_axes():
        keys.refuse(path, "groups of devices are only formed along data, without sequence parallelism")
        return None
    return int(value)


def _persistence(keys: ConfigKeys, stage: int, zero: dict[str, Any]) -> None:
    path = keys.first([f"{_AT}stage3_param_persistence_threshold", f"{_AT}param_persistence_threshold"])
    if keys.raw(path) == "auto" or stage < 3:
        keys.ignore(path, "the default of parallel.optimizer.min_bytes" if stage == 3 else "stage is below 3")
        return
    threshold = keys.take(path, "natural", None, "parallel.optimizer.min_bytes", "4 bytes for each element")
    if threshold is not None:
        zero["min_bytes"] = 4 * threshold


def _write_offload(keys: ConfigKeys, stage: int, config: dict[str, Any]) -> None:
    state, state_path, nvme = _device(keys, "offload_optimizer", "cpu_offload")
    weights, weights_path, _ = _device(keys, "offload_param", "cpu_offload_param")
    if state != "none":
        _require(keys, state_path, stage, 1)
        keys.translate(state_path, "parallel.offload.optimizer")
        put(config, "parallel.offload.optimizer", "host" if state == "cpu" else "disk")
    if state == "nvme":
        if nvme is None:
            raise keys.error(f"{_AT}offload_optimizer.nvme_path", "is missing, but device is nvme")
        keys.translate(f"{_AT}offload_optimizer.nvme_path", "parallel.offload.path")
        put(config, "parallel.offload.path", nvme)
    if weights == "none":
        return
    _require(keys, weights_path, stage, 3)
    if weights == "nvme" or state == "nvme":
        keys.refuse(weights_path, "weights are stored on the devices or in host memory, not beside a state on disk")
        return
    note = "" if state == "cpu" else "the optimizer's state moves to host memory too"
    keys.translate(weights_path, "parallel.offload.parameters", note)
    put(config, "parallel.offload", {"parameters": "host", "optimizer": "host"})


def _device(keys: ConfigKeys, section: str, old: str) -> tuple[str, str, str | None]:
    """Where a state is stored: ``none``, ``cpu`` or ``nvme``; the path of the key, and the folder."""
    at = f"{_AT}{section}."
    keys.ignore_all(OFFLOAD_IGNORED, at)
    keys.neutral(f"{at}ratio", (1, 1.0), "all of the state is offloaded")
    path = keys.get(f"{at}nvme_path", "text")
    keys.ignore(f"{at}nvme_path", "device is not nvme")
    if keys.has(f"{_AT}{old}"):
        on = keys.get(f"{_AT}{old}", "bool")
        keys.ignore(f"{_AT}{old}", "false")
        return ("cpu" if on else "none"), f"{_AT}{old}", None
    device = keys.get(f"{at}device", "text", "none")
    if device not in ("none", "cpu", "nvme"):
        raise keys.error(f"{at}device", f"must be none, cpu or nvme, got {device!r}")
    keys.ignore(f"{at}device", "none")
    return str(device), f"{at}device", path
