"""Weights of a pipeline's layers that are laid side by side before its ticks, and their gradients taken apart behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpar.errors import ModelError, did_you_mean
from jaxpar.layout import Layout
from jaxpar.model import show, to_path
from jaxpar.precision import INT8, Precision
from jaxpar.rules import Axes
from jaxpar.together import joined, parted, parts

type _Paths = tuple[tuple[str, ...], ...]
type _Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Joint:
    """Which weights lie side by side.

    Attributes:
      groups: the paths in the stack of those that do, and their shapes in a layer. The first stands for all, the others are ``None``.
    """

    groups: tuple[tuple[_Paths, _Shapes], ...] = ()

    @classmethod
    def of(
        cls,
        layout: Layout,
        axes: Axes,
        together: tuple[_Paths, ...],
        stack: Any,
        lies: tuple[Any, ...],
        precision: Precision,
    ) -> Joint:
        """Those of the groups asked for that can: of a stack of shapes and where its parameters and their gradients lie, over ``axes``.

        Not beside axes that may split columns, nor where what crosses is packed, which has scales of its own for each weight.

        Raises:
          ModelError: there is no such weight.
        """
        for path in (path for group in together for path in group):
            _check(stack, path)
        others = {axis for axis, size in layout.sizes.items() if size > 1} - set(axes)
        if others or INT8 in (precision.gather, precision.reduce):
            return cls()
        fits = [group for group in together if _alike(stack, group) and all(_lie_alike(one, group) for one in lies)]
        return cls(tuple((group, tuple(_at(stack, path).shape[1:] for path in group)) for group in fits))

    def join(self, stack: Any, cast: Callable[[jax.Array], jax.Array]) -> Any:
        """A stack's parameters [layers, rows, ...], those of each group as one, ``cast`` before."""
        for group, _ in self.groups:
            whole = joined([cast(_at(stack, path)) for path in group], 1)
            stack = _with_one(stack, group, whole)
        return stack

    def lies(self, stack: Any) -> Any:
        """Where they lie, and their gradients."""
        for group, _ in self.groups:
            first = _at(stack, group[0])
            stack = _with_one(stack, group, replace(first, dims=(*first.dims[:2], ())))
        return stack

    def given(self, layer: Any) -> Any:
        """Of one layer's weights, each part where the layer looks for it."""
        for group, shapes in self.groups:
            each = parts(_at(layer, group[0]), shapes)
            for path, part in zip(group, each, strict=True):
                layer = _with(layer, path, part)
        return layer

    def part(self, stack: Any) -> Any:
        """A stack's gradients, each by itself again."""
        for group, shapes in self.groups:
            each = parted(_at(stack, group[0]), [shape[1:] for shape in shapes])
            for path, grad in zip(group, each, strict=True):
                stack = _with(stack, path, grad)
        return stack


def _check(stack: Any, path: tuple[str, ...]) -> None:
    names = [to_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(stack)]
    if path not in names:
        known = [show(name) for name in names]
        raise ModelError(
            f"Staged(together=...) names {show(path)!r}, which no layer has.{did_you_mean(show(path), known)} Layers have {', '.join(known)}."
        )


def _alike(stack: Any, group: _Paths) -> bool:
    """Matrices of the same rows and dtype."""
    each = [_at(stack, path) for path in group]
    return all(w.ndim > 2 for w in each) and len({(w.shape[:2], w.dtype) for w in each}) == 1


def _lie_alike(stack: Any, group: _Paths) -> bool:
    """Split alike, and not by their columns."""
    each = [_at(stack, path).dims for path in group]
    return not any(any(dims[2:]) for dims in each) and len({dims[:2] for dims in each}) == 1


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _with(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *more = path
    return {**tree, name: _with(tree[name], tuple(more), value) if more else value}


def _with_one(tree: Any, group: _Paths, value: Any) -> Any:
    """With a group's one in the place of its first, and nothing in that of the others."""
    for path in group[1:]:
        tree = _with(tree, path, None)
    return _with(tree, group[0], value)
