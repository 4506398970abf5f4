"""Precision, optimizer, schedule and run of Megatron-LM arguments."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, fixed_scale, put

_SCALE = {"--initial-loss-scale": ("initial", 2.0**32), "--loss-scale-window": ("interval", 1000)}
_SCALE |= {"--hysteresis": ("hysteresis", 2), "--min-loss-scale": ("minimum", 1.0)}


def write_precision(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes dtypes and the loss scale.

    Raises:
      ConfigError: fp16 and bf16 are both given.
    """
    half, brain = (keys.take(name, "bool", False, "model.dtype") for name in ("--fp16", "--bf16"))
    if half and brain:
        raise keys.error("--fp16", "and --bf16 are both given", "leave one of them out")
    put(config, "model.dtype", "float16" if half else "bfloat16" if brain else "float32")
    put(config, "model.param_dtype", "float32")
    if keys.take("--grad-reduce-in-bf16", "bool", False, "precision.reduce"):
        put(config, "precision.reduce", "bf16")
    if keys.has("--fp8-format"):
        name = keys.take("--fp8-format", "text", None, "precision.matmul")
        if name not in ("hybrid", "e4m3"):
            raise keys.error("--fp8-format", f"must be hybrid or e4m3, got {name!r}")
        put(config, "precision.matmul", "fp8")
        if name == "e4m3":
            keys.translate("--fp8-format", "precision.matmul", "gradients are in e5m2")
    fixed = keys.take("--loss-scale", "number", None, "precision.scale")
    scale = {}
    for flag, (name, default) in _SCALE.items():
        scale[name] = keys.take(flag, "number", default, f"precision.scale.{name}")
        if not half or fixed is not None:
            keys.ignore(flag, "--loss-scale is fixed" if half else "--fp16 is not given")
    if not half:
        keys.ignore("--loss-scale", "--fp16 is not given")
    else:
        put(config, "precision.scale", scale if fixed is None else fixed_scale(float(fixed)))


def write_optimizer(keys: ConfigKeys, batch: int, config: dict[str, Any]) -> None:
    """Writes steps, optimizer, schedule and clipping.

    Raises:
      ConfigError: the number of steps or the learning rate is missing.
    """
    steps = _steps(keys, batch, "train")
    if keys.options.steps is not None:
        keys.ignore_each(("--train-iters", "--train-samples"), "--steps")
        steps = keys.options.steps
    if steps is None:
        raise keys.error("--train-iters", "is missing, and so is --train-samples", "--steps N")
    put(config, "train.steps", steps)
    name = keys.take("--optimizer", "text", "adam", "optimizer.name")
    decay = keys.take("--weight-decay", "number", 0.01, "optimizer.options.weight_decay")
    if name == "adam":
        options: dict[str, Any] = {
            "b1": keys.take("--adam-beta1", "number", 0.9, "optimizer.options.b1"),
            "b2": keys.take("--adam-beta2", "number", 0.999, "optimizer.options.b2"),
            "eps": keys.take("--adam-eps", "number", 1e-8, "optimizer.options.eps"),
            "weight_decay": decay,
        }
        keys.translate("--weight-decay", "optimizer.options.weight_decay", "applies to norms and biases too")
        put(config, "optimizer", {"name": "adamw", "options": options})
    else:
        if name != "sgd":
            keys.refuse("--optimizer", "only adam and sgd are translated")
        options = {"momentum": keys.take("--sgd-momentum", "number", 0.9, "optimizer.options.momentum")}
        keys.neutral("--weight-decay", (0, 0.0), "sgd has no weight decay")
        put(config, "optimizer", {"name": "sgd", "options": options})
    for flag in ("--sgd-momentum", "--adam-beta1", "--adam-beta2", "--adam-eps"):
        if flag.startswith("--adam") != (name == "adam"):
            keys.ignore(flag, f"--optimizer is {name}")
    clip = keys.take("--clip-grad", "number", 1.0, "optimizer.clip_norm")
    put(config, "optimizer.clip_norm", float(clip) or None)
    _write_schedule(keys, batch, steps, config)


def _steps(keys: ConfigKeys, batch: int, name: str) -> int | None:
    """A number of steps, given as iterations or as samples."""
    prefix = {"train": "--train", "decay": "--lr-decay", "warmup": "--lr-warmup"}[name]
    target = {"train": "train.steps", "decay": "optimizer.decay_steps", "warmup": "optimizer.warmup"}[name]
    iterations = keys.take(f"{prefix}-iters", "natural", None, target)
    samples = keys.take(f"{prefix}-samples", "natural", None, target)
    if iterations is not None and samples is not None:
        raise keys.error(f"{prefix}-iters", f"and {prefix}-samples are both given", "leave one of them out")
    return int(iterations) if iterations is not None else None if samples is None else int(samples // batch)


def _write_schedule(keys: ConfigKeys, batch: int, steps: int, config: dict[str, Any]) -> None:
    if not keys.has("--lr"):
        raise keys.error("--lr", "is missing", "--lr RATE")
    rate = float(keys.take("--lr", "number", None, "optimizer.learning_rate"))
    last = float(keys.take("--min-lr", "number", 0.0, "optimizer.final_lr_ratio"))
    if last > rate:
        raise keys.error("--min-lr", f"must be at most --lr={rate:g}, got {last:g}")
    shape = keys.take("--lr-decay-style", "text", "linear", "optimizer.schedule")
    if shape not in ("constant", "linear", "cosine"):
        keys.refuse("--lr-decay-style", "only constant, linear and cosine are built")
        shape = "linear"
    decay = _steps(keys, batch, "decay")
    warmup, fraction = (
        _steps(keys, batch, "warmup"),
        keys.take("--lr-warmup-fraction", "number", None, "optimizer.warmup"),
    )
    if fraction is not None:
        warmup = int(fraction * (decay or steps))
    schedule = {"learning_rate": rate, "schedule": shape, "warmup": warmup or 0}
    if shape != "constant":
        schedule["final_lr_ratio"] = last / rate
        if decay not in (None, steps):
            schedule["decay_steps"] = decay
    for key, value in schedule.items():
        put(config, f"optimizer.{key}", value)


def write_run(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes the seed, evaluation and checkpoints."""
    put(config, "train.seed", keys.take("--seed", "natural", 1234, "train.seed"))
    for flag, target in (("--eval-interval", "eval_every"), ("--eval-iters", "eval_batches")):
        value = keys.take(flag, "natural", 0, f"train.{target}")
        if value:
            put(config, f"train.{target}", value)
    every = keys.take("--save-interval", "count", None, "checkpoint.save_interval_steps")
    if every is not None:
        put(config, "checkpoint.save_interval_steps", every)
