"""Tests the exit status of each kind of error, and what a command prints about an error that nobody expected."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpar import errors
from jaxpar.app.cli import main
from jaxpar.app.launch.exit_codes import ExitCode, exit_code, in_yaml, last_line
from jaxpar.parallel.pipeline.schedules import describe


def after(cause: Exception, kind: Callable[[str], Exception], *, hidden: bool = False) -> Exception:
    """Returns an error that was raised because of another one, ``from None`` if ``hidden``."""
    try:
        try:
            raise cause
        except Exception as found:  # noqa: BLE001 (any kind)
            raise kind("what failed") from (None if hidden else found)
    except Exception as error:  # noqa: BLE001 (any kind)
        return error


FULL, MISSING = OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError(errno.ENOENT, "missing")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (errors.ConfigError("x"), "CONFIGURATION"),
        (after(FULL, errors.ConfigError), "CONFIGURATION"),
        (errors.LayoutError("x"), "CONFIGURATION"),
        (errors.MissingExtraError("x"), "CONFIGURATION"),
        (errors.DivergedError("x"), "GAVE_UP"),
        (errors.UnsavedError("x"), "NOT_SAVED"),
        (errors.CheckpointError("of another model"), "CONFIGURATION"),
        (after(MISSING, errors.CheckpointError), "CONFIGURATION"),
        (after(FULL, errors.CheckpointError), "RETRYABLE"),
        (after(BlockingIOError(), errors.CheckpointError, hidden=True), "RETRYABLE"),  # another run still has the lock
        (after(after(FULL, errors.DiskError), errors.DataError), "RETRYABLE"),
        (after(FULL, errors.DamagedError), "FAILED"),
        (errors.CompileError("x"), "FAILED"),
        (errors.LaunchError("options contradict each other"), "CONFIGURATION"),
        (after(ValueError("not a number"), errors.LaunchError), "CONFIGURATION"),
        (after(RuntimeError("no peer came"), errors.LaunchError), "RETRYABLE"),
        (FULL, "RETRYABLE"),
        (MISSING, "FAILED"),
        (RuntimeError("UNAVAILABLE: Gloo all-reduce failed"), "RETRYABLE"),
        (ZeroDivisionError(), "FAILED"),
        (MemoryError(), "FAILED"),
        (KeyboardInterrupt(), "INTERRUPTED"),
    ],
    ids=str,
)
def test_each_error_has_the_status_that_its_cause_gives_it(error: BaseException, name: str) -> None:
    assert exit_code(error).name == name


def test_the_statuses_are_distinct_and_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/exit_codes.md").read_text()
    told = {int(number): meaning for number, meaning in re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE)}
    assert told == {int(code): code.meaning for code in ExitCode} and len(set(told.values())) == len(told)
    assert last_line(75) == "exit 75: a peer, a device or storage failed; a new start may succeed"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``failing(error)`` returns the status and the text of a command that raises this error."""

    def run(error: BaseException) -> tuple[int, str]:
        def answer(**_: Any) -> str:
            raise error

        monkeypatch.setattr(describe, "answer", answer)
        status = main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"])
        captured = capsys.readouterr()
        assert captured.out == ""
        return status, captured.err

    return run


def test_an_unexpected_error_is_short_and_its_traceback_is_in_a_file(failing: Any, monkeypatch: Any) -> None:
    status, said = failing(ZeroDivisionError("a \x1b[31mred\x1b[0m word\nand a second line"))
    found = re.fullmatch(
        r"ZeroDivisionError: a \\x1b\[31mred\\x1b\[0m word\nand a second line\n"
        rf"raised at {__file__}:\d+, in answer\. The full traceback is in (\S+)\.\n",
        said,
    )
    assert status == ExitCode.FAILED and found is not None, said
    file = Path(found[1])
    assert "Traceback (most recent call last):" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    _, said = failing(ValueError("long " * 10_000))
    assert len(said) < 2500
    Path(said.split()[-1][:-1]).unlink()
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    status, said = failing(FULL)
    assert status == ExitCode.RETRYABLE and said.startswith("Traceback (most recent call last):")
    assert "\nOSError: [Errno 28] No space left on device\nraised at " in said


def test_an_error_of_ours_is_short_too_and_keeps_its_remedy(failing: Any) -> None:
    status, said = failing(errors.RulesError(f"1. \x1b[31m: {'x' * 10_000}. Remedy: another.\n2. second"))
    assert status == ExitCode.CONFIGURATION
    assert re.fullmatch(r"RulesError: 1\. \\x1b\[31m: x+ \.\.\. x+\. Remedy: another\.\n2\. second\n", said)
    assert len(said) < 2100


def test_ctrl_c_ends_a_command_in_one_line(failing: Any) -> None:
    assert failing(KeyboardInterrupt()) == (130, "stopped by Ctrl-C\n")


def test_a_remedy_on_the_command_line_is_in_yaml() -> None:
    text = "uneven. Remedy: layers_per_stage=(2, 1), one number a piece (YAML: layers_per_stage: [2, 1]), or more."
    assert in_yaml(text) == "uneven. Remedy: layers_per_stage: [2, 1], or more."
    assert in_yaml("axis=3 is wrong. Remedy: a=1.") == "axis=3 is wrong. Remedy: a=1."
