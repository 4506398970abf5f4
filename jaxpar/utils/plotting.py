"""Figures that show themselves in a notebook and that pyplot does not keep; matplotlib is imported on first use."""

from __future__ import annotations

import functools
import io
from typing import Any

from jaxpar.errors import need


def new_figure(purpose: str, **options: Any) -> Any:
    """A matplotlib figure that shows itself in a notebook, whether or not pyplot was imported there.

    Raises:
      MissingExtraError: matplotlib is not installed; ``purpose`` is what needs it.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise need("matplotlib", "plots", purpose) from error
    return _drawing(matplotlib.figure.Figure)(**options)


@functools.cache
def _drawing(figure: Any) -> Any:
    class Drawing(figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=100)
            return out.getvalue()

    return Drawing
