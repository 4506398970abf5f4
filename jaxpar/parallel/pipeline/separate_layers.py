"""Layers that a model keeps apart, as ``nnx.List``, a list, or numbered names such as ``Block_0``, ``Block_1``."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.utils.arrays import describe


def layer_keys(parent: Mapping[Any, Any], name: str) -> tuple[bool, tuple[Any, ...]]:
    """Returns where separate layers are.

    Args:
      parent: a mapping, or a module's attributes.
      name: of a list of layers, or the part of numbered names before the number.

    Returns:
      Whether the layers are inside ``parent[name]``, and their keys there, or else in ``parent``, in order. There are
      no keys if ``parent[name]`` is one stack, or if there are no layers of this name.

    >>> layer_keys({"Block_0": {}, "Block_10": {}, "Block_2": {}, "Dense_0": {}}, "Block")
    (False, ('Block_0', 'Block_2', 'Block_10'))
    >>> layer_keys({"blocks": [{}, {}]}, "blocks")
    (True, (0, 1))
    """
    if name in parent:
        inner = parent[name]
        if isinstance(inner, list | tuple):
            return True, tuple(range(len(inner)))
        if not isinstance(inner, Mapping) or not inner or not all(str(key).isdigit() for key in inner):
            return True, ()
        return True, tuple(sorted(inner, key=lambda key: int(key)))
    numbered = [(match, key) for key in parent if (match := re.fullmatch(rf"{re.escape(name)}_?(\d+)", str(key)))]
    return False, tuple(key for _, key in sorted((int(match[1]), key) for match, key in numbered))


def separate_layers(parent: Any, name: str) -> list[Any] | None:
    """Returns the layers of a model below ``parent``, or ``None`` if it has none of this name, or one stack of them.

    Args:
      parent: a dict or an NNX module.
      name: as for :func:`layer_keys`.
    """
    nnx = sys.modules.get("flax.nnx")
    entries = parent if isinstance(parent, Mapping) else vars(parent)
    inner = entries.get(name)
    if nnx is not None and isinstance(inner, nnx.List):
        return list(inner)
    if nnx is not None and isinstance(inner, nnx.Dict):
        entries = {name: {key: value for key, value in vars(inner).items() if not key.startswith("_")}}
    inside, keys = layer_keys(entries, name)
    container: Any = entries[name] if inside else entries
    return [container[key] for key in keys] or None


def stacked_arrays(layers: Sequence[Any], where: str) -> Any:
    """Returns one tree whose arrays are the layers' arrays, stacked along a first dim.

    Args:
      layers: trees of arrays, or of ``ShapeDtypeStruct``.
      where: the path of the layers, for errors.

    Raises:
      ModelError: the layers differ in their names, shapes or dtypes.
    """
    first = _described(layers[0])
    for number, layer in enumerate(layers):
        found = _described(layer)
        if differences := sorted(set(first.items()) ^ set(found.items())):
            path = differences[0][0]
            raise ModelError(
                f"{where}: layer {number} has {found.get(path, 'nothing')} at {path or 'its root'}, but layer 0 has "
                f"{first.get(path, 'nothing')}. A stack requires layers of equal structure. Remedy: keep the layers "
                "that differ under another name, and run them in PipelineLoss(embed=...) or head."
            )
    return jax.tree.map(lambda *xs: _stack(xs), *layers)


def check_same_code(layers: Sequence[Any], where: str) -> None:
    """Raises if NNX modules differ in anything but their arrays, as all of them run by the code of the first.

    Raises:
      ModelError: the first difference.
    """
    for number, layer in enumerate(layers[1:], 1):
        if difference := _difference(layers[0], layer, ()):
            path, first, other = difference
            raise ModelError(
                f"{where}: layer {number} has {'/'.join(path)} = {other!r}, but layer 0 has {first!r}. A pipeline runs "
                "all layers by the code of layer 0. Remedy: build all layers alike; a number that differs can be an "
                "nnx.Param, or an array of PipelineLoss(layer_inputs=...)."
            )


def _described(layer: Any) -> dict[str, str]:
    name = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/")
    return {name(keys): describe(x) for keys, x in jax.tree_util.tree_leaves_with_path(layer)}


def _stack(xs: Sequence[Any]) -> Any:
    if isinstance(xs[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(xs), *xs[0].shape), xs[0].dtype)
    return jnp.stack(xs)


def _difference(a: Any, b: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], Any, Any] | None:
    """Returns the path and both values of the first difference of two modules, other than arrays."""
    from flax import nnx

    if isinstance(a, nnx.Variable):
        return None if type(a) is type(b) else (path, type(a).__name__, type(b).__name__)
    if isinstance(a, nnx.Module) and type(a) is type(b):
        own, others = ({k: v for k, v in vars(x).items() if not k.startswith("_")} for x in (a, b))
        for name in sorted({**own, **others}, key=lambda name: callable(own.get(name))):  # numbers say more
            if found := _difference(own.get(name), others.get(name), (*path, name)):
                return found
        return None
    return None if _equal(a, b) else (path, a, b)


def _equal(a: Any, b: Any) -> bool:
    """Whether two static values are equal; for functions of the same line, whether they closed over equal values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, FunctionType):
        contents = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b))
        code: CodeType = a.__code__
        return code == b.__code__ and a.__defaults__ == b.__defaults__ and all(map(_equal, *contents))
    if isinstance(a, functools.partial):
        return all(map(_equal, (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return isinstance(a, jax.Array) or bool(a == b)
