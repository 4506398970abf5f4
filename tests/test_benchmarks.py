"""The pages of the benchmarks name every command, and no command that does not exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TOPICS = sorted(page.parent.name for page in BENCHMARKS.glob("*/README.md"))


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_names_the_files_of_its_folder(topic: str) -> None:
    text = (BENCHMARKS / topic / "README.md").read_text(encoding="utf-8")
    files = [file for file in (BENCHMARKS / topic).iterdir() if file.suffix in (".py", ".cc")]
    assert files and [file.name for file in files if file.name not in text] == []
    commands = re.findall(r"python (benchmarks/[\w/]+\.py)", text)
    assert commands and [command for command in commands if not (BENCHMARKS.parent / command).exists()] == []


def test_the_first_page_lists_the_folders() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\w+)/README\.md\)", text) == TOPICS


def test_no_file_hides_a_package() -> None:
    """Python puts a command's folder first on the path, so a file there is imported instead of a package of its
    name."""
    names = {file.stem for file in BENCHMARKS.glob("*/*.py")}
    outside = {"maxtext", "ringattention", "atheris"}  # installed in other environments
    assert sorted(name for name in names if name in outside or importlib.util.find_spec(name) is not None) == []
