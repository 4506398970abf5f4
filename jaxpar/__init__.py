"""jaxpar: explained and proven parallelism for Flax models.

``__init__.pyi`` lists the public names, once, for editors, type checkers and the interpreter. They load on first use,
so ``import jaxpar`` imports no jax. If jax is already loaded, it creates jaxpar's jax contexts, so that none is created
while jax traces (:mod:`jaxpar.utils.contexts`).

>>> import jaxpar as jp
>>> jp.MeshSpec(data=-1, model=2).sizes(8)["data"]
4
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Public name → the module that holds it, as the stub's relative imports say; ``""`` for a submodule.

    The standard library alone: supervisors and compile workers import this package without the others.
    """
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = [*_HOMES]  # noqa: PLE0604 (the names are strings)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    home = _HOMES[name]
    value = (
        getattr(importlib.import_module(f"jaxpar.{home}"), name) if home else importlib.import_module(f"jaxpar.{name}")
    )
    globals()[name] = value
    _create_contexts()
    return value


def __dir__() -> list[str]:
    return __all__


def _create_contexts() -> None:
    if "jax" in sys.modules:
        importlib.import_module("jaxpar.utils.contexts")


_create_contexts()
