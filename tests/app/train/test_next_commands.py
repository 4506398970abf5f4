"""The commands after a run can be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from jaxpar.app.config import load_run
from jaxpar.app.train.next_commands import next_commands

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("uv", [False, True])
def test_the_commands_after_the_quickstart(uv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    if uv:
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    settings = ["train.steps=3", "output=out", "rules.embed=[data, model]"]
    generate, explain, check = next_commands(QUICKSTART, settings, load_run(QUICKSTART, settings).config)
    run = [str(QUICKSTART), "--set", "rules.embed=[data, model]"]
    start = ["uv", "run"] if uv else []
    assert shlex.split(generate) == [
        *(*start, "jaxpar", "generate", *run),
        *("--checkpoint", "out/checkpoints", "--prompt", "def "),
    ]
    assert shlex.split(explain) == [*start, "jaxpar", "explain", *run]
    extra = [*start, "--extra", "tpu"] if uv else []
    assert shlex.split(check, comments=True) == [*extra, "jaxpar", "check", *run, "--topology", "v5e:2x4"]


def test_a_model_that_cannot_generate_has_no_such_command(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("model: {factory: 'm:make', loss: 'm:loss'}\ncheckpoint: {}\noutput: out\n")
    assert next_commands(file, [], load_run(file).config)[0].split()[-2:] == ["explain", str(file)]
    file.write_text("model: {family: llama}\noutput: out\n")
    assert len(next_commands(file, [], load_run(file).config)) == 1
