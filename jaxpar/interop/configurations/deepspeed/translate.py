"""``import_deepspeed``: a DeepSpeed configuration as a run of jaxpar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.interop.configurations.deepspeed import ignored
from jaxpar.interop.configurations.deepspeed.training import read_sizes, write_batch, write_optimizer, write_precision
from jaxpar.interop.configurations.deepspeed.zero import write_zero
from jaxpar.interop.configurations.keys import ConfigKeys, ImportOptions, by_key, put
from jaxpar.interop.configurations.layout import AxisSizes
from jaxpar.interop.configurations.report import ImportedRun

_KNOWN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization"),
    *("gradient_clipping", "stage", "enabled", *by_key(ignored.TOP_IGNORED, ignored.ZERO_IGNORED)),
)
"""Names of keys that an error may suggest."""


def import_deepspeed(data: Mapping[str, Any], options: ImportOptions) -> ImportedRun:
    """Returns the run that a DeepSpeed configuration describes, with a report about every key.

    The file has no model: the result has layout, batch, precision, optimizer and schedule only.

    Args:
      data: the configuration, as its JSON file has it.
      options: what the file does not say; ``base`` is required.

    Returns:
      The run. :meth:`ImportReport.check` raises if a key was refused.

    Raises:
      ConfigError: the configuration violates a rule of DeepSpeed; the text begins with the path of the key.

    >>> data = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    >>> run = import_deepspeed(data, ImportOptions("ds.json", devices=8, base="llama"))
    >>> run.config["mesh"], run.config["parallel"]["optimizer"], run.config["model"]
    ({'data': 8}, {'stage': 2}, {'dtype': 'bfloat16', 'param_dtype': 'float32'})
    """
    keys = ConfigKeys(data, options)
    if options.base is None:
        raise keys.error("the configuration", "has no model", "--base RUN.yaml")
    keys.ignore_all(ignored.TOP_IGNORED)
    for section, reason in by_key(ignored.FEATURES).items():
        if keys.get(f"{section}.enabled", "bool", False):
            keys.refuse(section, reason)
        else:
            keys.ignore(section, "enabled is false")
    keys.neutral("sparse_attention", ({},), "attention is dense, or has a sliding window: model.sliding_window")
    keys.neutral("gradient_allreduce_op", ("mean",), "gradients are those of the mean loss")
    sizes = read_sizes(keys)
    config: dict[str, Any] = {"mesh": sizes.mesh(), "rules": sizes.rules({}, options.base), "parallel": {}}
    stage = write_zero(keys, sizes, config)
    write_precision(keys, config)
    write_batch(keys, sizes, config)
    write_optimizer(keys, stage, config)
    _write_checkpointing(keys, sizes, config)
    return ImportedRun(config, keys.report(_KNOWN), sizes.devices)


def _write_checkpointing(keys: ConfigKeys, sizes: AxisSizes, config: dict[str, Any]) -> None:
    """Writes ``parallel.remat`` where the file says more than how PyTorch stores activations."""
    at = "activation_checkpointing."
    keys.ignore_all(ignored.CHECKPOINTING_IGNORED, at)
    keys.neutral(f"{at}cpu_checkpointing", (False,), "inputs of layers stay on the devices; see parallel.remat")
    path = f"{at}partition_activations"
    if not keys.get(path, "bool", False) or sizes.model == 1:
        keys.ignore(path, "the model decides which layers recompute: parallel.remat")
        return
    keys.translate(path, "parallel.remat.slice_activation")
    put(config, "parallel.remat", {"policy": "full", "slice_activation": True})
