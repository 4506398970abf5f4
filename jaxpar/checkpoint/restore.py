"""Restore a checkpoint onto any layout; each process reads and verifies only the pieces that its devices need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxpar.checkpoint.manifest import DISK, NAME, REMEDY, Bounds, Manifest, TensorPiece, TensorRecord, read
from jaxpar.checkpoint.match import Source, listed, match
from jaxpar.checkpoint.snapshot import Leaf, bounds, leaves_of
from jaxpar.checkpoint.verify import file_problem, map_in_order, read_piece, wrong_step
from jaxpar.errors import CheckpointError, DamagedError

_WORKERS = 4
"""Threads per process; each reads one piece at a time (at most 16 MiB if jaxpar wrote it)."""


def restore(
    directory: str | os.PathLike[str],
    like: Any,
    *,
    only: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    step: int | None = None,
    cast: bool = False,
) -> Any:
    """Returns the state in a checkpoint, bitwise equal, sharded as ``like`` is, whatever layout it was saved in.

    Every piece that is read is compared with its checksum. A process reads only the pieces that its devices need (16
    MiB or less each), and each device receives only its own shard. Files that hold no tensor's values are checked too,
    except, with ``only``, those of other tensors and of an optimizer state on disk.

    Args:
      directory: the checkpoint's folder.
      like: the state to build, as :func:`jaxpar.abstract_state` returns it for any layout: arrays, or
        ``ShapeDtypeStruct`` with a sharding. A ``ShapeDtypeStruct`` without a sharding becomes a numpy array.
      only: paths or path prefixes to restore, such as ``["params"]``; other leaves of ``like`` are returned unchanged.
      rename: maps paths or path prefixes of the checkpoint to those of ``like``, such as
        ``{"params/old": "params/new"}``.
      step: raise an error if the checkpoint is of another step.
      cast: convert floating tensors to the floating dtypes of ``like``, such as weights saved in bfloat16 that are
        trained in float32. A warning names the tensors with values that the new dtype rounds.

    Returns:
      A pytree with the structure of ``like``. Separate layers are stacked, and a stack is split into layers, where
      paths and shapes match only that way.

    Raises:
      CheckpointError: there is no checkpoint, or it is of another model: missing, extra and mis-shaped tensors are
        listed; ``only`` or ``rename`` has a path that does not exist; ``like`` is on an abstract mesh; or with
        ``cast``, a value is beyond the range of the new dtype.
      DamagedError: bytes were changed after they were written, with the name of the tensor and the file; or another
        ``step``.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     jp.save(f"{folder}/one", {"w": jnp.arange(8.0)})
    ...     like = {"w": jax.ShapeDtypeStruct((8,), "float32", sharding=layout.sharding(("batch",)))}
    ...     restore(f"{folder}/one", like)["w"].sharding.spec
    P('data',)
    """
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError(
            f"restore: directory must be a path, got {type(directory).__name__}. Remedy: restore(directory, like)."
        )
    root, manifest = Path(directory), read(directory)
    if step is not None and manifest.step != step:
        raise DamagedError(wrong_step(root, manifest, step))
    leaves, structure = jax.tree.flatten(like)
    targets = leaves_of(like)
    sources = match(targets, manifest.tensors, str(root), only=only, rename=rename, cast=cast)
    rounded: set[str] = set()
    with ThreadPoolExecutor(_WORKERS) as pool:
        _check_other_files(pool, root, manifest, sources.values(), everything=not only)
        for i, leaf in enumerate(targets):
            if leaf.path in sources:
                _check_itemsize(root, sources[leaf.path])
                leaves[i] = _restore_leaf(pool, root, manifest, leaf, sources[leaf.path], rounded)
            elif isinstance(leaf.value, jax.ShapeDtypeStruct):
                raise CheckpointError(
                    f"{leaf.path} is not restored, because only= excludes it, but `like` has no value for it. "
                    "Remedy: like=jp.init(...), or a part of the state."
                )
    if rounded:
        lines = listed("rounded", sorted(rounded))
        text = "Remedy: a wider dtype in the state (in a run, model.param_dtype: float32), if the lost bits matter."
        warnings.warn("\n".join([f"{root}: casts lose bits of values:", *lines, text]), stacklevel=2)
    return jax.tree.unflatten(structure, leaves)


def _check_other_files(
    pool: ThreadPoolExecutor, root: Path, manifest: Manifest, sources: Iterable[Source], *, everything: bool
) -> None:
    """Check the files without values of tensors; unless ``everything``, without those that the sources do not need."""
    folders = {tensor.folder for tensor in manifest.tensors.values()}
    needed = {tensor.folder for source in sources for _, tensor in source.tensors}
    pieces = {name for tensor in manifest.tensors.values() for name in tensor.names()}
    unneeded = set() if everything else {*(folders - needed), DISK}
    names = [
        n for n in manifest.files if n not in pieces and unneeded.isdisjoint((n.rpartition("/")[0], n.split("/")[0]))
    ]
    for problem in map_in_order(pool, lambda name: file_problem(root, name, manifest), names):
        if problem is not None:
            raise DamagedError(problem)


def _check_itemsize(root: Path, source: Source) -> None:
    for path, tensor in source.tensors:
        itemsize = np.dtype(tensor.dtype).itemsize
        if tensor.itemsize != itemsize:
            raise DamagedError(
                f"{root / NAME}: tensor {path}: a value of {tensor.dtype} has {itemsize} bytes, got "
                f"{tensor.itemsize}. {REMEDY}"
            )


def _restore_leaf(
    pool: ThreadPoolExecutor, root: Path, manifest: Manifest, leaf: Leaf, source: Source, rounded: set[str]
) -> Any:
    """Restore one tensor, with each shard on its devices."""
    sharding = leaf.value.sharding
    if sharding is None:
        block = np.empty(leaf.shape, leaf.dtype)
        _fill(pool, root, manifest, source, {tuple((0, n) for n in leaf.shape): block}, rounded)
        return block if leaf.key is None else jax.random.wrap_key_data(jnp.asarray(block), impl=leaf.key)
    on_mesh = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh)
    if not on_mesh and not isinstance(sharding, SingleDeviceSharding):
        raise CheckpointError(
            f"{leaf.path}: `like` has a sharding without devices, so no array can be created. Remedy: use a layout "
            "whose mesh has devices."
        )
    places = {d: bounds(i or (), leaf.shape) for d, i in sharding.addressable_devices_indices_map(leaf.shape).items()}
    blocks = {at: np.empty([stop - start for start, stop in at], leaf.dtype) for at in places.values()}
    _fill(pool, root, manifest, source, blocks, rounded)
    home = lambda device: SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    parts = [jax.device_put(blocks[at], home(device)) for device, at in places.items()]
    made = jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
    return made if leaf.key is None else jax.random.wrap_key_data(made, impl=leaf.key)


def _fill(
    pool: ThreadPoolExecutor,
    root: Path,
    manifest: Manifest,
    source: Source,
    blocks: Mapping[Bounds, np.ndarray],
    rounded: set[str],
) -> None:
    """Fill blocks of a tensor, keyed by their bounds, from the checkpoint's pieces; add what a cast rounds."""
    tasks = (
        (path, tensor, piece, targets)
        for path, tensor, some in _plan(source, blocks)
        for piece in tensor.pieces()
        if (targets := [(at, block) for at, block in some.items() if _meet(at, piece[1])])
    )
    rounded.update(filter(None, map_in_order(pool, lambda task: _copy(root, manifest, *task), tasks)))


def _plan(
    source: Source, blocks: Mapping[Bounds, np.ndarray]
) -> Iterator[tuple[str, TensorRecord, dict[Bounds, np.ndarray]]]:
    """Each source tensor with the blocks to fill from it, keyed by their bounds in that tensor."""
    for row, (path, tensor) in enumerate(source.tensors):
        if source.stacked:
            mine = [(at, block) for at, block in blocks.items() if at[0][0] <= row < at[0][1]]
            yield path, tensor, {at[1:]: block[row - at[0][0], ...] for at, block in mine}  # an array, also of a scalar
        elif source.row is not None:
            yield path, tensor, {((source.row, source.row + 1), *at): block[None] for at, block in blocks.items()}
        else:
            yield path, tensor, dict(blocks)


type Targets = list[tuple[Bounds, np.ndarray]]


def _copy(
    root: Path, manifest: Manifest, path: str, tensor: TensorRecord, piece: TensorPiece, targets: Targets
) -> str | None:
    """Read and verify one piece and copy it into the targets; a target that is exactly this piece is read in place.

    Returns:
      What a cast rounded, if it did.
    """
    at, stored, wanted = piece[1], np.dtype(tensor.dtype), targets[0][1].dtype
    shape = tuple(stop - start for start, stop in at)
    whole = shape == tensor.chunk and stored == wanted
    exact = next((b for target, b in targets if target == at and whole and b.flags.c_contiguous), None)
    buffer = np.empty(tensor.piece_bytes, np.uint8) if exact is None else exact.reshape(-1).view(np.uint8)
    read_piece(root, manifest, path, tensor, piece, buffer)
    values = buffer.view(stored).reshape(tensor.chunk)
    for target, block in targets:
        if block is not exact:
            cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, target, strict=True)]
            destination = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(cut, target, strict=True))
            origin = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(cut, at, strict=True))
            with np.errstate(over="ignore"):  # reported below
                block[destination] = values[origin]
    return None if np.can_cast(stored, wanted, "safe") else _rounded(root, path, values, wanted)


def _rounded(root: Path, path: str, values: np.ndarray, dtype: np.dtype[Any]) -> str | None:
    """Returns a tensor and its dtypes if ``dtype`` cannot represent all of its values.

    Raises:
      CheckpointError: a value is beyond the range of ``dtype``.
    """
    with np.errstate(over="ignore"):
        back = values.astype(dtype).astype(values.dtype)
    if (beyond := np.isfinite(values) & ~np.isfinite(back)).any():
        raise CheckpointError(
            f"{root}: {path} holds {values[beyond][0]:g}, which {dtype} cannot represent. Remedy: a dtype of a larger "
            "range, such as bfloat16."
        )
    same = (back == values) | np.isnan(values)
    return None if same.all() else f"{path}, from {values.dtype} to {dtype}"


def _meet(a: Bounds, b: Bounds) -> bool:
    return all(max(x, u) < min(y, v) for (x, y), (u, v) in zip(a, b, strict=True))
