"""The documentation site builds without a warning, its generated pages are current, and no page is unreachable."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, look_at

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("index", "start", "guides/which_parallelism", "guides/own_model", "reference/configuration",
         "reference/api/jaxpar", "notebooks/03_pipelines", "measured/first_hour")  # fmt: skip
"""Pages of each kind, which a browser shows at the widths of a phone and a desktop."""


def build(builder: str, source: Path, target: Path, *, config: Path = DOCS) -> subprocess.CompletedProcess[str]:
    """Run Sphinx; a warning is an error."""
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", builder, "-c", config, source, target]
    return subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True, timeout=900)


def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.slow
def test_every_page_is_read_and_reached_without_a_warning(tmp_path: Path) -> None:
    """Links, docstrings and tables of contents are resolved; only the writing of HTML is left to the slow test."""
    done = build("dummy", DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_that_no_table_of_contents_has_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_nb"]\nroot_doc = "index"\n', encoding="utf-8")
    (source / "index.md").write_text("# One\n", encoding="utf-8")
    (source / "other.md").write_text("# Two\n", encoding="utf-8")
    done = build("dummy", source, tmp_path / "out", config=source)
    assert done.returncode == 1 and "other.md: WARNING: document isn't included in any toctree" in done.stderr


def test_generated_pages_are_current(pytestconfig: pytest.Config) -> None:
    pages = generator()["pages"]()
    if pytestconfig.getoption("--update-golden"):
        for file, text in pages.items():
            file.write_text(text, encoding="utf-8")
    old = [file.name for file, text in pages.items() if file.read_text(encoding="utf-8") != text]
    assert old == [], "uv run python docs/generate.py"
    assert {file.name for file in (DOCS / "reference" / "api").glob("*.md")} == {
        file.name for file in pages if file.parent.name == "api"
    }


def test_the_address_of_the_repository_is_written_once() -> None:
    """In pyproject.toml; the site takes it from there, and docs/generate.py writes it into the notebooks."""
    namespace = generator()
    home = namespace["PROJECT"]["urls"]["Repository"]
    kinds = (".md", ".py", ".toml", ".yaml", ".sh")
    folders = [ROOT / name for name in ("jaxpar", "docs", "configs", "tests", "benchmarks")]
    files = [*ROOT.glob("*"), *(file for folder in folders for file in folder.rglob("*") if file.suffix in kinds)]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.suffix in kinds}
    assert [file.name for file, text in texts.items() if home in text] == ["pyproject.toml"]
    moved = namespace["notebooks"]("https://github.com/somebody/else")
    assert len(moved) == 22 and all("github.com/somebody/else" in text and home not in text for text in moved.values())
    assert all("colab.research.google.com/github/somebody/else/blob/main/notebooks/" in text for text in moved.values())


def test_every_public_module_has_a_page() -> None:
    import jaxpar as jp

    modules = {name for name in dir(jp) if inspect.ismodule(getattr(jp, name))} - {"errors"}
    assert {file.stem for file in (DOCS / "reference" / "api").glob("*.md")} == modules | {"jaxpar"}


def test_generated_pages_hold_every_key_command_and_error() -> None:
    from jaxpar import errors
    from jaxpar.app.cli import COMMANDS

    text = {
        name: (DOCS / "reference" / f"{name}.md").read_text("utf-8") for name in ("configuration", "commands", "errors")
    }
    keys = re.findall(r"^## `(.+)`", text["configuration"], re.MULTILINE)
    assert {"data", "optimizer.prune", "parallel.pipeline", "checkpoint.best", "train.spike"} <= set(keys)
    assert (
        "| `max_rollbacks` | int | `3` | the run stops with an error when it would roll back more often. |"
        in (text["configuration"])
    )
    assert re.findall(r"^## `jaxpar (.+)`", text["commands"], re.MULTILINE) == list(COMMANDS)
    assert {name for name in vars(errors) if name.endswith("Error")} == set(
        re.findall(r"^\| `(\w+Error)` ", text["errors"], re.MULTILINE)
    )


@pytest.mark.slow
def test_the_site_is_written(tmp_path: Path) -> None:
    done = build("html", DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Ten minutes" in (tmp_path / "start.html").read_text(encoding="utf-8")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert (tmp_path / "notebooks" / f"{notebook.stem}.html").is_file()
    if BROWSER is not None:
        for page in PAGES:
            for width in (390, 1280):
                seen = look_at(tmp_path / f"{page}.html", width, tmp_path)
                failed = [line for line in seen.console if "pydata-sphinx-theme.js" not in line]  # it names its mode
                assert failed == [] and seen.content <= seen.window == width, (page, seen)
