"""Functions of per-device arrays, for the global arrays of a tick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import each_of, pairs
from jaxpar.sharding.layout import current_layout, manual_axes


def per_device(
    axes: Sequence[str], f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True, columns: bool = False
) -> Callable[..., Any]:
    """Wraps ``f``, a function of per-device arrays, in a ``shard_map``.

    Args:
      axes: the mesh axes of the rows.
      f: the function.
      ins, outs: trees of the kinds of its arrays. ``stage``: [stages, ...]; ``own``: [devices, ...]; ``stage own``:
        [stages, devices, ...]; ``columns``: as ``own``, with the last dim sharded over stages if ``columns`` is true;
        ``all``: replicated.
      stages: also make the axis of the stages manual.
      columns: see ``ins``.
    """
    rows = axes or None
    last = AXIS if columns else None
    spec: dict[str, Callable[[int], PartitionSpec]] = {
        "stage": lambda _: PartitionSpec(AXIS),
        "own": lambda _: PartitionSpec(rows),
        "stage own": lambda _: PartitionSpec(AXIS, rows),
        "columns": lambda ndim: PartitionSpec(rows, *(None,) * (ndim - 2), last),
        "all": lambda _: PartitionSpec(),
    }
    lead = {"stage": 1, "own": 1, "stage own": 2, "columns": 1, "all": 0}

    def local(*args: Any) -> Any:
        inner = each_of(lambda kind, x: x.reshape(x.shape[lead[kind] :]), ins, args)
        return each_of(lambda kind, x: x.reshape((1,) * lead[kind] + x.shape), outs, f(*inner))

    def run(*args: Any) -> Any:
        manual = manual_axes(current_layout(), (*axes, *((AXIS,) if stages else ())), but=(AXIS,))
        in_specs = each_of(lambda kind, x: spec[kind](x.ndim), ins, args)
        # An output of kind `columns` has as many dims as the input of that kind.
        dims = next((x.ndim for kind, x in pairs(ins, args) if kind == "columns"), 0)
        out_specs = jax.tree.map(lambda kind: spec[kind](dims), outs)
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)(*args)

    return run
