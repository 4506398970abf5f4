"""Functions that a configuration names: modules that do not import, and functions that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_texts import raises

from jaxpar.app.user_code import load_function
from jaxpar.errors import ConfigError

MODULES = {
    "user_whole": "WIDTH = 3\ndef make_model(key): return key",
    "user_helper_missing": "import user_helper_that_is_not_there",
    "user_broken": "raise RuntimeError('no licence')",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("user_whole", "'user_whole'"),
        ("user_whole:make_modle", "'make_modle'"),
        ("user_whole:WIDTH", "'WIDTH'"),
        ("user_helper_missing:f", "user_helper_that_is_not_there"),
        ("user_broken:f", "model.loss: user_broken"),
        ("user_nowhere:f", "'user_nowhere'"),
    ],
)
def test_functions_that_cannot_be_loaded(reference: str, name: str, tmp_path: Path) -> None:
    """Again after it failed: a module that was imported halfway is forgotten."""
    for _ in range(2):
        with raises(ConfigError, name):
            load_function(reference, "model.loss")


def test_a_function_of_the_working_directory_is_found() -> None:
    assert load_function("user_whole:make_model", "model.factory")(5) == 5
