"""``import_megatron``: Megatron-LM arguments as a run of jaxpar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys, ImportOptions, by_key
from jaxpar.interop.configurations.megatron import ignored
from jaxpar.interop.configurations.megatron.model import read_model
from jaxpar.interop.configurations.megatron.parallel import (
    read_sizes,
    write_batch,
    write_context,
    write_pipeline,
    write_recompute,
    write_zero,
)
from jaxpar.interop.configurations.megatron.script import Conditions, ScriptArguments
from jaxpar.interop.configurations.megatron.training import write_optimizer, write_precision, write_run
from jaxpar.interop.configurations.report import ImportedRun, ImportReport, KeyRow

_KNOWN = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--num-layers"),
    *("--sequence-parallel", "--use-distributed-optimizer", "--micro-batch-size", "--global-batch-size"),
    *by_key(ignored.IGNORED),
)
"""Names of arguments that an error may suggest."""


def import_megatron(
    arguments: ScriptArguments, options: ImportOptions, *, conditions: Conditions = "refuse"
) -> ImportedRun:
    """Returns the run that Megatron-LM arguments describe, with a report about every argument.

    Args:
      arguments: as :func:`jaxpar.interop.configurations.megatron.script.read_script` returned them.
      options: what the arguments do not say.
      conditions: what happens to arguments that the script gives only under a condition.

    Returns:
      The run. :meth:`ImportReport.check` raises if an argument was refused.

    Raises:
      ConfigError: the arguments violate a rule of Megatron-LM; the text begins with the argument.

    >>> from jaxpar.interop.configurations.megatron.script import read_script
    >>> text = "--tensor-model-parallel-size 4 --micro-batch-size 2 --train-iters 10 --lr 1e-4 --bf16"
    >>> run = import_megatron(read_script(text, "a.txt", {}), ImportOptions("a.txt", devices=8, base="llama"))
    >>> run.config["mesh"], run.config["data"]["batch"]
    ({'data': 2, 'model': 4}, 4)
    """
    options = replace(options, ignore=frozenset(f"--{name.lstrip('-')}" for name in options.ignore))
    left = {name: it for name, it in arguments.conditional.items() if name not in options.ignore}
    arguments = replace(arguments, conditional=left).decide(conditions)
    keys = ConfigKeys(arguments.values, options)
    for name in arguments.values:
        reason = next((reason for start, reason in by_key(ignored.PREFIXES).items() if name.startswith(start)), None)
        if reason is not None:
            keys.ignore(name, reason)
    keys.ignore_all(ignored.IGNORED)
    keys.neutral_all(ignored.NEUTRAL)
    model = read_model(keys)
    layers = model.get("layers")
    sizes = read_sizes(keys, model, arguments.launcher)
    config: dict[str, Any] = {"model": dict(model), "mesh": sizes.mesh()}
    config["rules"] = sizes.rules(model, model.get("family") or options.base or "llama")
    config["parallel"] = {}
    batch = write_batch(keys, sizes, config)
    write_context(keys, sizes, config["data"].get("seq"), config)
    virtual = write_pipeline(keys, sizes, layers, config)
    write_zero(keys, sizes, config)
    write_recompute(keys, sizes, layers, virtual, config)
    write_precision(keys, config)
    write_optimizer(keys, batch, config)
    write_run(keys, config)
    report = keys.report(_KNOWN)
    return ImportedRun(config, ImportReport(report.source, _conditional(report.rows, arguments)), sizes.devices)


def _conditional(rows: list[KeyRow], arguments: ScriptArguments) -> list[KeyRow]:
    """The rows, in which arguments under a condition are refused, or ignored if they are dropped."""
    if arguments.taken:
        return rows
    known = {row.key: row for row in rows}
    for name, (value, line) in arguments.conditional.items():
        if arguments.taken is False:
            known.setdefault(name, KeyRow(name, value, "ignored", "", f"--conditions drop; line {line}"))
        elif known[name].status != "ignored":
            reason = f"line {line} gives it only under a condition: --conditions take, or drop"
            known[name] = replace(known[name], status="refused", target="", note=reason)
    return [*known.values()]
