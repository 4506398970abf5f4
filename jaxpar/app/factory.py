"""Models that a configuration names: ``model: {factory: "my_module:make_model", loss: "my_module:loss", args: {...}}``.

A configuration runs no code that it does not name. The module is looked up in the working directory, then on Python's
path; what it imports itself is looked up on the path first, so that a file of the working directory replaces no module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax

import jaxpar as jp
from jaxpar.errors import ConfigError, JaxparError, did_you_mean
from jaxpar.parallel.attention.context import Context
from jaxpar.training.model import build_shapes


@dataclass(frozen=True)
class FactoryConfig:
    """The keys of ``model`` for a model of the user's own.

    Attributes:
      factory: ``module:function``; called as ``function(key, **args)``, it returns what ``make_model`` returns.
      loss: ``module:function`` of the model and a batch with ``tokens`` and ``targets``, and optionally ``key``.
      args: keyword arguments of the factory.
    """

    factory: str
    loss: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FactoryModel:
    """A model of the user's own, with what the commands ask of a built-in model's configuration.

    Attributes:
      name: ``module:function`` of its factory.
      make_model, loss_fn: as :func:`jaxpar.init` and :func:`jaxpar.train_step` take them.
      params: the number of its parameters.
      dtype: the dtypes of its parameters.
      vocab: its vocabulary, which is not known.
      remat, context: the defaults, because the model itself decides.
    """

    name: str
    make_model: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    params: int
    dtype: str
    vocab: int | None = None
    remat: str = "none"
    context: Context = field(default_factory=Context)

    def flops_per_token(self, seq: int) -> float:
        """Returns an estimate: 6 FLOPs for each parameter and token, without those of attention."""
        return 6.0 * self.params


def factory_model(config: FactoryConfig, batch: Mapping[str, jax.ShapeDtypeStruct]) -> FactoryModel:
    """Returns the model that a configuration names. If it names none of its dims, they are found.

    Args:
      config: the keys of ``model``.
      batch: the shapes of a batch, from which :func:`jaxpar.annotate` finds names.

    Raises:
      ConfigError: there is no such module or function, the module cannot be imported, or ``args`` do not fit.
      ModelError: the factory returns no model.
    """
    factory, loss_fn = _load(config.factory, "model.factory"), _load(config.loss, "model.loss")
    make_model: Callable[[jax.Array], Any] = functools.partial(factory, **config.args)
    try:
        parts = build_shapes(make_model)
    except JaxparError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model: {config.factory} fails with args {config.args}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]} ({_place(error)}). Remedy: it is called as function(key, **args)."
        ) from error
    leaves = jax.tree.leaves(parts.params)
    if not any(path[0] == "params" for path, _ in parts.dims):
        found = jp.annotate(make_model, loss_fn, dict(batch))
        make_model, loss_fn = found.make_model, found.loss_fn
    dtype = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    return FactoryModel(config.factory, make_model, loss_fn, sum(leaf.size for leaf in leaves), dtype)


def _place(error: BaseException) -> str:
    """The last line of code outside of installed packages that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    library = os.path.dirname(jp.__file__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(library)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "called by jaxpar"


def _load(reference: str, key: str) -> Callable[..., Any]:
    """The function ``module:function``."""
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
