"""When each option of each command has an effect, the range of its numbers, and what it writes.

A command that accepts an option and ignores it answers a question that nobody asked: a golden file that is not compared
passes. So ``EFFECTS`` lists every option of every command, and :func:`check_options` holds a command line against it
before the command starts: an option without effect is an error, and so is an output that can never be written. What
depends on more than the command line, such as the keys of a file, its reader checks.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.app.outputs import OutputKind, check_output
from jaxpar.errors import ConfigError
from jaxpar.utils.checks import INT32, Range, check_number


@dataclass(frozen=True)
class Condition:
    """What must hold for an option to have an effect.

    Attributes:
      holds: whether a command with this option fulfils it.
      text: when the option has no effect, such as ``without --topology``.
      remedy: what to do then.
    """

    holds: Callable[[Any], bool]
    text: str
    remedy: str = "leave it out"


@dataclass(frozen=True)
class Effect:
    """When an option has an effect.

    Attributes:
      numbers: the range of its numbers.
      conditions: all of these hold.
      writes: what it names, if the command writes that.
      label: its name in a message, if it is not that of an option.
    """

    numbers: Range | None = None
    conditions: tuple[Condition, ...] = ()
    writes: OutputKind | None = None
    label: str = ""

    def when(self, *conditions: Condition) -> Effect:
        """Returns this effect under further conditions."""
        return dataclasses.replace(self, conditions=(*self.conditions, *conditions))


def check_options(name: str, command: Any) -> None:
    """Raise an error if an option of a command has no effect, or if its number or its output is wrong.

    Args:
      name: of the command.
      command: its dataclass.

    Raises:
      ConfigError: it names the option, and what it needs.
      MissingExtraError: as :func:`jaxpar.app.outputs.check_output`.
    """
    _check_working_directory()
    for option, effect in EFFECTS[name].items():
        value = getattr(command, option)
        if effect.numbers is not None and value is not None:
            check_number(f"{name}: {_spelled(option)}", value, effect.numbers)
        for condition in effect.conditions if is_set(command, option) else ():
            if not condition.holds(command):
                raise ConfigError(
                    f"{name}: {_spelled(option)} has no effect {condition.text}. Remedy: {condition.remedy}."
                )
    if not getattr(command, "process_id", None):  # process 0 writes
        for option, effect in EFFECTS[name].items():
            if effect.writes is not None and getattr(command, option) is not None:
                check_output(effect.label or _spelled(option), getattr(command, option), effect.writes)


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("the working directory is deleted. Remedy: cd to another folder.") from error


def is_set(command: Any, option: str) -> bool:
    """Whether an option of a command has another value than its default."""
    default = next(field.default for field in dataclasses.fields(command) if field.name == option)
    return bool(getattr(command, option) != default)


def _spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _with(option: str, example: str) -> Condition:
    """The condition that another option is set."""
    return Condition(
        lambda command: is_set(command, option),
        f"without {_spelled(option)}",
        f"add {_spelled(option)} {example}".rstrip() + ", or leave it out",
    )


def _without(*options: str) -> tuple[Condition, ...]:
    """The conditions that other options are not set."""
    return tuple(
        Condition(
            lambda command, option=option: not is_set(command, option),  # type: ignore[misc]
            f"with {_spelled(option)}",
            f"leave it or {_spelled(option)} out",
        )
        for option in options
    )


def _is_run(source: str) -> bool:
    return Path(source).suffix in (".yaml", ".yml")


_ANY, _FILE, _PICTURE = Effect(), Effect(writes="file"), Effect(writes="picture")
_COUNT, _NATURAL = Effect(Range(1, INT32)), Effect(Range(0, INT32))
_TOPOLOGY, _SCALE = _with("topology", "v5e:4x4"), _with("scale", "16:64")
_SAMPLED = Condition(
    lambda command: command.temperature > 0,
    "at temperature 0, which takes the most likely token",
    "--temperature 1, or leave it out",
)
_ALONE = Condition(
    lambda command: len(command.names) == 1,
    "on a comparison of several schedules",
    "give one schedule, or leave it out",
)
_QUANTIZED = Condition(
    lambda command: command.quantize in ("4", "8"), "without --quantize 4 or 8", "--quantize 4, or leave it out"
)
_OF_A_TEXT = Condition(lambda command: not _is_run(command.source), "on a run", "the key of its data, with --set data")
_OF_A_RUN = Condition(
    lambda command: _is_run(command.source), "on a text", "the options of this command, such as --tokenizer"
)
_OF_FIELDS = Condition(
    lambda command: command.format != "text", "with --format text, which has no fields", "leave it or --format out"
)
_RECIPE = Condition(lambda command: command.name is not None, "without a recipe", "add NAME, or leave it out")
_TOKENIZER = _with("tokenizer", "tokenizer.json")


def _command(always: str, **others: Effect) -> dict[str, Effect]:
    """The options of a command: those that always have an effect, separated by spaces, and the others."""
    return {name: _ANY for name in always.split()} | others


_PROCESSES = {
    "processes": _COUNT,
    "coordinator": _ANY,
    "process_count": _COUNT,
    "process_id": _NATURAL,
}
_OUT, _FOLDER = Effect(writes="file", label="OUT"), Effect(writes="folder", label="OUT")
_IMPORT = _command("file base ignore", out=_OUT, json=_FILE, devices=_COUNT, steps=_COUNT)

EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    "train": _command(
        "config set profile",
        **_PROCESSES,
        ray=_ANY.when(*_without("coordinator", "process_count", "process_id")),
        servers=_COUNT,
        workers=_COUNT,
    ),
    "explain": _command("config set topology full", json=_FILE, html=_FILE, devices=_COUNT.when(*_without("topology"))),
    "check": _command(
        "config set topology strict",
        json=_FILE,
        html=_FILE,
        devices=_COUNT.when(*_without("topology")),
        max_replicated=Effect(Range(0, 1.0, below=True)),
        hlo=_FILE.when(_TOPOLOGY),
        golden=_FILE.when(_TOPOLOGY),
        imbalance=Effect(Range(1, 1e6)).when(_TOPOLOGY),
    ),
    "plan": _command(
        "config topology set",
        json=_FILE,
        picture=_PICTURE,
        objective=_ANY.when(*_without("scale")),
        max_batch=_COUNT.when(*_without("scale")),
        output=_FILE.when(*_without("scale")),
        programs=_COUNT.when(
            Condition(
                lambda command: command.scale is None or command.compile_up_to > 0,
                "with --scale, which compiles nothing",
                "--compile-up-to 64, or leave it out",
            )
        ),
        search=_ANY.when(
            *_without("scale", "price"),
            Condition(
                lambda command: "," not in command.topology and command.objective in ("time", "memory"),
                "on several topologies, or on their chips or price",
                "one topology, with --objective time or memory, or leave it out",
            ),
        ),
        price=_ANY.when(*_without("scale")),
        scale=_ANY,
        scaling=_ANY.when(_SCALE),
        compile_up_to=_NATURAL.when(_SCALE),
    ),
    "verify": _command("config set", steps=_COUNT, bound=Effect(Range(0, 1.0, above=True))),
    "generate": _command(
        "config set prompt prompts int8 explain",
        chat=_ANY.when(
            Condition(
                lambda command: bool(command.prompt) or command.prompts is not None,
                "without a prompt",
                "add --prompt TEXT, or leave it out",
            )
        ),
        checkpoint=_ANY.when(*_without("explain")),
        max_new_tokens=_COUNT,
        temperature=Effect(Range(0, 1e6)).when(*_without("explain")),
        top_k=_COUNT.when(*_without("explain"), _SAMPLED),
        top_p=Effect(Range(0, 1.0, above=True)).when(*_without("explain"), _SAMPLED),
        seed=Effect(Range(0, 2**32 - 1)).when(*_without("explain"), _SAMPLED),
        cache=_COUNT,
        batch=_COUNT,
        stop=_ANY.when(*_without("explain")),
        json=_FILE.when(*_without("explain")),
        **{name: effect.when(*_without("explain")) for name, effect in _PROCESSES.items()},
    ),
    "verify-checkpoint": _command("directory"),
    "schedule": _command(
        "names costs",
        stages=_COUNT,
        microbatches=_COUNT,
        virtual_stages=_COUNT,
        sequence_chunks=_COUNT,
        draw=_PICTURE.when(_ALONE),
        timing=_ANY.when(_with("draw", "schedule.png")),
        width=_COUNT.when(_ALONE),
    ),
    "import": _command("directory dtype ignore", out=_FOLDER),
    "export": _command(
        "checkpoint adapter",
        directory=dataclasses.replace(_FOLDER, label="DIR"),
        family=_ANY.when(*_without("adapter")),
        dtype=_ANY.when(*_without("adapter")),
        quantize=_ANY.when(*_without("adapter")),
        group=_COUNT.when(*_without("adapter"), _QUANTIZED),
        base=_ANY.when(*_without("adapter")),
    ),
    "tensor": _command("config topology set", json=_FILE, devices=_COUNT),
    "import-mindformers": _IMPORT,
    "import-deepspeed": _IMPORT,
    "import-megatron": _IMPORT | _command("variable conditions"),
    "tokenize": _command(
        "source",
        out=_OUT,
        set=_ANY.when(_OF_A_RUN),
        tokenizer=_ANY.when(_OF_A_TEXT),
        eos=_ANY.when(_OF_A_TEXT, _TOKENIZER),
        special=_ANY.when(_OF_A_TEXT, _TOKENIZER),
        format=_ANY.when(_OF_A_TEXT),
        text_field=_ANY.when(_OF_A_TEXT, _OF_FIELDS),
        bad_rows=_ANY.when(_OF_A_TEXT),
        heldout_fraction=Effect(Range(0, 0.999, above=True)).when(_OF_A_TEXT),
    ),
    "verify-tokens": _command("file"),
    "gallery": _command("name json", full=_ANY.when(_RECIPE, *_without("json"))),
    "doctor": _command("json checkpoint", timeout=Effect(Range(0, 86400.0, above=True)).when(*_without("checkpoint"))),
}
"""Command → option → when it has an effect."""
