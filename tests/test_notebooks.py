"""Every notebook runs from top to bottom in a fresh kernel and equals its paired script."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

# Jupyter reads this setting at import, and warns if it is missing.
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def kernel() -> AsyncKernelManager:
    """The ``python3`` kernel of the interpreter that runs this test, whatever kernels the user has installed."""
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def run(notebook: Any) -> Any:
    """Execute the notebook; a cell that raises is a ``CellExecutionError``."""
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, km=kernel(), timeout=300, resources=resources)
    # The test's own simulated devices must not reach the kernel: the notebook sets up its own.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return client.execute(env={**env, "JAX_PLATFORMS": "cpu"}, cleanup_kc=True)


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    notebook = run(nbformat.read(path, as_version=4))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    printed = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not [text for text in printed if "Warning" in text]


def test_the_kernel_is_the_running_interpreter() -> None:
    spec = kernel().kernel_spec
    assert spec is not None and spec.argv[0] == sys.executable


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_script_holds_the_same_cells(path: Path) -> None:
    assert cells(jupytext.read(path)) == cells(jupytext.read(path.with_suffix(".py")))


def test_every_script_has_its_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_bare(path: Path) -> None:
    """No outputs, no execution counts, and no metadata from the author's computer."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert set(cell.metadata) <= {"lines_to_next_cell"}  # jupytext's key for blank lines in the script
    assert notebook.metadata == {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    assert not re.search(r"/(home|root|Users|tmp)/", path.read_text(encoding="utf-8"))
