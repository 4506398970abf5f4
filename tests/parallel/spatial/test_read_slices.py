"""Images in files: each device's slice is read, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import tifffile
from error_texts import raises

import jaxpar as jp
from jaxpar.errors import DataError, LayoutError


def layout() -> jp.Layout:
    mesh = jp.MeshSpec(data=2, context=2, ulysses=2).build()
    return jp.Layout(mesh, jp.Rules(batch="data", height="context", width="ulysses"))


class Counted:
    """An array that knows what was read of it."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, []

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.array[index]
        self.read.append(part.nbytes)
        return part


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((16, 8, 3)).astype(np.float32)


def zarr(folder: Path, driver: str, array: np.ndarray) -> Path:
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/image.zarr/"}}
    tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()
    return folder / "image.zarr"


@pytest.mark.parametrize("kind", ["npy", "tif", "zarr", "zarr3", "array"])
def test_files_of_every_kind_are_read(kind: str, tmp_path: Path) -> None:
    array, source = image(), tmp_path / f"image.{kind}"
    if kind == "npy":
        np.save(source, array)
    elif kind == "tif":
        tifffile.imwrite(source, array, photometric="rgb")
    elif kind.startswith("zarr"):
        source = zarr(tmp_path, kind, array)
    with layout():
        found = jp.spatial.read_slices(array if kind == "array" else source, "height", "width", None)
    np.testing.assert_array_equal(found, array)
    assert {shard.data.shape for shard in found.addressable_shards} == {(8, 4, 3)}


def test_a_batch_is_stacked_and_each_slice_read_once() -> None:
    sources = [Counted(image(seed)) for seed in range(4)]
    with layout():
        found = jp.spatial.read_slices(sources, "batch", "height", "width", None, dtype="float16")
    np.testing.assert_array_equal(found, np.stack([image(seed) for seed in range(4)]).astype(np.float16))
    assert [sum(source.read) for source in sources] == [image().nbytes] * 4
    assert {size for source in sources for size in source.read} == {image().nbytes // 4}


def test_a_slice_that_several_devices_hold_is_read_once() -> None:
    source = Counted(image())
    with jp.Layout(jp.MeshSpec(context=2, data=4).build(), jp.Rules(height="context", width=None)):
        jp.spatial.read_slices(source, "height", "width", None)
    assert sum(source.read) == image().nbytes


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "broken.npy").write_bytes(b"no array")
    with layout():
        with raises(DataError, "image.png"):
            jp.spatial.read_slices("image.png", "height", "width", None)
        with raises(DataError, "broken.npy"):
            jp.spatial.read_slices(tmp_path / "broken.npy", "height", "width", None)
        with raises(DataError, "image 1"):
            jp.spatial.read_slices([image(), image()[:8]], "batch", "height", "width", None)
        with raises(DataError, "read_slices()", "got 3"):
            jp.spatial.read_slices(3, "height")  # type: ignore[arg-type]
    abstract = jp.Layout(jp.MeshSpec(context=8).abstract(), jp.Rules(height="context", width=None))
    with abstract, raises(LayoutError, "read_slices()"):
        jp.spatial.read_slices(image(), "height", "width", None)
