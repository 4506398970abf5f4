"""The mesh axes that an enclosing ``shard_map`` has made manual, and those of them that shard a logical dim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxpar.errors import LayoutError, NoLayoutError, listing
from jaxpar.sharding.layout import current_layout, manual_axes
from jaxpar.sharding.rules import Axes


def enclosing_manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes of size > 1 that an enclosing ``shard_map`` has made manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def manual_axes_of(dim: str | None, default: Axes = ()) -> Axes:
    """Returns the manual axes over which the ambient rules shard ``dim``; without a rule, those of ``default``."""
    manual = enclosing_manual_axes()
    try:
        resolved = None if dim is None else current_layout().resolve((dim,))
    except NoLayoutError:
        resolved = None
    axes = default if resolved is None or resolved.problems else resolved.axes[0]
    return tuple(axis for axis in axes if axis in manual)


def check_manual(axes: Sequence[str], function: str) -> None:
    """Raises LayoutError unless these axes are manual here, in a call of ``attention_local`` or ``experts_local``."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if missing := [axis for axis in axes if axis not in manual]:
        raise LayoutError(
            f"{function}_local: {listing(missing)} is not a manual axis here; the manual axes are: {listing(manual)}. "
            f"Remedy: call it inside jax.shard_map over {listing(axes)}, or call jp.{function} outside."
        )


def manual_shard_map(f: Callable[..., Any], axes: Iterable[str], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns ``f`` as a ``shard_map`` over ``axes`` and all axes of size 1, so that none of these stays automatic."""
    names = manual_axes(current_layout(), axes) - {*jax.sharding.get_abstract_mesh().manual_axes}
    # check_vma is off: jax would assume that a gathered array differs between devices.
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
