"""Images and volumes in files, of which each process reads only the slices of its own devices."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxpar.errors import DataError, LayoutError, listing
from jaxpar.sharding.layout import current_layout
from jaxpar.utils.checks import shown

SUFFIXES = (".npy", ".tif", ".tiff", ".zarr")


class ImageSource(Protocol):
    """An array that can be read in parts, such as a ``numpy.memmap`` or a ``zarr.Array``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...


type Image = ImageSource | str | os.PathLike[str]


def open_image(path: str | os.PathLike[str]) -> ImageSource:
    """Returns an image or a volume that is read from its file as it is indexed; nothing else is read.

    ``.npy`` and uncompressed ``.tif`` files are memory-mapped. Of a ``.zarr`` folder (of either version) the chunks
    that an index touches are read.

    Args:
      path: the file, or the folder of a zarr array.

    Raises:
      DataError: the file cannot be read, or has another suffix.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/image.npy", np.arange(6.0).reshape(2, 3))
    ...     open_image(f"{folder}/image.npy")[:, 1:2].tolist()
    [[1.0], [4.0]]
    """
    file = Path(path)
    if file.suffix not in SUFFIXES:
        raise DataError(
            f"{file}: cannot read files of the kind {file.suffix!r}. Remedy: a file {listing(SUFFIXES)}, or pass an "
            f"array with shape, dtype and slices."
        )
    try:
        return _open(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}. Remedy: check the file.") from error


def read_slices(source: Image | Sequence[Image], *dims: str | None, dtype: Any = None) -> jax.Array:
    """Returns an image, a volume or a batch of them on the devices of the ambient layout.

    Each process reads only the slices of its own devices, and holds one slice at a time beside them.

    Args:
      source: a path (:func:`open_image`), an array that can be read in parts, or a sequence of either, which is stacked
        into a batch.
      *dims: one logical dim (or ``None``) per dim, such as ``"height", "width", None``; for a sequence the dim of the
        batch comes first.
      dtype: the dtype on the devices; by default that of the source.

    Raises:
      NoLayoutError: no layout is ambient.
      LayoutError: the rules cannot place an array of this shape, or the mesh is abstract.
      DataError: a file cannot be read, or the sources of a batch differ in shape or dtype.

    >>> import jaxpar as jp
    >>> whole = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    >>> with jp.Layout(jp.MeshSpec(context=-1).build(), jp.Rules(height="context", width=None)):
    ...     read_slices(whole, "height", "width").sharding.spec
    P('context', None)
    """
    stacked = isinstance(source, Sequence) and not isinstance(source, str)
    given: Any = source
    sources = [_opened(x) for x in (given if stacked else [given])]
    first = sources[0]
    for number, one in enumerate(sources):
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"image {number} of the batch is {one.dtype} {list(one.shape)}, but the first is {first.dtype} "
                f"{list(first.shape)}. Remedy: images of one shape and dtype."
            )
    shape = (len(sources), *first.shape) if stacked else tuple(first.shape)
    layout = current_layout()
    sharding = layout.sharding(dims, shape, path="read_slices()")
    if isinstance(layout.mesh, AbstractMesh):
        raise LayoutError("read_slices() needs devices, but the mesh is abstract. Remedy: MeshSpec.build().")
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        index = tuple(slice(*pair) for pair in bounds)
        parts = [np.asarray(x[index[1:] if stacked else index]) for x in (sources[index[0]] if stacked else sources)]
        piece = (np.stack(parts) if stacked else parts[0]).astype(dtype or first.dtype, copy=False)
        pieces += [jax.device_put(piece, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _opened(source: Any) -> ImageSource:
    if isinstance(source, str | os.PathLike):
        return open_image(source)
    if not all(hasattr(source, name) for name in ("shape", "dtype", "__getitem__")):
        raise DataError(
            f"read_slices() requires a path or an array, got {shown(source)}. Remedy: such as numpy.load(path, "
            "mmap_mode='r')."
        )
    found: ImageSource = source
    return found


def _open(file: Path) -> ImageSource:
    if file.suffix == ".npy":
        mapped: ImageSource = np.load(file, mmap_mode="r", allow_pickle=False)
        return mapped
    if file.suffix == ".zarr":
        return _Zarr(file)
    try:
        tifffile: Any = importlib.import_module("tifffile")
    except ImportError as error:
        raise DataError(f"{file}: reading TIFF needs tifffile. Remedy: pip install 'jaxpar[images]'.") from error
    tiff: ImageSource = tifffile.memmap(file, mode="r")
    return tiff


class _Zarr:
    """A zarr array, read by tensorstore, which orbax requires too."""

    def __init__(self, folder: Path):
        tensorstore: Any = importlib.import_module("tensorstore")
        driver = "zarr3" if (folder / "zarr.json").is_file() else "zarr"
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder.resolve()}/"}}
        self._array = tensorstore.open(spec, open=True, read=True).result()
        self.shape, self.dtype = tuple(self._array.shape), self._array.dtype.numpy_dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        found: np.ndarray = self._array[index].read().result()
        return found
