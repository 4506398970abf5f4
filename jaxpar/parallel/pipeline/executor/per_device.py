"""Functions of per-device arrays, for the global arrays of a tick."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.sharding.layout import current_layout, manual_axes
from jaxpar.sharding.rules import Axes


class Split(Enum):
    """How a global array is split over the devices. A value names the leading dims, which per-device arrays lack."""

    STAGE = ("stages",)
    DEVICE = ("devices",)
    STAGE_DEVICE = ("stages", "devices")
    DEVICE_COLUMNS = ("devices", ...)
    """As ``DEVICE``; the last dim is also split over the stages, if they divide it."""
    REPLICATED = ()

    @property
    def leading(self) -> int:
        """The number of leading dims, of size 1 on each device."""
        return len([name for name in self.value if name is not ...])

    def spec(self, axes: Axes, ndim: int, *, columns: bool) -> PartitionSpec:
        """Returns the spec of an array of ``ndim`` dims; ``axes`` are the mesh axes of the dim ``devices``.

        >>> Split.DEVICE_COLUMNS.spec(("data",), 4, columns=True)
        P('data', None, None, 'pipeline')
        """
        over = {"stages": AXIS, "devices": axes or None}
        leading = [over[name] for name in self.value if name is not ...]
        if self is not Split.DEVICE_COLUMNS:
            return PartitionSpec(*leading)
        return PartitionSpec(*leading, *(None,) * (ndim - 2), AXIS if columns else None)


def per_device(
    axes: Axes, f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True, columns: bool = False
) -> Callable[..., Any]:
    """Wraps ``f``, a function of per-device arrays, in a ``shard_map``.

    Args:
      axes: the mesh axes of the batch and the sequence.
      f: the function.
      ins, outs: the :class:`Split` of each argument and result; trees of them are prefixes of an argument's tree.
      stages: also make the axis of the stages manual.
      columns: the stages divide the last dim of the arrays that are ``DEVICE_COLUMNS``.
    """

    def local(*args: Any) -> Any:
        inner = _each(lambda split, x: x.reshape(x.shape[split.leading :]), ins, args)
        return _each(lambda split, x: x.reshape((1,) * split.leading + x.shape), outs, f(*inner))

    def run(*args: Any) -> Any:
        manual = manual_axes(current_layout(), (*axes, *((AXIS,) if stages else ())), but=(AXIS,))
        in_specs = _each(lambda split, x: split.spec(axes, x.ndim, columns=columns), ins, args)
        # A result that is DEVICE_COLUMNS has as many dims as the argument that is.
        ndims: list[int] = []
        _each(lambda split, x: ndims.append(x.ndim) if split is Split.DEVICE_COLUMNS else None, ins, args)
        out_specs = jax.tree.map(lambda split: split.spec(axes, next(iter(ndims), 0), columns=columns), outs)
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)(*args)

    return run


def _each(f: Callable[[Split, jax.Array], Any], splits: Any, tree: Any) -> Any:
    """Returns ``f(split, array)`` for every array; ``splits`` is a prefix of the tree."""
    return jax.tree.map(lambda split, part: jax.tree.map(lambda x: f(split, x), part), splits, tree)
