"""Arrays whose types carry Explicit mesh axes, in a layout whose axes are Auto."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar.sharding.layout import Layout


def without_explicit_axes(layout: Layout, tree: Any) -> Any:
    """Returns traced arrays with the axis types of the layout, for arrays that a caller sharded over Explicit axes.

    A mesh of ``jax.make_mesh`` has such axes, and so have the types of the arrays that are sharded over it. Operations
    on such an array follow JAX's rules for Explicit axes, whatever mesh is ambient.

    Args:
      layout: the ambient layout.
      tree: traced arrays.
    """
    if layout.explicit:
        return tree

    def one(x: Any) -> Any:
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
            return x
        known = (entry if _axes(entry) <= set(layout.sizes) else None for entry in sharding.spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(layout.mesh, PartitionSpec(*known)))

    return jax.tree.map(one, tree)


def _axes(entry: Any) -> set[str]:
    return set(entry) if isinstance(entry, tuple) else {entry} if isinstance(entry, str) else set()
