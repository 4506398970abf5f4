"""``import_mindformers``: a MindFormers configuration as a run of jaxpar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, ImportOptions, by_key
from jaxpar.interop.configurations.mindformers import ignored
from jaxpar.interop.configurations.mindformers.model import read_model
from jaxpar.interop.configurations.mindformers.parallel import context_options, read_sizes, write_optimizer_parallelism
from jaxpar.interop.configurations.mindformers.pipeline import read_stage_layers, virtual_stages, write_pipeline
from jaxpar.interop.configurations.mindformers.recompute import write_recompute
from jaxpar.interop.configurations.mindformers.training import (
    read_steps,
    write_batch,
    write_optimizer,
    write_run,
    write_wrapper,
)
from jaxpar.interop.configurations.report import ImportedRun

_KNOWN = (
    *("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage", "micro_batch_num"),
    *("seq_split_num", "use_seq_parallel", "recompute", "select_recompute", "optimizer_weight_shard_size"),
    *by_key(ignored.MODEL_IGNORED, ignored.TOP_IGNORED, ignored.MOE_IGNORED),
)
"""Names of keys that an error may suggest."""


def import_mindformers(data: Mapping[str, Any], options: ImportOptions) -> ImportedRun:
    """Returns the run that a MindFormers configuration describes, with a report about every key.

    Args:
      data: the configuration, as its YAML file has it.
      options: what the file does not say.

    Returns:
      The run. :meth:`ImportReport.check` raises if a key was refused.

    Raises:
      ConfigError: the configuration violates a rule of MindFormers; the text begins with the path of the key.

    >>> data = {"parallel_config": {"data_parallel": 2, "model_parallel": 4}, "lr_schedule": {"total_steps": 10}}
    >>> run = import_mindformers(data, ImportOptions("run.yaml", base="llama"))
    >>> run.config["mesh"], run.devices
    ({'data': 2, 'model': 4}, 8)
    """
    keys = ConfigKeys(data, options)
    keys.ignore_all(ignored.TOP_IGNORED)
    keys.neutral_all(ignored.TOP_NEUTRAL)
    model = read_model(keys)
    sizes = read_sizes(keys, model)
    config: dict[str, Any] = {"model": model.fields} if model.fields else {}
    config["mesh"] = sizes.mesh()
    config["rules"] = sizes.rules(model.fields, model.fields.get("family") or options.base or "llama")
    config["parallel"] = {}
    virtual = virtual_stages(keys, model.prefix) if sizes.pipeline > 1 else 1
    stages = read_stage_layers(keys, model, sizes.pipeline, virtual)
    write_pipeline(keys, model, sizes, stages, config)
    write_optimizer_parallelism(keys, sizes, config)
    write_recompute(keys, sizes, stages, config)
    if context := context_options(keys, model.prefix, sizes):
        config["parallel"]["context"] = context
    batch = write_batch(keys, model, sizes, config)
    steps = read_steps(keys, batch)
    write_optimizer(keys, steps, config)
    write_wrapper(keys, config)
    write_run(keys, config)
    config["train"]["steps"] = steps
    return ImportedRun(config, keys.report(_KNOWN), sizes.devices)
