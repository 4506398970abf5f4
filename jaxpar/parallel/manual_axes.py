"""The mesh axes that an enclosing ``shard_map`` has made manual, and those of them that shard a logical dim."""

from __future__ import annotations

import jax

from jaxpar.errors import NoLayoutError
from jaxpar.sharding.layout import current_layout
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
