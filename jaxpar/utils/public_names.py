"""Public names of a package that load on first use. Imports the standard library only."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def public_names(
    package: str, file: str, loaded: Callable[[], None] = lambda: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose public names load on first use.

    The package lists its names once, as imports below ``if TYPE_CHECKING:``, where type checkers and editors read them;
    this function reads the same lines. The ``else`` branch assigns the result, so that for a type checker the package
    has no ``__getattr__``, and a name that is not listed is an error.

    Args:
      package, file: the package's ``__name__`` and ``__file__``.
      loaded: called after a name was loaded.
    """
    homes = _homes(Path(file))

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(home if home != package else f"{package}.{name}")
        value = getattr(module, name) if home != package else module
        setattr(sys.modules[package], name, value)
        loaded()
        return value

    return get, lambda: [*homes], [*homes]


def _homes(file: Path) -> dict[str, str]:
    """Public name → the module it is imported from, below ``if TYPE_CHECKING:``."""
    blocks = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
