"""How error texts write meshes, tensors and rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def product(sizes: Mapping[str, int]) -> str:
    """Returns the axes whose size is not 1, as ``data=4 × model=2``."""
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"


def tensor(path: str, names: Sequence[str | None], shape: Sequence[int] | None) -> str:
    """Returns the tensor's name in a problem, as ``params/kernel [8, 6] (embed, mlp)``."""
    return f"{path}{'' if shape is None else f' {list(shape)}'} ({', '.join(map(str, names))})"


def written(rule: object) -> str:
    """Returns a rule as users write it: ``model``, ``(replica, data)``, ``None``, ``first_of(model, None)``."""
    if isinstance(rule, tuple | list):
        return "None" if not rule else str(rule[0]) if len(rule) == 1 else f"({', '.join(rule)})"
    return str(rule)


def entry(role: str, dim: str) -> str:
    """Returns the name of a table entry: ``mlp`` in the base table, ``params: mlp`` in a role."""
    return f"{role}: {dim}" if role else dim


def no_multiple(name: str, size: int, axes: Mapping[str, int]) -> str:
    """Returns why a dim cannot take axes that do not divide its size."""
    total = f" = {math.prod(axes.values())}" if len(axes) > 1 else ""
    return f"the dim {name!r} has size {size}, which is not a multiple of {product(axes)}{total}"
