"""The README's program runs, CI runs its test command, and its paths exist."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def program(page: str) -> str:
    """The first Python block of a page."""
    found = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def run(page: str) -> tuple[dict[str, Any], str]:
    """The names that the program of a page defines, and what it prints."""
    names: dict[str, Any] = {"__name__": "page"}
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        exec(program(page), names)  # noqa: S102 (our own page)
    return names, screen.getvalue()


def test_its_program_trains_on_eight_devices() -> None:
    names, printed = run("README.md")
    assert "params/layers/0/kernel" in printed and np.isfinite(names["metrics"]["loss"])
    assert names["layout"].sizes["data"] == 4 and names["layout"].sizes["model"] == 2


def test_its_program_simulates_its_devices_on_a_machine_with_one() -> None:
    """A new process, in which jax would see one device; its training is that of the test before."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    lines = program("README.md").partition("state = jp.init(")[0] + "\nprint('devices', layout.mesh.devices.size)"
    done = subprocess.run([sys.executable, "-c", lines], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "devices 8"


def test_its_program_is_short() -> None:
    assert len([line for line in program("README.md").splitlines() if line.strip()]) <= 15


def test_ci_runs_exactly_its_test_command() -> None:
    commands = re.findall(r"^(pip install uv && uv run .*?)(?: +#.*)?$", README, re.MULTILINE)
    assert len(commands) == 2 and commands[1] == "pip install uv && uv run pytest"
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[1]
    assert (ROOT / commands[0].split()[-1]).is_file()


def test_its_links_and_folders_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert "docs/pictures/overview.png" in links and [link for link in links if not (ROOT / link).exists()] == []
