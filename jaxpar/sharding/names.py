"""The logical names of a tensor's dims, checked in one place for every kind of annotation."""

from __future__ import annotations

from typing import Any

from jaxpar.errors import AnnotationError

Names = tuple[str | None, ...]
LAYERS = "layers"
"""The logical dim of stacked layers, the first dim of a stacked parameter."""


def check_names(dims: Any, where: str) -> Names:
    """Returns ``dims`` as a tuple of strings and ``None``.

    Raises:
      AnnotationError: ``dims`` is anything else; the text begins with ``where``.
    """
    if not isinstance(dims, tuple | list) or not all(d is None or isinstance(d, str) for d in dims):
        raise AnnotationError(
            f"{where}: the logical dims must be a string or None for each dim, such as ('embed', 'mlp'), got {dims!r}."
        )
    return tuple(dims)
