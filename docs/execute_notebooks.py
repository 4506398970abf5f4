"""Execute the notebooks and store them with their outputs, so that their pictures can be seen without running them.

    uv run python docs/execute_notebooks.py              # all of them
    uv run python docs/execute_notebooks.py 05 07        # those whose names begin so
    uv run python docs/execute_notebooks.py --text 05    # only new text: the code is as it was, and so are the outputs

The text of a notebook is in notebooks/NAME.py; this makes notebooks/NAME.ipynb from it. ``tests/test_notebooks.py``
fails while a notebook is not current.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}


def kernel() -> AsyncKernelManager:
    """The ``python3`` kernel of the running interpreter, whatever kernels the user has installed."""
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def execute(notebook: Any) -> Any:
    """Run a notebook from top to bottom in a fresh kernel; a cell that raises is a ``CellExecutionError``."""
    client = NotebookClient(notebook, km=kernel(), timeout=300, resources={"metadata": {"path": str(FOLDER)}})
    # Simulated devices of the caller must not reach the kernel: the notebook sets up its own.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return client.execute(env={**env, "JAX_PLATFORMS": "cpu"}, cleanup_kc=True)


def clean(notebook: Any) -> Any:
    """The notebook without what is of the author's computer: times, and outputs on standard error."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "lines_to_next_cell"}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("data", {}).pop("image/svg+xml", None)
    return notebook


def with_old_outputs(notebook: Any, file: Path) -> Any:
    """The notebook with the outputs that its file has, if the code of all cells is the same."""
    new = [cell for cell in notebook.cells if cell.cell_type == "code"]
    old = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    if [cell.source for cell in new] != [cell.source for cell in old]:
        raise SystemExit(f"{file.name}: its code has changed. Remedy: leave --text out.")
    for cell, before in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return notebook


def main(words: list[str]) -> None:
    """Executes the notebooks whose names begin with one of the words, or all."""
    starts = tuple(word for word in words if word != "--text")
    for script in sorted(FOLDER.glob("*.py")):
        if starts and not script.stem.startswith(starts):
            continue
        began = time.perf_counter()
        notebook, file = jupytext.read(script), script.with_suffix(".ipynb")
        notebook = clean(with_old_outputs(notebook, file) if "--text" in words else execute(notebook))
        nbformat.write(notebook, file)
        print(f"{file.name}: {time.perf_counter() - began:.0f} s, {file.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
