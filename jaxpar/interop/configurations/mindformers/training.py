"""The training of a MindFormers configuration: batch, optimizer, schedule, loss scale, steps and checkpoints."""

from __future__ import annotations

from typing import Any

from jaxpar.interop.configurations.families import read_betas
from jaxpar.interop.configurations.keys import ConfigKeys, fixed_scale, is_number, put, token_sources
from jaxpar.interop.configurations.layout import AxisSizes
from jaxpar.interop.configurations.mindformers.model import ImportedModel
from jaxpar.utils.checks import is_count

_RUNNER = {"steps run one by one": "sink_mode sink_size", "for classifiers": "num_classes"}
_ADAMW = ("AdamW", "AdamWeightDecay", "FusedAdamWeightDecay", "FP32StateAdamWeightDecay", "FusedCastAdamWeightDecay")
_SGD = ("SGD", "Momentum")
_SCHEDULES = {"ConstantWarmUpLR": "constant", "LinearWithWarmUpLR": "linear", "CosineWithWarmUpLR": "cosine"}
_SCHEDULES |= {"PolynomialWithWarmUpLR": "linear"}


def write_batch(keys: ConfigKeys, model: ImportedModel, sizes: AxisSizes, config: dict[str, Any]) -> int:
    """Writes the batch, gradient accumulation and the interleaving of half batches; returns the rows of a batch.

    Raises:
      ConfigError: interleaving without sequence parallelism.
    """
    keys.ignore_all(_RUNNER, "runner_config.")
    keys.neutral("runner_config.stop_step", (0,), "train.steps ends a run, and the schedule with it")
    accumulation = "runner_config.gradient_accumulation_steps"
    rows = keys.take("runner_config.batch_size", "count", 1, "data.batch")
    copies = keys.take("micro_batch_interleave_num", "count", 1, "parallel.overlap.ways")
    parts = keys.get("parallel_config.micro_batch_num", "count", 1)
    if sizes.pipeline == 1:
        parts = keys.take(accumulation, "count", 1, "train.grad_accum_steps")
        put(config, "train.grad_accum_steps", parts)
    else:
        keys.ignore(accumulation, "a pipeline accumulates over micro_batch_num")
    batch = rows * copies * parts * sizes.data * sizes.expert
    loader = "train_dataset.data_loader.config"
    sources = token_sources(keys.raw(f"{loader}.data_path")) or {"source": "synthetic"}
    put(config, "data", {**sources, "batch": batch, **({} if model.seq is None else {"seq": model.seq})})
    if keys.get(f"{loader}.reset_attention_mask", "bool", False):
        put(config, "data.packing", True)
    if keys.has(f"{loader}.data_path"):
        keys.translate("train_dataset", "data", "data_path and reset_attention_mask of a Megatron data set")
    _write_overlap(keys, model, sizes, config, copies)
    return int(batch)


def _write_overlap(
    keys: ConfigKeys, model: ImportedModel, sizes: AxisSizes, config: dict[str, Any], copies: int
) -> None:
    fine_path, rows_path = f"{model.prefix}fine_grain_interleave", "micro_batch_interleave_num"
    fine = keys.take(fine_path, "count", 1, "parallel.overlap")
    if fine > 1 and sizes.model == 1:
        keys.ignore(fine_path, "model_parallel is 1, so there is no communication to overlap")
        fine = 1
    if fine > 1 and not sizes.sequence_parallel:
        raise keys.error(
            fine_path,
            f"is {fine}, but parallel_config.use_seq_parallel is false",
            "use_seq_parallel: true, or fine_grain_interleave: 1",
        )
    if fine > 1 and copies > 1:
        raise keys.error(fine_path, f"is {fine}, but {rows_path} is {copies}: both interleave", "leave one of them out")
    path, ways = (fine_path, fine) if fine > 1 else (rows_path, copies)
    if ways == 1:
        return
    if ways > 2:
        keys.refuse(path, "layers run on at most two halves")
    elif model.experts > 1:
        keys.refuse(path, "layers with experts run on whole batches")
    elif keys.get("parallel_config.seq_split_num", "count", 1) > 1:
        keys.refuse(path, "sequence chunks run on whole batches")
    else:
        rows = keys.get("runner_config.batch_size", "count", 1) * copies
        put(config, "parallel.overlap", {"ways": 2, "dim": "batch" if rows % 2 == 0 else "seq"})


def read_steps(keys: ConfigKeys, batch: int) -> int:
    """Returns the number of steps.

    Raises:
      ConfigError: neither the file nor the caller says it.
    """
    path, samples = "lr_schedule.total_steps", "train_dataset.data_loader.sizes"
    epochs = keys.take("runner_config.epochs", "count", 1, "train.steps")
    total = keys.get(path, "integer", -1)
    sizes = keys.raw(samples)
    if keys.options.steps is not None:
        keys.ignore_each(("runner_config.epochs", path), "--steps")
        return keys.options.steps
    if total > 0:
        keys.ignore("runner_config.epochs", "lr_schedule.total_steps is the number of steps")
        keys.translate(path, "train.steps")
        return total
    keys.ignore(path, "epochs and the size of the data set decide")
    if isinstance(sizes, list) and sizes and is_count(sizes[0], batch):
        return epochs * (sizes[0] // batch)
    raise keys.error(
        path, f"must be the number of steps, because the size of the data is not known, got {total}", "--steps N"
    )


def write_optimizer(keys: ConfigKeys, steps: int, config: dict[str, Any]) -> None:
    """Writes the optimizer with its schedule.

    Raises:
      ConfigError: a value is out of its range.
    """
    kind = keys.take("optimizer.type", "text", "AdamW", "optimizer.name")
    options: dict[str, Any] = {}
    if kind in (*_ADAMW, "Adam"):
        options = _betas(keys)
        options["eps"] = keys.take("optimizer.eps", "number", 1e-8, "optimizer.options")
        decay = keys.take("optimizer.weight_decay", "number", 0.0, "optimizer.options.weight_decay")
        if kind == "Adam":
            keys.neutral("optimizer.weight_decay", (0.0,), "adam has no weight decay; use AdamW")
        else:
            options["weight_decay"] = decay
        name = "adam" if kind == "Adam" else "adamw"
    elif kind in _SGD:
        momentum = keys.take("optimizer.momentum", "number", 0.0, "optimizer.options.momentum")
        nesterov = "use_nesterov" if keys.has("optimizer.use_nesterov") else "nesterov"
        options = {
            "momentum": momentum or None,
            "nesterov": keys.take(f"optimizer.{nesterov}", "bool", False, "optimizer.options.nesterov"),
        }
        keys.neutral("optimizer.weight_decay", (0.0,), "sgd has no weight decay")
        name = "sgd"
    else:
        keys.refuse("optimizer.type", f"only {', '.join((*_ADAMW, 'Adam', *_SGD))} are translated")
        name = "adamw"
    for flag in ("amsgrad", "maximize", "swap"):
        keys.neutral(f"optimizer.{flag}", (False,), "not built")
    others = {"XLA fuses operations": "use_fused", "all parameters": "params", "see runner_wrapper": "loss_scale"}
    keys.ignore_all(others, "optimizer.")
    put(config, "optimizer", {"name": name, **_schedule(keys, steps), "options": options})
    if options.get("weight_decay"):
        _write_decay(keys, config)


def _write_decay(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes what does not decay in MindFormers: parameters with one dim. Adapters have none."""
    model, target = config.get("model", {}), "optimizer.options.weight_decay"
    if not model:
        note = "applies to norms too, which MindFormers leaves out; optimizer.decay excludes them"
        keys.translate("optimizer.weight_decay", target, note)
    elif "lora" not in model:
        keys.translate("optimizer.weight_decay", f"{target}, optimizer.decay")
        # Ours are one array for all heads, which is not a vector.
        biases = ["bias"] if model.get("qkv_bias") else []
        put(config, "optimizer.decay", {"exclude": ["vectors", *biases]})


def _betas(keys: ConfigKeys) -> dict[str, Any]:
    """``b1`` and ``b2``, from ``betas`` or from two keys, as the optimizers of MindSpore name them."""
    options = read_betas(keys, "optimizer.betas", [0.9, 0.999])
    for beta, ours in (("beta1", "b1"), ("beta2", "b2")):
        path = f"optimizer.{beta}"
        value = keys.take(path, "number", None, f"optimizer.options.{ours}")
        if value is None:
            continue
        if not 0 <= value < 1:
            raise keys.error(path, f"must be from 0 to below 1, got {value:g}")
        if keys.has("optimizer.betas") and value != options[ours]:
            raise keys.error(path, f"is {value:g}, but optimizer.betas has {options[ours]:g}", "leave one of them out")
        options[ours] = value
    return options


def _schedule(keys: ConfigKeys, steps: int) -> dict[str, Any]:
    at = "lr_schedule."
    given = keys.get(f"{at}learning_rate", "number")
    if given is None:
        rate = float(keys.take("optimizer.learning_rate", "number", 5e-5, "optimizer.learning_rate"))
    else:
        rate = float(given)
        keys.translate(f"{at}learning_rate", "optimizer.learning_rate")
        keys.ignore("optimizer.learning_rate", "lr_schedule.learning_rate decides")
    if rate <= 0:
        raise keys.error(f"{at}learning_rate", f"must be above 0, got {rate:g}")
    if not keys.has("lr_schedule"):
        return {"learning_rate": rate, "schedule": "constant", "warmup": 0}
    kind = keys.take(f"{at}type", "text", "CosineWithWarmUpLR", "optimizer.schedule")
    if kind not in _SCHEDULES:
        keys.refuse(f"{at}type", f"only {', '.join(_SCHEDULES)} are translated")
    shape = _SCHEDULES.get(kind, "constant")
    for key, values in (("warmup_lr_init", (0.0,)), ("num_cycles", (0.5,)), ("power", (1.0,)), ("decay_ratio", (1.0,))):
        keys.neutral(f"{at}{key}", values, f"only {values[0]:g} is built")
    keys.neutral(f"{at}decay_steps", (steps,), "the rate decays until the last step")
    end = keys.take(f"{at}lr_end", "number", 1e-7 if kind.startswith("Poly") else 0.0, "optimizer.final_lr_ratio")
    if kind.startswith("Poly") and end >= rate:
        raise keys.error(f"{at}lr_end", f"must be less than learning_rate={rate:g}, got {end:g}")
    if shape == "constant":
        keys.ignore(f"{at}lr_end", f"{kind} ends at the learning rate")
    if kind == "LinearWithWarmUpLR":
        keys.ignore(f"{at}lr_end", f"{kind} ends at 0")
        end = 0.0
    return {
        "learning_rate": rate,
        "schedule": shape,
        "warmup": _warmup(keys, steps),
        **({} if shape == "constant" else {"final_lr_ratio": end / rate}),
    }


def _warmup(keys: ConfigKeys, steps: int) -> int:
    ratio_path, steps_path = "lr_schedule.warmup_ratio", "lr_schedule.warmup_steps"
    ratio = keys.take(ratio_path, "number", None, "optimizer.warmup")
    if ratio is None:
        return int(keys.take(steps_path, "natural", 0, "optimizer.warmup"))
    if not 0 <= ratio <= 1:
        raise keys.error(ratio_path, f"must be from 0 to 1, got {ratio:g}")
    keys.ignore(steps_path, "warmup_ratio decides")
    return int(steps * ratio)


def write_wrapper(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes gradient clipping and the loss scale.

    Raises:
      ConfigError: a value is not a positive number.
    """
    at, most = "runner_wrapper.", "runner_wrapper.max_grad_norm"
    others = {"norms are recorded": "local_norm", "parallel_config decides": "micro_batch_num"}
    keys.ignore_all({"a class of MindFormers": "type", **others}, at)
    keys.neutral(f"{at}use_skip_data_by_global_norm", (False,), "train.spike rolls back instead")
    if keys.take(f"{at}use_clip_grad", "bool", False, "optimizer.clip_norm"):
        clip = keys.take(most, "number", 1.0, "optimizer.clip_norm")
        if clip <= 0:
            raise keys.error(most, f"must be above 0, got {clip:g}")
        put(config, "optimizer.clip_norm", float(clip))
    else:
        keys.ignore(most, "use_clip_grad is false")
        put(config, "optimizer.clip_norm", None)
    scale = _loss_scale(keys, f"{at}scale_sense")
    if scale is not None:
        put(config, "precision", {"scale": scale})


def _loss_scale(keys: ConfigKeys, path: str) -> dict[str, float] | None:
    value = keys.raw(path)
    if value is None:
        return None
    if is_number(value):
        if value <= 0:
            raise keys.error(path, f"must be above 0, got {value:g}")
        keys.translate(path, "precision.scale", "" if value != 1 else "1: no scale")
        return None if value == 1 else fixed_scale(float(value))
    kind = keys.get(f"{path}.type", "text", "")
    first = keys.get(f"{path}.loss_scale_value", "number", 65536)
    if first <= 0:
        raise keys.error(f"{path}.loss_scale_value", f"must be above 0, got {first:g}")
    if kind == "FixedLossScaleUpdateCell":
        keys.translate(path, "precision.scale")
        return fixed_scale(float(first))
    if kind != "DynamicLossScaleUpdateCell":
        keys.refuse(path, "only numbers, FixedLossScaleUpdateCell and DynamicLossScaleUpdateCell are translated")
        return None
    keys.translate(path, "precision.scale")
    factor = keys.get(f"{path}.scale_factor", "number", 2)
    if factor < 1:
        raise keys.error(f"{path}.scale_factor", f"must be at least 1, got {factor:g}")
    if factor == 1:
        keys.translate(path, "precision.scale", "scale_factor is 1, so that it never changes")
        return fixed_scale(float(first))
    interval = keys.get(f"{path}.scale_window", "count", 1000)
    return {"initial": float(first), "growth": float(factor), "backoff": 1 / factor, "interval": interval}


def write_run(keys: ConfigKeys, config: dict[str, Any]) -> None:
    """Writes the seed, the output, the kind of run and its checkpoints.

    Raises:
      ConfigError: the file is for prediction or evaluation.
    """
    mode = keys.get("run_mode", "text", "train")
    if mode not in ("train", "finetune"):
        raise keys.error("run_mode", f"must be train or finetune, got {mode!r}", "the file of a training run")
    keys.ignore("run_mode", "jaxpar train trains")
    put(config, "train.seed", keys.take("seed", "natural", 1, "train.seed"))
    put(config, "output", keys.take("output_dir", "text", "./output", "output"))
    callbacks = keys.get("callbacks", "list", [])
    keys.ignore("callbacks", "losses and checkpoints are always recorded")
    for callback in callbacks:
        if isinstance(callback, dict) and callback.get("type") == "CheckpointMonitor":
            every, keep = callback.get("save_checkpoint_steps"), callback.get("keep_checkpoint_max", 5)
            if is_count(every) and is_count(keep):
                put(config, "checkpoint", {"save_interval_steps": every, "keep": keep})
                keys.translate("callbacks", "checkpoint.save_interval_steps, checkpoint.keep", "of CheckpointMonitor")
