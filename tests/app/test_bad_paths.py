"""All commands with outputs that can never be written: status 2, one message, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.cli import main
from jaxpar.app.generate.prompts import read_prompts
from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.option_effects import EFFECTS
from jaxpar.app.train.output_folder import OutputFolder
from jaxpar.checkpoint.manager import CheckpointManager
from jaxpar.checkpoint.restore import restore
from jaxpar.data import load_text, load_tokenizer
from jaxpar.data.chat_template import load_chat_template
from jaxpar.errors import CheckpointError, ConfigError, JaxparError, LaunchError

REQUIRED = {
    "plan": ["c.yaml", "--topology", "v5e:4x4"],
    "tensor": ["c.yaml", "--topology", "v5e:4x4"],
    "schedule": ["1f1b", "--stages", "2", "--microbatches", "2"],
}
NEEDED = {"hlo": ["--topology", "v5e:4x4"], "golden": ["--topology", "v5e:4x4"]}
FILE_PATHS: dict[str, str] = {
    "empty": "",
    "a folder": "{tmp}/folder",
    "below a file": "{tmp}/file/x.png",
    "below a device": "/dev/null/x.png",
    "unwritable": "/proc/nothing/x.png",
    "too long": "{tmp}/" + "n" * 300 + ".png",
    "an address": "gs://bucket/x.png",
}
FOLDER_PATHS = {name: text for name, text in FILE_PATHS.items() if name not in ("empty", "a folder")}
FOLDER_PATHS["a file"] = "{tmp}/file"
OUTPUTS = [(name, option) for name, effects in EFFECTS.items() for option in effects if effects[option].writes]


def line_of(command: str, option: str, path: str) -> list[str]:
    """A command line whose option names a path."""
    if EFFECTS[command][option].label:
        return [command, "source", path]
    words = REQUIRED.get(command, ["source", "new"] if command.startswith("import-") else ["c.yaml"])
    return [command, *words, *NEEDED.get(option, []), f"--{option}", path]


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | None]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("dear")
    monkeypatch.chdir(tmp_path)
    return content(tmp_path)


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_an_output_that_can_never_be_written(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = prepared(tmp_path, monkeypatch)
    effect = EFFECTS[command][option]
    paths = FOLDER_PATHS if effect.writes == "folder" else FILE_PATHS
    first = OUTPUTS.index((command, option))  # two kinds of each option, in turn, because one function checks all
    for name in [[*paths][(first + turn) % len(paths)] for turn in (0, 3)]:
        text = paths[name]
        path = text.format(tmp=tmp_path)
        assert main(line_of(command, option, path)) == 2, name
        captured = capsys.readouterr()
        start = f"ConfigError: {effect.label or f'--{option}'} {str(Path(path))[:200]}: "
        assert captured.out == "" and captured.err.startswith(start) and captured.err.count("\n") == 1, name
        assert "Remedy: " in captured.err and content(tmp_path) == before


@pytest.mark.parametrize("command", EFFECTS)
def test_a_deleted_working_directory(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    words = REQUIRED.get(command, [] if command in ("gallery", "doctor") else ["a"])
    two = command.startswith("import") or command in ("export", "tokenize")
    assert main([command, *words, *(["b"] if two else [])]) == 2
    text = "ConfigError: the working directory is deleted. Remedy: cd to another folder.\n"
    assert capsys.readouterr().err.startswith(text)


READ: dict[str, Callable[[str], list[str]]] = {
    "explain": lambda path: ["explain", path],
    "verify-checkpoint": lambda path: ["verify-checkpoint", path],
    "verify-tokens": lambda path: ["verify-tokens", path],
    "import": lambda path: ["import", path, "new"],
    "export": lambda path: ["export", path, "new"],
    "import-mindformers": lambda path: ["import-mindformers", path, "new.yaml"],
    "import-deepspeed": lambda path: ["import-deepspeed", path, "new.yaml"],
    "import-megatron": lambda path: ["import-megatron", path, "new.yaml"],
    "tokenize": lambda path: ["tokenize", path, "new"],
    "--tokenizer": lambda path: ["tokenize", "file", "new", "--tokenizer", path],
    "--checkpoint": lambda path: ["doctor", "--checkpoint", path],
}
"""What reads a file or a folder that a command line names."""
BAD_INPUTS: dict[str, str] = {
    "missing": "nothing",
    "missing folder": "no/thing",
    "empty": "",
    "a folder": "folder",
    "below a file": "file/x",
    "an empty file": "nil",
    "a broken link": "broken",
    "a link to itself": "loop",
    "a pipe": "pipe",
    "a device": "/dev/zero",
    "too long": "n" * 300,
}


class StillWaiting(BaseException):
    """A command that waits for a pipe, or reads a device without an end."""


@pytest.mark.parametrize("reader", READ)
def test_an_input_that_cannot_be_read(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path, monkeypatch)
    (tmp_path / "nil").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))

    def stop(*_: Any) -> None:
        raise StillWaiting

    old = signal.signal(signal.SIGALRM, stop)
    try:
        for name, path in BAD_INPUTS.items():
            signal.alarm(60)
            assert main(READ[reader](path)) == 2, name
            signal.alarm(0)
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and re.match(r"\w+Error: ", error), (name, error)
            assert "Remedy: " in error or name == "an empty file", (name, error)
            assert (path or ".")[:200] in error, (name, error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert sorted(os.listdir(tmp_path)) == before


READERS: dict[str, Callable[[str], Any]] = {
    "data.tokenizer": load_tokenizer,
    "data.chat_template": load_chat_template,
    "data.source": load_text,
    "--prompts": lambda path: read_prompts(Path(path)),
    "train.init_from": lambda path: restore(path, {}),
}
"""What reads a file or a folder that a key of a configuration names."""


@pytest.mark.parametrize("key", READERS)
def test_a_key_that_names_no_readable_input(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe or a device is not waited for."""
    prepared(tmp_path, monkeypatch)
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, path in BAD_INPUTS.items():
        if name not in ("empty", "an empty file"):
            with pytest.raises(JaxparError, match="Remedy: ") as error:
                READERS[key](path)
            assert exit_code(error.value) == ExitCode.CONFIGURATION or name == "a link to itself", (name, error.value)


BAD_FOLDERS: dict[str, Callable[[Path], Any]] = {
    "a file": lambda tmp: tmp / "file",
    "below a file": lambda tmp: tmp / "file" / "run",
    "below a device": lambda tmp: "/dev/null/x",
    "too long": lambda tmp: tmp / ("n" * 300),
    "an address": lambda tmp: "gs://bucket/run",
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_of_a_run_that_can_never_be_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(tmp_path, monkeypatch)
    folder = str(BAD_FOLDERS[name](tmp_path))
    with raises(ConfigError, "output"):
        OutputFolder(folder)
    with raises(CheckpointError, "checkpoint", "directory"):
        CheckpointManager(folder)
    assert content(tmp_path) == before


def test_a_run_without_permission_to_write_its_output_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("jaxpar.app.train.output_folder.Lock", refuse)
    with raises(ConfigError, "output", "Permission"):
        OutputFolder(str(tmp_path))


def test_two_runs_cannot_share_an_output(tmp_path: Path) -> None:
    with OutputFolder(str(tmp_path)), raises(LaunchError, "in use") as caught:
        OutputFolder(str(tmp_path))
    assert exit_code(caught.value) == ExitCode.RETRYABLE  # the other run may be ending
    with OutputFolder(str(tmp_path)):
        pass


def test_a_kill_releases_the_output(tmp_path: Path) -> None:
    code = (
        "import time\nfrom jaxpar.app.train.output_folder import OutputFolder\n"
        f"with OutputFolder({str(tmp_path)!r}):\n    print('locked', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"locked\n"
        with raises(LaunchError, f"process {run.pid} on"):
            OutputFolder(str(tmp_path))
        run.kill()
    with OutputFolder(str(tmp_path)):
        pass
