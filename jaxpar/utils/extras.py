"""Packages that only an extra of jaxpar installs; they are imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from jaxpar.errors import MissingExtraError


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Returns an imported module of an optional package.

    Args:
      module: its name, such as ``matplotlib.figure``.
      extra: the extra of jaxpar that installs the package.
      purpose: what needs it; the text of the error begins with it.

    Raises:
      MissingExtraError: the package is not installed.
      ImportError: it is installed but cannot be imported, for example because one of its own dependencies is missing.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package {package!r}, which is not installed. Remedy: pip install 'jaxpar[{extra}]'."
        ) from error
