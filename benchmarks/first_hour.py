"""The first hour with the project, as a person sees it: a fresh clone, a terminal of 80 × 24, each command's output.

    uv run --with pyte python benchmarks/first_hour.py

Clones this repository's last commit into an empty folder and runs ``COMMANDS`` there in turn, each in a pseudo-terminal
with 80 columns and 24 rows, without an accelerator. Writes ``docs/measured/first_hour.md``: what stood on the screen,
with the exit status and the time of each command, and the last screens as pictures in ``docs/pictures`` (these need
Chromium). Exit status 1 if a command ends otherwise than it should.
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.paths import ROOT

COLUMNS, ROWS = 80, 24
PAGE = ROOT / "docs" / "measured" / "first_hour.md"
PICTURES = ROOT / "docs" / "pictures"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
COLORS = {"default": "#d8d8d8", "black": "#555", "red": "#f07178", "green": "#9ccc65", "brown": "#ffcb6b"}
COLORS |= {"blue": "#82aaff", "magenta": "#c792ea", "cyan": "#80cbc4", "white": "#ffffff"}


@dataclass(frozen=True)
class Command:
    """A command line, why a person would run it, its exit status, and the name of a picture of its last screen."""

    line: str
    why: str
    status: int = 0
    picture: str = ""


@dataclass(frozen=True)
class Seen:
    """What a command left: all lines, the last screen as HTML, exit status, seconds."""

    lines: list[str]
    screen: str
    status: int
    seconds: float


QUICKSTART = "configs/quickstart.yaml"
COMMANDS = (
    Command("pip install uv && uv run jaxpar --help", "What is there? This also installs the environment."),
    Command(f"uv run jaxpar train {QUICKSTART}", "README's first command.", picture="train"),
    Command(
        f"uv run jaxpar generate {QUICKSTART} --checkpoint runs/quickstart/checkpoints --prompt 'def ' "
        "--max-new-tokens 60",
        "The first of the commands that the run proposes.",
    ),
    Command(f"uv run jaxpar explain {QUICKSTART}", "Where is every tensor, and why?", picture="explain"),
    Command(
        f"uv run --extra tpu jaxpar check {QUICKSTART} --topology v5e:2x4",
        "Compiled by the TPU compiler, which is installed first.",
        picture="check",
    ),
    Command(f"uv run jaxpar check {QUICKSTART} --set mesh.model=5 --devices 8", "A mistake.", status=2),
    Command("uv run jaxpar trian configs/quickstart.yaml", "A slip of the fingers.", status=2),
    Command(
        f"uv run jaxpar verify {QUICKSTART} --set layout=layouts/tp.yaml --steps 2",
        "Another layout, proven on one device.",
    ),
    Command("uv run jaxpar explain configs/llama3_1_70b_seed.yaml --devices 64", "A large one, on this machine."),
    Command("uv run python my_program.py", "README's program, saved to a file."),
    Command("uv run jupyter execute notebooks/04_your_script.ipynb", "A notebook: a script for one device, on eight."),
)


def run(command: Command, folder: Path, environment: dict[str, str]) -> Seen:
    """Runs a command in a pseudo-terminal and returns what a person sees."""
    import pyte

    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=100_000, ratio=1.0)
    stream = pyte.ByteStream(screen)
    began = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", f"stty cols {COLUMNS} rows {ROWS}; {command.line}"], environment)
    while True:
        if select.select([terminal], [], [], 1)[0]:
            try:
                received = os.read(terminal, 65536)
            except OSError:  # Linux reports the end of a pseudo-terminal in this way
                break
            if not received:
                break
            stream.feed(received)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(terminal)
    above = ["".join(row[x].data for x in range(COLUMNS)).rstrip() for row in screen.history.top]
    return Seen([*above, *(line.rstrip() for line in screen.display)], drawn(screen), status, time.monotonic() - began)


def drawn(screen: Any) -> str:
    """Returns the rows of a screen as HTML, with their colors."""
    rows = []
    for y in range(ROWS):
        cells = [screen.buffer[y][x] for x in range(COLUMNS)]
        rows.append("".join(cell_html(cell) for cell in cells))
    return "\n".join(rows)


def cell_html(cell: Any) -> str:
    color = COLORS.get(cell.fg, f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else COLORS["default"])
    style = f"color:{color}" + (";font-weight:bold" if cell.bold else "")
    return f'<span style="{style}">{html.escape(cell.data)}</span>'


def save_picture(name: str, line: str, screen: str) -> None:
    """Writes the last screen of a command as ``first_hour_NAME.png``."""
    if BROWSER is None:
        raise SystemExit("the pictures need Chromium. Remedy: install it, or give --no-pictures.")
    style = "margin:0;padding:12px;background:#1e1e1e;color:#d8d8d8;font:14px/17px 'DejaVu Sans Mono',monospace"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        body = f'<body style="{style}"><pre style="margin:0;font:inherit">{screen}</pre></body>'
        page.write_text(f'<!doctype html><meta charset="utf-8">{body}', encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=700,432"]
        target = PICTURES / f"first_hour_{name}.png"
        subprocess.run([BROWSER, *options, f"--screenshot={target}", str(page)], check=True, capture_output=True)
    print(f"{target.relative_to(ROOT)}: {line}")


def readme_program() -> str:
    """Returns README's program."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def section(command: Command, seen: Seen) -> str:
    """Returns a command, its time and what it printed, as a section of the page."""
    installed = [i for i, line in enumerate(seen.lines) if line.startswith("Installed ")]
    own = seen.lines[installed[-1] + 1 if installed else 0 :]  # without what pip and uv say of this machine
    lines = "\n".join(own).strip("\n")
    status = f", exit status {seen.status}" if seen.status else ""
    picture = f"\n![The last screen](../pictures/first_hour_{command.picture}.png)\n" if command.picture else ""
    return f"## {command.why}\n\n{spent(seen.seconds)}{status}.\n{picture}\n```text\n$ {command.line}\n{lines}\n```\n"


def spent(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def main() -> int:
    """Writes the page; returns 1 if a command did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-pictures", action="store_true", help="write the page only")
    pictures = not parser.parse_args().no_pictures
    environment = {**os.environ, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu", "COLUMNS": str(COLUMNS)}
    for name in ("VIRTUAL_ENV", "UV_RUN_RECURSION_DEPTH", "PYTHONPATH"):
        environment.pop(name, None)
    sections, missed, total = [], 0, 0.0
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "jaxpar"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        (folder / "my_program.py").write_text(readme_program(), encoding="utf-8")
        for command in COMMANDS:
            seen = run(command, folder, environment)
            print(f"{spent(seen.seconds):>12}  status {seen.status}  {command.line}", flush=True)
            total += seen.seconds
            if seen.status != command.status:
                print("\n".join(seen.lines[-ROWS:]))
                missed = 1
            if command.picture and pictures:
                save_picture(command.picture, command.line, seen.screen)
            text = section(command, seen).replace(str(folder), "~/jaxpar")
            sections.append(text)
    head = f"""# The first hour

A fresh clone of commit {commit.stdout.strip()}, a machine with {os.cpu_count()} CPU cores and no accelerator, packages
in uv's cache, a terminal of {COLUMNS} × {ROWS}. Each command's whole output as it stood on the screen, without that of
pip and uv, and the time that it took; {spent(total)} in all.
Written by `uv run --with pyte python benchmarks/first_hour.py`.
"""
    PAGE.write_text("\n".join([head, *sections]), encoding="utf-8")
    return missed


if __name__ == "__main__":
    sys.exit(main())
