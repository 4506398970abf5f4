"""Every notebook runs in a fresh kernel, equals its paired script, and is stored with its outputs."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
TOOL = runpy.run_path(str(ROOT / "docs" / "execute_notebooks.py"))
import jupytext

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def stored(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outlines(notebook: Any) -> list[tuple[list[list[str]], str]]:
    """Of each code cell the kinds of its outputs, and what it prints with every number as ``#``; no pixels."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds = [sorted(output.data) for output in cell.outputs if "data" in output]
            printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
            printed = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{6,}\b", "#", printed)  # checksums
            found.append((kinds, re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?|\bnan\b", "#", re.sub(r"\s+", " ", printed))))
    return found


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 11


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_its_outputs_are_current(path: Path) -> None:
    notebook = TOOL["execute"](jupytext.read(path.with_suffix(".py")))
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert not [text for text in printed if "Warning" in text]
    assert outlines(TOOL["clean"](notebook)) == outlines(stored(path)), "uv run python docs/execute_notebooks.py"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_pictures(path: Path) -> None:
    notebook = stored(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < 500_000


def test_the_kernel_is_the_running_interpreter() -> None:
    spec = TOOL["kernel"]().kernel_spec
    assert spec is not None and spec.argv[0] == sys.executable


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_script_holds_the_same_cells(path: Path) -> None:
    assert cells(jupytext.read(path)) == cells(jupytext.read(path.with_suffix(".py")))


def test_every_script_has_its_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_in_colab_and_has_exercises(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = project["urls"]["Repository"]
    first, text = stored(path).cells[0].source, "".join(cell.source for cell in stored(path).cells)
    link = home.replace("https://github.com", "https://colab.research.google.com/github")
    assert f"({link}/blob/main/notebooks/{path.name})" in first and f"git clone -q {home}" in first
    assert "## Exercises" in text and "**Answers.**" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_in_it_is_of_the_authors_computer(path: Path) -> None:
    notebook = stored(path)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"lines_to_next_cell"}  # jupytext's key for blank lines in the script
    assert notebook.metadata == TOOL["METADATA"]
    assert not re.search(r"(?<![\w.:/])/(home|root|Users|tmp|work)/", path.read_text(encoding="utf-8"))
