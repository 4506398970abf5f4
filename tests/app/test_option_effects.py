"""Every option of every command: one that has no effect, and a number out of its range, is an error."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAliasType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.cli import COMMANDS, main
from jaxpar.app.option_effects import EFFECTS, check_options
from jaxpar.errors import ConfigError

REQUIRED = {"topology": "v5e:4x4", "source": "corpus", "names": ("1f1b",), "stages": 2, "microbatches": 2}
"""Arguments without a default; the others are files."""
OTHERS: dict[str, list[Any]] = {
    "topology": ["v5e:4x4,v5e:4x8"],
    "objective": ["chips", "memory"],
    "search": ["recursive"],
    "scaling": ["strong"],
    "quantize": ["no", "4"],
    "source": ["run.yaml"],
    "special": ["parse"],
    "format": ["text", "jsonl"],
    "bad_rows": ["skip"],
    "timing": ["stages"],
    "names": [("1f1b", "gpipe")],
    "conditions": ["drop"],
    "dtype": ["float32"],
    "int8": [("cache",)],
    "strict": [False],
    "temperature": [1.0],
    "top_p": [0.5],
    "imbalance": [2.0],
}
"""Further values of options of which not every value is one."""


def hint_of(command: str, option: str) -> Any:
    hint = typing.get_type_hints(COMMANDS[command], include_extras=True)[option]
    while True:
        if isinstance(hint, TypeAliasType):
            hint = hint.__value__
        elif typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        else:
            return hint


def kinds_of(command: str, option: str) -> set[Any]:
    hint = hint_of(command, option)
    return {hint, *typing.get_args(hint)}


def values_of(command: str, option: str) -> list[Any]:
    """Values of an option that are not its default."""
    kinds = kinds_of(command, option)
    if option in OTHERS:
        return OTHERS[option]
    if tuple in map(typing.get_origin, kinds):
        return [("x",)]
    values: dict[Any, Any] = {bool: True, int: 3, float: 0.5, Path: Path("x"), str: "x"}
    return [next(value for kind, value in values.items() if kind in kinds)]


def made(command: str, **options: Any) -> Any:
    fields = dataclasses.fields(COMMANDS[command])  # type: ignore[arg-type]
    missing = [field.name for field in fields if field.default is dataclasses.MISSING]
    return COMMANDS[command](**{name: REQUIRED.get(name, Path("x")) for name in missing} | options)


def commands_with(command: str, option: str) -> Iterator[Any]:
    """Command lines with an option: alone, and beside each other option and each two."""
    others = [name for name in EFFECTS[command] if name != option]
    for value in values_of(command, option):
        for count in range(3):
            for names in itertools.combinations(others, count):
                for more in itertools.product(*(values_of(command, name) for name in names)):
                    yield made(command, **{option: value}, **dict(zip(names, more, strict=True)))


def test_the_table_has_every_option_of_every_command() -> None:
    commands: dict[str, Any] = dict(COMMANDS)
    options = {name: {field.name for field in dataclasses.fields(command)} for name, command in commands.items()}
    assert {name: set(effects) for name, effects in EFFECTS.items()} == options


NUMBERS = [
    (command, option)
    for command, effects in EFFECTS.items()
    for option in effects
    if kinds_of(command, option) & {int, float}
]


def test_every_number_has_a_range() -> None:
    assert len(NUMBERS) > 30
    assert {pair for pair in NUMBERS if EFFECTS[pair[0]][pair[1]].numbers is None} == set()


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_a_number_out_of_its_range_is_refused(command: str, option: str) -> None:
    numbers = EFFECTS[command][option].numbers
    assert numbers is not None
    wrong: list[float] = [numbers.least - 1, numbers.most * 2, 10**30]
    wrong += [numbers.least] * numbers.above + [numbers.most] * numbers.below
    if float in kinds_of(command, option):
        wrong += [math.nan, math.inf, -math.inf]
    for value in wrong:
        with pytest.raises(ConfigError) as error:
            check_options(command, made(command, **{option: value}))
        (text,) = error.value.args
        assert f"{command}: --{option.replace('_', '-')} " in text and f" {value!r}. " in text


CONDITIONAL = [
    (command, option) for command, effects in EFFECTS.items() for option in effects if effects[option].conditions
]


@pytest.mark.parametrize(("command", "option"), CONDITIONAL)
def test_an_option_without_effect_is_refused(command: str, option: str) -> None:
    name = f"--{option.replace('_', '-')}"
    conditions = EFFECTS[command][option].conditions
    waiting = {f"{command}: {name} has no effect {one.text}. Remedy: {one.remedy}." for one in conditions} | {
        "accepted"
    }
    for one in commands_with(command, option):
        try:
            check_options(command, one)
        except ConfigError as error:
            waiting.discard(str(error))
        else:
            waiting.discard("accepted")
        if not waiting:
            break
    assert not waiting


def test_the_texts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (
            ["check", "c", "--golden", "f"],
            "check: --golden has no effect without --topology. Remedy: add --topology v5e:4x4, or leave it out.",
        ),
        (
            ["verify", "c", "--bound", "nan"],
            "verify: --bound must be above 0, at most 1, got nan. Remedy: use a number in this range.",
        ),
        (
            ["verify", "c", "--bound", "0"],
            "verify: --bound must be above 0, at most 1, got 0.0. Remedy: use a number in this range.",
        ),
        (
            ["plan", "c", "--topology", "v5e:4x4", "--programs", "0"],
            "plan: --programs must be from 1 to 2,147,483,647, got 0. Remedy: use a number in this range.",
        ),
        (
            ["generate", "c", "--explain", "--json", "f"],
            "generate: --json has no effect with --explain. Remedy: leave it or --explain out.",
        ),
        (
            ["explain", "c", "--devices", "8", "--topology", "v5e:4x2"],
            "explain: --devices has no effect with --topology. Remedy: leave it or --topology out.",
        ),
        (
            ["tokenize", "run.yaml", "out", "--eos", "x"],
            "tokenize: --eos has no effect on a run. Remedy: the key of its data, with --set data.",
        ),
        (
            ["gallery", "--full"],
            "gallery: --full has no effect without a recipe. Remedy: add NAME, or leave it out.",
        ),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == f"ConfigError: {text}\n"


QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["train", "--profile", "99:5", "--set", "train.steps=8"],
            f"{QUICKSTART}: train.profile traces the steps 99 to 103, but train.steps is 8. Remedy: an ",
        ),
        (
            ["plan", "--topology", "v5e:4x4", "--scale", "16:64"],
            "plan: the shape in --topology v5e:4x4 has no effect with --scale. Remedy: --topology v5e.",
        ),
        (
            ["plan", "--topology", "v5e", "--scale", "16:64", "--compile-up-to", "8"],
            "plan: --compile-up-to 8 has no effect: the smallest size of --scale has 16 chips. ",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_an_option_without_effect_on_this_run_is_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], str(QUICKSTART), *words[1:]]) == 2
    assert f"Error: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [math.nan, 0.0, -1.0, math.inf])
def test_a_bound_that_nothing_exceeds_or_everything_is_refused_in_python(bound: float) -> None:
    layout = jp.Layout(jp.MeshSpec().build(jax.devices()[:1]), jp.Rules())
    make, batch = lambda key: {"w": jnp.ones(2)}, {"x": np.ones((2, 2))}
    loss = lambda model, batch: (batch["x"] @ model["w"]).sum()
    with raises(ConfigError, "bound"):
        jp.testing.assert_matches_single_device(layout, make, optax.sgd(0.1), loss, [batch], bound=bound)
    if bound != 0:
        with raises(ConfigError, "max_replicated"):
            jp.check(layout, make, optax.sgd(0.1), max_replicated=bound)


def test_every_option_of_schedule_changes_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> str:
        assert main(["schedule", *words]) == 0
        return capsys.readouterr().out

    plain = ["interleaved", "--stages", "2", "--microbatches", "4"]
    for words in (["--virtual-stages", "2"], ["--costs", "F=1,B=2,W=1"], ["--width", "40"]):
        assert printed(*plain, *words) != printed(*plain)
    assert main(["schedule", "1f1b", "gpipe", *plain[1:], "--virtual-stages", "2"]) == 2
    assert capsys.readouterr().err == (
        "ScheduleError: --virtual-stages has no effect on 1f1b, gpipe. Remedy: leave it out.\n"
    )
    assert main(["schedule", "1f1b", "gpipe", *plain[1:], "--sequence-chunks", "2"]) == 2
    assert capsys.readouterr().err == (
        "ScheduleError: --sequence-chunks has no effect on 1f1b, gpipe. Remedy: leave it out.\n"
    )


def test_a_schedule_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "gpipe", "--stages", "100000", "--microbatches", "100000"]) == 2
    assert capsys.readouterr().err == (
        "ScheduleError: schedule 'gpipe': 100,000 stages, 100,000 microbatches, 1 chunks and 1 sequence chunks make "
        "10,000,000,000 operations of a kind, and the limit is 1,048,576. Remedy: fewer microbatches.\n"
    )
