"""Functions of the user's own that a configuration names as ``my_module:function``.

A configuration runs no code that it does not name. The module is looked up in the working directory, then on Python's
path; what it imports itself is looked up on the path first, so that a file of the working directory replaces no module.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jaxpar as jp
from jaxpar.errors import ConfigError, JaxparError, did_you_mean


def _place_of(error: BaseException) -> str:
    """Returns the last line of code outside of installed packages that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    library = os.path.dirname(jp.__file__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(library)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "called by jaxpar"


@contextmanager
def failing_as(what: str, call: str) -> Iterator[None]:
    """Turns an error of the user's code into a ConfigError that says where it was raised.

    Args:
      what: the beginning of its text, which says what fails.
      call: how the code is called.
    """
    try:
        yield
    except JaxparError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"{what}: {type(error).__name__}: {first} ({_place_of(error)}). Remedy: it is called as {call}."
        ) from error


def load_function(reference: str, key: str) -> Callable[..., Any]:
    """Returns the function ``module:function``.

    Args:
      reference: the text of the configuration.
      key: the configuration's key, for errors.

    Raises:
      ConfigError: there is no such module or function, or the module cannot be imported.
    """
    module_name, _, name = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), name)):
        raise ConfigError(f"{key} must be module:function, got {reference!r}. Remedy: such as my_module:make_model.")
    module = _import(module_name, key)
    function = getattr(module, name, None)
    if not callable(function):
        near = did_you_mean(name, [other for other in vars(module) if callable(getattr(module, other))])
        raise ConfigError(f"{key}: {module_name} ({module.__file__}) has no function {name!r}.{near}")
    return function


def _import(name: str, key: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, for what the module imports itself
    top = name.partition(".")[0]
    try:
        if top not in sys.modules:
            own = importlib.machinery.PathFinder.find_spec(top, [here])
            if own is not None and own.loader is not None:
                module = importlib.util.module_from_spec(own)
                sys.modules[top] = module
                try:
                    own.loader.exec_module(module)
                except BaseException:
                    del sys.modules[top]
                    raise
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, top):
            raise ConfigError(f"{key}: {name} imports {error.name}, which is not installed.") from error
        raise ConfigError(
            f"{key}: there is no module {name!r} in {here} or on Python's path. Remedy: run in the folder of "
            f"{top}.py, or install it."
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}: {name} cannot be imported: {type(error).__name__}: {error}") from error
