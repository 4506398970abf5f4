"""``jaxpar import-mindformers`` and its like: configurations of other systems as configurations of runs."""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from jaxpar.app.arguments import File, Number
from jaxpar.app.outputs import write_output
from jaxpar.errors import ConfigError, DamagedError, JaxparError
from jaxpar.interop.configurations.keys import ImportOptions
from jaxpar.interop.configurations.report import ImportedRun, ImportReport
from jaxpar.utils.durable import read_input

type Ignored = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KEY")]
type Importer[T] = Callable[[T, ImportOptions], ImportedRun]
type Variables = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")]

_MOST_BYTES = 1 << 18
"""Bytes in a JSON configuration."""

Source = Annotated[Path, Positional, arg(metavar="FILE")]
Out = Annotated[Path, Positional, arg(metavar="OUT")]


@dataclass(frozen=True)
class ImportMindFormersCommand:
    """Convert a MindFormers YAML file to a run's configuration, with a report about every key.

    Attributes:
      file: the MindFormers configuration
      out: the configuration to write
      devices: number of devices (default: the product of the sizes in the file)
      steps: number of training steps, if the file does not say it
      base: configuration of a run whose model and data are used, unless the file has them
      ignore: leave out a key that has no counterpart
      json: also write the report as JSON
    """

    file: Source
    out: Out
    devices: Number = None
    steps: Number = None
    base: File = None
    ignore: Ignored = ()
    json: File = None

    def run(self) -> int:
        from jaxpar.interop.configurations.mindformers.translate import import_mindformers
        from jaxpar.utils.yaml_config import load_yaml

        return convert(self, "import-mindformers", load_yaml(self.file), import_mindformers)


@dataclass(frozen=True)
class ImportDeepSpeedCommand(ImportMindFormersCommand):
    """Convert a DeepSpeed JSON file to a run's configuration, with a report about every key.

    Attributes:
      file: the DeepSpeed configuration
      devices: number of devices (default: that of the batch sizes in the file)
      base: configuration of a run whose model and data are used; required
    """

    def run(self) -> int:
        from jaxpar.interop.configurations.deepspeed.translate import import_deepspeed

        return convert(self, "import-deepspeed", _read_json(self.file), import_deepspeed)


@dataclass(frozen=True)
class ImportMegatronCommand(ImportMindFormersCommand):
    """Convert Megatron-LM arguments to a run's configuration, with a report about every argument.

    Attributes:
      file: a launch script, which is read and not executed, or a file of arguments; -: standard input
      devices: number of devices (default: that of torchrun in the script)
      base: configuration of a run whose model and data are used, instead of the model in the arguments
      variable: value of a variable that the script does not set, such as NNODES=4
      conditions: what happens to arguments that the script gives only under a condition
    """

    variable: Variables = ()
    conditions: Literal["refuse", "take", "drop"] = "refuse"

    def run(self) -> int:
        from jaxpar.interop.configurations.megatron.script import read_script
        from jaxpar.interop.configurations.megatron.translate import import_megatron

        wrong = next((text for text in self.variable if not text.partition("=")[1]), None)
        if wrong is not None:
            raise ConfigError(f"--variable must be NAME=VALUE, got {wrong!r}. Remedy: --variable NNODES=4.")
        variables = {text.partition("=")[0]: text.partition("=")[2] for text in self.variable}
        arguments = read_script(_read_text(self.file), str(self.file), variables)
        importer = functools.partial(import_megatron, conditions=self.conditions)
        return convert(self, "import-megatron", arguments, importer)


def _read_text(file: Path) -> str:
    """Returns the text of a file, or of standard input."""
    try:
        if str(file) == "-":
            text = sys.stdin.read(_MOST_BYTES + 1)
        else:
            text = read_input(file, _MOST_BYTES).decode("utf-8")
    except OSError as error:
        remedy = "the path of a file, or - for standard input"
        raise ConfigError(f"{file!s:.200}: cannot be read: {error.strerror}. Remedy: {remedy}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: must be text in UTF-8. Remedy: another file.") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{file}: more than {_MOST_BYTES:,} bytes, the limit for a configuration.")
    return text


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ConfigError: the file cannot be read, is too large, or is no JSON object.
    """
    from jaxpar.interop.safetensors import parse_json

    text = _read_text(file)
    try:
        data = parse_json(text.encode(), str(file))
    except DamagedError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must be a JSON object, got {type(data).__name__}.")
    return data


def convert[T](command: ImportMindFormersCommand, name: str, data: T, importer: Importer[T]) -> int:
    """Translates ``data``, prints the report, checks that the result builds a job, and writes it.

    Raises:
      ConfigError: the configuration is wrong, has a key that cannot be translated, or ``out`` exists.
    """
    if command.out.exists():
        raise ConfigError(f"{command.out} exists. Remedy: delete it, or write another file.")
    base = _base(command.base)
    family = None if base is None else base["model"]["family"]
    options = ImportOptions(str(command.file), command.devices, command.steps, frozenset(command.ignore), family)
    found = importer(data, options)
    _show(found.report)
    write_output("--json", command.json, lambda: found.report.to_json() + "\n")
    found.report.check()
    config = found.config if base is None else _merged(base, found.config)
    _write(command, name, config, found.devices)
    print(f"wrote {command.out}, for {found.devices} device{'' if found.devices == 1 else 's'}")
    return 0


def _base(file: Path | None) -> dict[str, Any] | None:
    """Returns the parts of a run's configuration that an import may use."""
    if file is None:
        return None
    from jaxpar.utils.yaml_config import load_yaml

    data = load_yaml(file)
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("family"), str):
        raise ConfigError(f"--base {file}: model.family must be set. Remedy: the configuration of a built-in model.")
    parts = {name: data.get(name) or {} for name in ("data", "optimizer", "train", "parallel")}
    wrong = next((name for name, value in parts.items() if not isinstance(value, dict)), None)
    if wrong is not None:
        raise ConfigError(f"--base {file}: {wrong} must be a mapping, got {parts[wrong]!r:.80}.")
    return {"model": model, **parts}


def _merged(base: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The run with the base's model and data, and with its optimizer, steps and remat where the import sets none."""
    from jaxpar.utils.yaml_config import merge

    data = {key: value for key, value in config["data"].items() if (key, value) != ("source", "synthetic")}
    replaced = ("source", "blend") if {"source", "blend"} & data.keys() else ()
    optimizer = config["optimizer"] if "name" in config["optimizer"] else merge(base["optimizer"], config["optimizer"])
    kept = lambda part, key: {key: base[part][key]} if key in base[part] else {}
    return {
        "model": merge(base["model"], config.get("model", {})),
        **{key: value for key, value in config.items() if key != "model"},
        "data": merge({key: value for key, value in base["data"].items() if key not in replaced}, data),
        "optimizer": optimizer,
        "train": {**kept("train", "steps"), **config.get("train", {})},
        "parallel": {**kept("parallel", "remat"), **config["parallel"]},
    }


def _show(report: ImportReport) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:  # rich would cut the table to 80 columns
        print(report.to_text())
        return
    table = Table("key", "value", "status", "becomes")
    colors = {"translated": "green", "ignored": "yellow", "refused": "red"}
    for row, (key, value, status, text) in zip(report.rows, report.table(), strict=True):
        table.add_row(escape(key), escape(value), f"[{colors[row.status]}]{status}[/]", escape(text))
    Console(highlight=False).print(table)
    print(report.headline())


def _write(command: ImportMindFormersCommand, name: str, config: dict[str, Any], devices: int) -> None:
    """Writes the configuration after its step was traced, so that what is written loads and fits together."""
    import yaml

    import jaxpar as jp
    from jaxpar.app.config import load_run
    from jaxpar.app.job import make_job

    plain = _copied(config)
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=110)
    head = f"# Written by: jaxpar {name} {command.file} {command.out}\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / command.out.name
        file.write_text(head + text, encoding="utf-8")
        try:
            job = make_job(load_run(file))
            how: dict[str, Any] = {"batch": job.batch_spec(), "loss_fn": job.loss_fn, "step": job.step_options()}
            with warnings.catch_warnings():  # about this machine, not about the run's
                warnings.simplefilter("ignore", UserWarning)
                found = jp.check(job.layout(devices), job.make_model, job.tx, **how, strict=False)
            for reason in () if found.memory is None else found.memory.unknown:
                raise ConfigError(reason)
        except JaxparError as error:
            problem = str(error).replace(str(file), str(command.out))
            raise ConfigError(f"{command.file}: its translation is not a valid run: {problem}") from error
    write_output("OUT", command.out, lambda: head + text)


def _copied(value: Any) -> Any:
    """A copy in which no list occurs twice, because YAML would write the second one as an alias."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value
