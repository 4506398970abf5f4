"""Packages that only an extra of jaxpar installs; they are imported when they are needed."""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import suppress
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


def import_name(module: str, name: str, extra: str, purpose: str) -> Any:
    """Returns one name of a module of an optional package, whose versions do not all have it.

    Args:
      module, extra, purpose: as for :func:`import_extra`.
      name: of the module, such as ``EventsWriter``.

    Raises:
      MissingExtraError: the package is not installed, or its version has no such name.
      ImportError: as :func:`import_extra`.
    """
    found = getattr(import_extra(module, extra, purpose), name, None)
    if found is not None:
        return found
    installed = module.partition(".")[0]
    with suppress(importlib.metadata.PackageNotFoundError):
        installed += f" {importlib.metadata.version(installed)}"
    raise MissingExtraError(
        f"{purpose} needs {module}.{name}, which the installed {installed} does not have. Remedy: pip install "
        f"--upgrade 'jaxpar[{extra}]'."
    )
