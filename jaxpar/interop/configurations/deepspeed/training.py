"""Batch, precision, optimizer and schedule of a DeepSpeed configuration."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.deepspeed.ignored import OPTIMIZER_IGNORED, TENSOR_IGNORED
from jaxpar.interop.configurations.families import read_betas
from jaxpar.interop.configurations.keys import ConfigKeys, fixed_scale, put
from jaxpar.interop.configurations.layout import AxisSizes

_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


def read_sizes(keys: ConfigKeys) -> AxisSizes:
    """Returns the sizes of the axes: tensor and sequence parallelism, and data parallelism over all other devices.

    Raises:
      ConfigError: the sizes do not divide the devices, or the number of devices is not known.
    """
    at, devices = "tensor_parallel.", keys.options.devices
    keys.ignore_all(TENSOR_IGNORED, at)
    path = keys.first([f"{at}autotp_size", f"{at}tp.tp_size"])
    tensor = keys.take(path, "natural", 1, "mesh.model") or 1
    sequence = keys.take("sequence_parallel_size", "count", 1, "mesh.ulysses")
    if devices is None:
        batch, micro, steps = (keys.get(name, "count") for name in (_TRAIN, _MICRO, _STEPS))
        if batch is None or micro is None or steps is None:
            raise keys.error(_TRAIN, f"gives no number of devices without both {_MICRO} and {_STEPS}", "--devices N")
        if batch % (micro * steps):
            raise _product(keys, batch, micro, steps, None)
        return AxisSizes(data=batch // (micro * steps), ulysses=sequence, model=tensor)
    if devices % (tensor * sequence):
        raise keys.error(path, f"× sequence_parallel_size = {tensor * sequence} must divide the {devices} devices")
    return AxisSizes(data=devices // (tensor * sequence), ulysses=sequence, model=tensor)


def write_batch(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> None:
    """Writes the batch and gradient accumulation; DeepSpeed computes one of three numbers from the others.

    Raises:
      ConfigError: the three numbers do not multiply, or there is no batch size.
    """
    batch = keys.take(_TRAIN, "count", None, "data.batch")
    micro = keys.take(_MICRO, "count", None, "data.batch")
    steps = keys.take(_STEPS, "count", None, "train.grad_accum_steps")
    if batch is None and micro is None:
        raise keys.error(_TRAIN, f"is missing, and so is {_MICRO}", "set one of them")
    if steps is None:
        steps = 1 if batch is None or micro is None else max(batch // (micro * sizes.data), 1)
    if micro is None:
        micro = max(batch // (steps * sizes.data), 1)
    if batch is not None and batch != micro * steps * sizes.data:
        raise _product(keys, batch, micro, steps, sizes.data)
    put(config, "data.batch", micro * steps * sizes.data)
    put(config, "train.grad_accum_steps", steps)


def _product(keys: ConfigKeys, batch: int, micro: int, steps: int, ranks: int | None) -> Exception:
    known = "the data-parallel ranks" if ranks is None else f"{ranks} data-parallel ranks"
    return keys.error(_TRAIN, f"must be {_MICRO} × {_STEPS} × the ranks, got {batch} for {micro} × {steps} × {known}")


def write_precision(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes dtypes and the loss scale.

    Raises:
      ConfigError: fp16 and bf16 are both enabled.
    """
    half, brain = keys.get("fp16.enabled", "bool", False), _brain(keys)
    cast = keys.get("torch_autocast.enabled", "bool", False)
    if half and brain:
        raise keys.error("fp16.enabled", "and bf16.enabled are both true", "enable one of them")
    keys.translate("fp16.enabled", "model.dtype")
    dtype = "float16" if half else "bfloat16" if brain else "float32"
    if cast:
        keys.translate("torch_autocast", "model.dtype")
        dtype = str(keys.get("torch_autocast.dtype", "text", "bfloat16")).removeprefix("torch.")
        dtype = {"fp16": "float16", "bf16": "bfloat16", "half": "float16"}.get(dtype, dtype)
        if dtype not in ("float16", "bfloat16"):
            raise keys.error("torch_autocast.dtype", f"must be float16 or bfloat16, got {dtype!r}")
    else:
        keys.ignore("torch_autocast", "enabled is false")
    put(config, "model.dtype", dtype)
    put(config, "model.param_dtype", "float32")
    for key in ("fp16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"):
        keys.neutral(key, (False,), "master weights are float32")
    _write_scale(keys, config, used=half)
    wire = keys.take("communication_data_type", "text", None, "precision.reduce")
    if wire is not None:
        if wire not in ("fp16", "fp32", "bf16", "bfp16"):
            raise keys.error("communication_data_type", f"must be fp16, bf16 or fp32, got {wire!r}")
        put(config, "precision.reduce", wire.replace("bfp16", "bf16"))


def _brain(keys: ConfigKeys) -> bool:
    section = keys.first(["bf16", "bfloat16"])
    keys.translate(f"{section}.enabled", "model.dtype")
    keys.ignore(f"{section}.immediate_grad_update", "no effect on the result")
    keys.ignore(f"{section}.check_grad_overflow", "train.skip_nonfinite skips such steps")
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        keys.neutral(f"{section}.{key}", (False,), "master weights and the optimizer's state are float32")
    return bool(keys.get(f"{section}.enabled", "bool", False))


def _write_scale(keys: ConfigKeys, config: dict[str, Any], *, used: bool) -> None:
    names = {"loss_scale_window": "interval", "hysteresis": "hysteresis", "min_loss_scale": "minimum"}
    fixed, power = keys.get("fp16.loss_scale", "number", 0), keys.get("fp16.initial_scale_power", "natural", 16)
    keys.ignore("fp16.auto_cast", "inputs are tokens")
    keys.ignore("fp16.consecutive_hysteresis", "hysteresis counts since the scale last grew")
    if not used:
        keys.ignore("fp16", "enabled is false")
        return
    keys.translate("fp16.loss_scale", "precision.scale")
    if fixed:
        keys.ignore_each((f"fp16.{key}" for key in ("initial_scale_power", *names)), "loss_scale is fixed")
        put(config, "precision.scale", fixed_scale(float(fixed)))
        return
    keys.translate("fp16.initial_scale_power", "precision.scale.initial")
    scale = {"initial": 2.0**power}
    for (key, name), default in zip(names.items(), (1000, 2, 1), strict=True):
        scale[name] = keys.take(f"fp16.{key}", "number", default, f"precision.scale.{name}")
    put(config, "precision.scale", scale)


_BETAS = {"Adam", "AdamW", "OneBitAdam", "Lamb", "Lion"}
_NAMES = {name.lower(): name for name in ("Adam", "AdamW", "OneBitAdam", "Lamb", "Lion", "SGD", "Adagrad")}


def write_optimizer(keys: ConfigKeys, stage: int, config: dict[str, Any]) -> None:
    """Writes the optimizer, its schedule and clipping.

    Raises:
      ConfigError: a value has the wrong kind, or 1-bit Adam is used with ZeRO.
    """
    clip = keys.take("gradient_clipping", "number", 0.0, "optimizer.clip_norm")
    put(config, "optimizer.clip_norm", float(clip) if clip > 0 else None)
    at = "optimizer.params."
    keys.ignore("optimizer.legacy_fusion", "XLA fuses operations")
    rate = keys.take(f"{at}lr", "number", None, "optimizer.learning_rate")
    if keys.has("optimizer"):
        _write_named(keys, at, stage, config)
    _write_schedule(keys, rate, config)


def _write_named(keys: ConfigKeys, at: str, stage: int, config: dict[str, Any]) -> None:
    kind = _NAMES.get(keys.take("optimizer.type", "text", "Adam", "optimizer.name").lower())
    if kind is None:
        keys.refuse("optimizer.type", f"only {', '.join(_NAMES.values())} are translated")
        keys.ignore("optimizer.params", "the optimizer is not translated")
        return
    keys.ignore_all(OPTIMIZER_IGNORED, at)
    keys.neutral(f"{at}amsgrad", (False,), "not built")
    keys.neutral(f"{at}bias_correction", (True,), "moments are always corrected")
    decoupled = keys.get(f"{at}adam_w_mode", "bool", True)
    keys.translate(f"{at}adam_w_mode", "optimizer.name")
    decay = keys.take(f"{at}weight_decay", "number", 0.0, "optimizer.options.weight_decay")
    options: dict[str, Any] = {}
    if kind in _BETAS:
        default = [0.9, 0.99] if kind == "Lion" else [0.9, 0.999]
        options |= read_betas(keys, f"{at}betas", default)
    if kind != "Lion" and kind != "SGD":
        eps = 1e-10 if kind == "Adagrad" else 1e-8
        options["eps"] = keys.take(f"{at}eps", "number", eps, "optimizer.options.eps")
    name = kind.lower()
    if kind == "Adam":
        name = "adamw" if decoupled else "adam"
    if kind == "OneBitAdam":
        name = "one_bit_adam"
        options["warmup"] = keys.take(f"{at}freeze_step", "count", 100_000, "optimizer.options.warmup")
        if stage:
            raise keys.error("optimizer.type", f"OneBitAdam requires ZeRO stage 0, got stage {stage}")
    if kind == "SGD":
        options["momentum"] = keys.take(f"{at}momentum", "number", 0.0, "optimizer.options.momentum") or None
        options["nesterov"] = keys.take(f"{at}nesterov", "bool", False, "optimizer.options.nesterov")
    if name in ("adam", "sgd", "adagrad"):
        keys.neutral(f"{at}weight_decay", (0, 0.0), f"{name} has no weight decay; use AdamW")
    else:
        options["weight_decay"] = decay
    put(config, "optimizer.name", name)
    put(config, "optimizer.options", options)


def _write_schedule(keys: ConfigKeys, rate: float | None, config: dict[str, Any]) -> None:
    at, kind = "scheduler.params.", keys.take("scheduler.type", "text", None, "optimizer.schedule")
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    # Without both sections, the training program chooses them: those of the base are kept.
    schedule: dict[str, Any] = {"schedule": "constant", "warmup": 0} if keys.has("optimizer") else {}
    if kind is not None and kind not in shapes:
        keys.refuse("scheduler.type", f"only {', '.join(shapes)} are translated")
        keys.ignore("scheduler.params", "the schedule is not translated")
    elif kind is not None:
        low = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
        keys.neutral(f"{at}{low}", (0, 0.0), "the rate grows from 0")
        keys.ignore(f"{at}last_batch_iteration", "checkpoints hold the step")
        warmup = keys.take(f"{at}warmup_num_steps", "natural", 1000, "optimizer.warmup")
        growth = "linear" if kind == "WarmupCosineLR" else "log"
        growth = keys.take(f"{at}warmup_type", "text", growth, "optimizer.warmup")
        note = "" if growth == "linear" else "grows linearly instead of logarithmically"
        for key in ("warmup_num_steps", "warmup_type"):
            keys.translate(f"{at}{key}", "optimizer.warmup", note)
        schedule = {"schedule": shapes[kind], "warmup": warmup}
        if kind == "WarmupCosineLR":
            schedule["final_lr_ratio"] = keys.take(f"{at}cos_min_ratio", "number", 0.0001, "optimizer.final_lr_ratio")
        elif kind == "WarmupDecayLR":
            schedule["final_lr_ratio"] = 0.0
        peak = keys.take(f"{at}warmup_max_lr", "number", None, "optimizer.learning_rate")
        if peak is not None:
            keys.ignore("optimizer.params.lr", "scheduler.params.warmup_max_lr decides")
            rate = peak
    total = keys.get(f"{at}total_num_steps", "count")
    keys.translate(f"{at}total_num_steps", "train.steps")
    if keys.options.steps is not None:
        keys.ignore(f"{at}total_num_steps", "--steps")
        total = keys.options.steps
    if rate is not None:
        schedule["learning_rate"] = float(rate)
    if total is not None:
        put(config, "train.steps", total)
    for key, value in schedule.items():
        put(config, f"optimizer.{key}", value)
