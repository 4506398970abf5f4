"""Figures that a notebook displays and pyplot does not manage; matplotlib is imported on first use."""

from __future__ import annotations

import functools
import io
from typing import Any

from jaxpar.utils.extras import import_extra


def new_figure(purpose: str, **options: Any) -> Any:
    """Returns a matplotlib figure that a notebook displays, whether or not pyplot was imported there.

    Args:
      purpose: what needs matplotlib, for the error.
      **options: the arguments of ``matplotlib.figure.Figure``.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    return _drawing(import_extra("matplotlib.figure", "plots", purpose).Figure)(**options)


@functools.cache
def _drawing(figure: Any) -> Any:
    class Drawing(figure):
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=100)
            return out.getvalue()

    return Drawing
