"""The README's program runs, CI runs its test command, and its paths exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_program_trains() -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert program is not None
    names: dict[str, object] = {"__name__": "readme"}
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        exec(program[1], names)  # noqa: S102 (our own README)
    assert "params/up/kernel" in screen.getvalue()
    x = np.ones((8, 64), np.float32)
    _, metrics = names["step"](names["state"], {"x": x, "y": x})  # type: ignore[operator]
    assert np.isfinite(metrics["loss"])


def test_ci_runs_exactly_its_test_command() -> None:
    commands = re.findall(r"^(pip install uv && uv run .*?)(?: +#.*)?$", README, re.MULTILINE)
    assert len(commands) == 2 and commands[1] == "pip install uv && uv run pytest"
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[1]
    assert (ROOT / commands[0].split()[-1]).is_file()


def test_its_links_and_folders_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README) + ["configs/layouts/", "notebooks/01_layouts.ipynb"]
    assert links and all((ROOT / link).exists() for link in links)
