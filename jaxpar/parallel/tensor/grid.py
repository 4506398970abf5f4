"""Grids of devices for tensor parallelism in one to three dimensions, and the rules that go with them.

This module does not import jax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxpar.errors import MeshError, RulesError, did_you_mean
from jaxpar.sharding.rules import Rules, first_of

type TensorKind = Literal["1d", "2d", "2.5d", "3d"]
KINDS: tuple[TensorKind, ...] = get_args(TensorKind.__value__)
_FORMS = {"2d": "a square q²", "2.5d": "q² · d with q and d of at least 2", "3d": "a cube q³"}


def grid(kind: TensorKind, devices: int, *, depth: int | None = None) -> dict[str, int]:
    """Returns the sizes of the mesh axes for tensor parallelism of a kind over a number of devices.

    A mesh may also have other sizes, such as ``x=2, y=4``: the matmuls only require that they divide the dims.

    Args:
      kind: ``1d``: ``model``; ``2d``: ``x = y = q``; ``2.5d``: ``x = y = q`` and ``z = d``; ``3d``: ``x = y = z = q``.
      devices: the number of devices that share a layer.
      depth: d of ``2.5d``; by default the smallest of at least 2 that fits.

    Raises:
      MeshError: an unknown kind, or the number of devices is no square, no q² · d, or no cube.

    >>> grid("2d", 64), grid("2.5d", 64), grid("3d", 64)
    ({'x': 8, 'y': 8}, {'x': 4, 'y': 4, 'z': 4}, {'x': 4, 'y': 4, 'z': 4})
    """
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise MeshError(f"unknown kind of tensor parallelism {kind!r}.{did_you_mean(kind, KINDS)} The kinds: {known}.")
    if kind == "1d":
        return {"model": devices}
    if (found := _sizes(kind, devices, depth)) is None:
        raise MeshError(_misfit(kind, devices, depth))
    return found


def _sizes(kind: str, devices: int, depth: int | None) -> dict[str, int] | None:
    """Returns the sizes of the grid with this number of devices, or ``None`` if there is none."""
    q = math.isqrt(max(devices, 0))
    if kind == "2d":
        return {"x": q, "y": q} if q > 1 and q * q == devices else None
    if kind == "3d":
        q = round(max(devices, 0) ** (1 / 3))
        return {"x": q, "y": q, "z": q} if q > 1 and q**3 == devices else None
    depths = ((q, devices // q**2) for q in range(q, 1, -1) if devices % q**2 == 0)
    found = ((q, d) for q, d in depths if (d > 1 if depth is None else d == depth))
    return next(({"x": q, "y": q, "z": d} for q, d in found), None)


def _misfit(kind: str, devices: int, depth: int | None) -> str:
    below = next((n for n in range(devices - 1, 3, -1) if _sizes(kind, n, depth)), None)
    above = next(n for n in range(max(devices, 3) + 1, 100 * max(devices, 8) * (depth or 1)) if _sizes(kind, n, depth))
    near = " or ".join(str(n) for n in (below, above) if n is not None)
    form = f"q² · {depth}" if depth is not None and kind == "2.5d" else _FORMS[kind]
    return (
        f"{kind} tensor parallelism requires {form} devices, but there are {devices}. Remedy: use {near} devices, "
        "another kind, or set the sizes of x, y and z yourself."
    )


def rules(kind: TensorKind, base: Rules) -> Rules:
    """Returns rules for tensor parallelism of a kind, from those of another layout of the same model.

    The dims ``embed``, ``heads``, ``kv_heads``, ``mlp`` and ``vocab``, as far as the base table has them, are sharded
    over ``model``, or over ``x``, ``y`` and ``z``; in ``2.5d`` and ``3d`` the dim ``batch`` takes some of these axes
    too. ``configs/layouts/tp_2d.yaml``, ``tp_25d.yaml`` and ``tp_3d.yaml`` hold the same rules.

    Args:
      kind: as for :func:`grid`.
      base: the rules to change. They have a rule for ``batch`` that is an axis or several.

    Raises:
      RulesError: the rule for ``batch`` is missing or is a ``first_of``.

    >>> from jaxpar import Rules
    >>> rules("2d", Rules(batch="data", embed=None, mlp=None)).to_dict()["embed"]
    ['x', 'y']
    """
    rows = base.table.get("batch")
    if not isinstance(rows, tuple):
        raise RulesError(
            "tensor.rules() requires a rule for 'batch' that is an axis or a tuple of axes. Remedy: such as "
            "batch='data'."
        )
    changes = _changes(kind, rows)
    if kind == "3d" and "kv_heads" in base.table:
        changes["indivisible"] = {"kv_heads": "replicate"}
    known = base.table
    params = {dim: rule for dim, rule in changes.pop("params", {}).items() if dim in known}
    own = {dim: rule for dim, rule in changes.items() if dim in known or dim == "indivisible"}
    return base.replace(**own, **({"params": params} if params else {}))


def _changes(kind: str, rows: tuple[str, ...]) -> dict[str, Any]:
    outer = ("heads", "mlp", "vocab")
    if kind == "1d":
        return {**dict.fromkeys(outer, "model"), "kv_heads": first_of("model", None)}
    if kind == "2d":
        return {
            "embed": ("x", "y"),
            **dict.fromkeys(outer, ("y", "x")),
            "kv_heads": first_of(("y", "x"), "y", None),
            "params": {"embed": "x", **dict.fromkeys(outer, "y"), "kv_heads": first_of("y", None)},
        }
    columns: Mapping[str, Any] = {**dict.fromkeys(outer, "y"), "kv_heads": first_of("y", None)}
    if kind == "2.5d":
        either = first_of("x", "y")
        stored = {"embed": either, **dict.fromkeys(outer, either), "kv_heads": first_of("x", "y", None)}
        # In the mesh's order: XLA's partitioner gives plain matmuls wrong gradients with (z, x).
        return {"batch": (*rows, "x", "z"), "embed": "y", **columns, "params": stored}
    return {
        "batch": first_of((*rows, "z", "y"), (*rows, "z", "x")),
        "embed": "x",
        # No first_of: it would leave y to the batch.
        **dict.fromkeys((*outer, "kv_heads"), "y"),
        "params": {"embed": ("x", "z")},
    }
