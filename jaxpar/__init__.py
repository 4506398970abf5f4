"""jaxpar: explained and proven parallelism for Flax models.

``__init__.pyi`` lists the public names, once, for editors, type checkers and the interpreter. They load on first use, so
``import jaxpar`` imports no jax. Where jax is already loaded, it creates jaxpar's jax contexts, so that none is created later
while jax traces (:mod:`jaxpar.utils.contexts`).

>>> import jaxpar as jp
>>> jp.MeshSpec(data=-1, model=2).sizes(8)["data"]
4
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    value = _load(name)
    _create_contexts()
    return value


def _create_contexts() -> None:
    if "jax" in sys.modules:
        importlib.import_module("jaxpar.utils.contexts")


_create_contexts()
