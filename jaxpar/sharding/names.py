"""Logical names of a tensor's dims, as every annotation gives them."""

from __future__ import annotations

from typing import Any

from jaxpar.errors import AnnotationError

Names = tuple[str | None, ...]
LAYERS = "layers"
"""The logical dim, the first of a parameter, over which layers are stacked."""


def check_names(dims: Any, where: str) -> Names:
    """``dims`` as a tuple of strings and Nones, or an ``AnnotationError``."""
    if not isinstance(dims, tuple | list) or not all(d is None or isinstance(d, str) for d in dims):
        raise AnnotationError(
            f"{where}: the logical dims are {dims!r}, but a string or None for each dim is wanted, as ('embed', 'mlp')."
        )
    return tuple(dims)
