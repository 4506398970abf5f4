"""Where in a model a library function was called."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

# Frames of these modules are skipped, so that errors and reports name the line of the model.
_LIBRARIES = re.compile(r"(jaxpar(?!\.models)|jax|flax|functools)(\.|$)")

_LIBRARY_FILES = re.compile(r"/site-packages/|/jaxpar/(?!models/)|/functools\.py$|/contextlib\.py$")


def call_site() -> str:
    """Returns the model code that called the library, as ``Attention.__call__ (layers.py:178)``."""
    frame = sys._getframe()
    while frame.f_back is not None and _LIBRARIES.match(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{short_name(frame.f_code.co_qualname)} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def traced_site(traceback: Any) -> str:
    """Returns the code of a traced equation as :func:`call_site` does, from the traceback of its source information."""
    frames = [] if traceback is None else traceback.frames
    frame = next((f for f in frames if not _LIBRARY_FILES.search(f.file_name)), None)
    if frame is None:
        return "a library"
    return f"{short_name(frame.function_name)} ({os.path.basename(frame.file_name)}:{frame.line_num})"


def short_name(qualified: str) -> str:
    """Returns a function's qualified name without the functions around it; of a lambda, the function around it.

    >>> short_name("Attention.__call__"), short_name("block.<locals>.attend.<locals>.<lambda>")
    ('Attention.__call__', 'attend')
    """
    return next((name for name in reversed(qualified.split(".<locals>.")) if name != "<lambda>"), qualified)
