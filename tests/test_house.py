"""The house rules that a machine can hold: lint, format, types, floors, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxpar").rglob("*.py"))
# Lower floors first; a module imports only from its own floor or from lower ones.
FLOORS = (
    ("contexts", "errors", "simulate", "versions"),
    ("figures", "fixed_order", "names", "texts"),
    ("accelerators", "config", "devices", "schedules", "staging", "store", "torus"),
    ("links", "mesh", "plain", "rules", "topology"),
    ("batch_rows", "exchange", "host", "int8", "launch", "layout", "precision", "together", "waiting", "zero"),
    (
        "arrays",
        "attn",
        "contract",
        "crossing",
        "fusion",
        "linen",
        "moved",
        "nnx",
        "products",
        "quantise",
        "recompute",
        "signs",
        "weights",
        "woven",
    ),
    ("copies", "model", "pipeline", "staged"),
    ("onebit", "optimizers"),
    ("state",),
    ("objective",),
    ("microbatches", "streaming"),
    ("stored",),
    ("ownsums",),
    ("boarding", "evaluated", "inflight", "pieces", "pipelined", "stagewise", "stashing"),
    ("gradients",),
    ("step",),
    ("asynchronous", "checkpoint", "disk"),
    ("inspect",),
    ("infer", "plan"),
    ("testing",),
    ("data", "models"),
    ("train",),
    ("cli",),
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_lint_format_and_types_are_clean(command: tuple[str, ...]) -> None:
    result = run(*command)
    assert result.returncode == 0, result.stdout + result.stderr


def floor(module: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if module in names)


def imports(file: Path) -> Iterator[str]:
    """The jaxpar modules (first part below the package) that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpar."):
            yield (node.module or "").split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxpar":
            yield from (alias.name for alias in node.names if alias.name in sum(FLOORS, ()))


@pytest.mark.parametrize("file", [f for f in SOURCES if f.parent.name != "jaxpar" or f.stem != "__init__"], ids=str)
def test_imports_only_go_down(file: Path) -> None:
    module = file.relative_to(ROOT / "jaxpar").parts[0].removesuffix(".py")
    upward = [m for m in imports(file) if floor(m) > floor(module)]
    assert not upward, f"{file.name} imports from a higher floor: {upward}"


@pytest.mark.parametrize("file", SOURCES, ids=str)
def test_files_stay_small_and_off_private_jax(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= 500, "split it"
    assert "jax._src" not in text


def test_one_module_creates_all_user_contexts() -> None:
    """A user context that is created while jax traces makes the next call compile again: see ``jaxpar/contexts.py``."""
    creators = [
        file.relative_to(ROOT).as_posix() for file in SOURCES if "make_user_context(" in file.read_text("utf-8")
    ]
    assert creators == ["jaxpar/contexts.py"]


def code_lines(file: Path) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    text = file.read_text(encoding="utf-8")
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in docs and line.strip() and not line.strip().startswith("#"))


def test_the_sharding_layer_stays_small() -> None:
    files = [ROOT / "jaxpar" / f"{name}.py" for name in ("mesh", "rules", "layout", "nnx", "linen")]
    sizes = {file.stem: code_lines(file) for file in files}
    # The aim is 400; this is what it has. Beside it stand texts, devices, plain, arrays and names. Lower it with every cut.
    assert sum(sizes.values()) <= 485, sizes
