"""``LazyRows``: a batch of large arrays in files, of which only what is indexed is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def reads_in_parts(x: Any) -> bool:
    """Returns whether this is an array outside of memory: a ``numpy.memmap``, or with shape, dtype and slices only.

    >>> reads_in_parts(np.zeros(3)), reads_in_parts([1, 2])
    (False, False)
    """
    if isinstance(x, np.memmap):
        return True
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return False
    return all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))


class LazyRows:
    """Arrays of one shape and dtype as the rows of a batch ``[rows, ...]``, read when they are indexed.

    Args:
      sources: one for each row, such as ``numpy.load(file, mmap_mode="r")`` or :func:`jaxpar.spatial.open_image`.

    >>> rows = LazyRows([np.arange(6.0).reshape(2, 3), np.zeros((2, 3))])
    >>> rows.shape, rows[0:1, :, 1:].tolist()
    ((2, 2, 3), [[[1.0, 2.0], [4.0, 5.0]]])
    """

    def __init__(self, sources: Sequence[Any]):
        self._sources = tuple(sources)
        self.shape: tuple[int, ...] = (len(self._sources), *self._sources[0].shape)
        self.dtype = jax.dtypes.canonicalize_dtype(self._sources[0].dtype)

    @property
    def ndim(self) -> int:
        """The number of dims, that of the rows included."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the rows of the first slice, of each of which the other slices are read."""
        return np.stack([np.asarray(x[index[1:]]) for x in self._sources[index[0]]]).astype(self.dtype, copy=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self[(slice(None),) * self.ndim]
        return whole if dtype is None else whole.astype(dtype, copy=False)
