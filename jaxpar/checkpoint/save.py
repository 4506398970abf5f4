"""Save a state: orbax writes the arrays, then jaxpar writes a manifest with checksums.

Arrays are stored raw, in pieces (zarr without compression, because weights hardly compress). A piece's file can
therefore be checked without any library, and a process reads only the pieces that it needs. A save writes into a
temporary folder and renames it when everything is in it.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.checkpoint import manifest
from jaxpar.checkpoint.array_files import entry, write_arrays
from jaxpar.checkpoint.leftovers import REPLACED, UNFINISHED, recover_one
from jaxpar.checkpoint.manifest import DISK, Bounds, Manifest, TensorRecord
from jaxpar.checkpoint.metadata import keys_of, layout_metadata, now, versions
from jaxpar.checkpoint.multihost_merge import gather
from jaxpar.checkpoint.snapshot import Leaf, copied, dims_of, leaves_of, on_disk, shards
from jaxpar.checkpoint.verify import check_values, crc_of
from jaxpar.errors import CheckpointError
from jaxpar.sharding.layout import Layout
from jaxpar.utils.durable import remove, sync_files, sync_folder

_SAVE_LOCK = threading.Lock()
_NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass
class Saving:
    """A save that runs in the background."""

    directory: Path
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the checkpoint is complete and, if requested, verified.

        Raises:
          CheckpointError: the save failed; an earlier checkpoint of this name is unchanged.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    layout: Layout | None = None,
    metadata: Mapping[str, Any] | None = None,
    disk: Any = None,
    verify: bool = True,
) -> None:
    """Writes a checkpoint: all tensors of a state, and a manifest with a checksum of every piece.

    The folder gets its name when it is complete; an existing checkpoint of that name is replaced then. Every process
    calls ``save``, outside of any mesh context.

    Args:
      directory: the checkpoint's folder.
      state: a :class:`jaxpar.TrainState`, or any pytree of jax arrays.
      layout: its mesh and rules are recorded in the manifest.
      metadata: further values for the manifest, as JSON: a configuration, the position in the data.
      disk: the :func:`jaxpar.offload.disk_offloaded_train_step` of a state whose optimizer state is on disk; its files
        are saved too.
      verify: read the files back and compare them with the arrays in memory.

    Raises:
      CheckpointError: a leaf is not an array, ``metadata`` is not JSON, the disk failed or is full, or the files read
        back differ from the arrays.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/one", {"w": jnp.arange(6.0)})
    ...     jp.restore(f"{folder}/one", {"w": jax.ShapeDtypeStruct((6,), "float32")})["w"].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    begin(directory, state, layout=layout, metadata=metadata, disk=disk, verify=verify).wait()


def begin(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    layout: Layout | None = None,
    metadata: Mapping[str, Any] | None = None,
    disk: Any = None,
    verify: bool = True,
    step: int | None = None,
) -> Saving:
    """Like :func:`save`, but returns once the state is copied to host memory; the caller may then donate the state.

    Args:
      step: recorded in the manifest instead of ``state.step``.

    Returns:
      The save that runs in the background; its :meth:`Saving.wait` reports errors of the writes.

    Raises:
      CheckpointError: an error that is known before anything is written in the background.
    """
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError(
            f"save: directory must be a path, got {type(directory).__name__}. Remedy: save(directory, state)."
        )
    target = Path(os.path.abspath(directory))
    leaves = leaves_of(state)
    if any(isinstance(leaf.value, jax.ShapeDtypeStruct) for leaf in leaves):
        raise CheckpointError("the state must hold arrays, got shapes. Remedy: create it with jp.init.")
    if disk is None and on_disk(state):
        raise CheckpointError(
            "the optimizer state is on disk, in files that only its step can save consistently. Remedy: pass "
            "disk=step, the disk_offloaded_train_step of this run."
        )
    count = getattr(state, "step", None)
    if step is None and isinstance(count, jax.Array) and count.shape == ():
        step = int(count)
    facts = {"when": now(), "rng": keys_of(leaves), **(metadata or {})}
    head = Manifest({}, {}, step, versions(), layout_metadata(layout, leaves), facts)
    head.to_json()  # rejects metadata that is not JSON before anything is written
    here = target.with_name(target.name + UNFINISHED)
    with _as_checkpoint_error(target, "cannot create the folder"):
        if jax.process_index() == 0:
            _create_folder(here, target, leaves)
    copies = copied([leaf.value for leaf in leaves])
    if disk is not None:
        disk.snapshot(here / DISK)
    kept = [Leaf(leaf.path, copy, leaf.key) for leaf, copy in zip(leaves, copies, strict=True)]
    saving, dims = Saving(target), dims_of(state)
    # orbax first synchronizes the processes; from a background thread that could interleave with a step's collectives.
    arrays_written = write_arrays(here, kept) if jax.process_count() > 1 else None

    def run() -> None:
        try:
            with _SAVE_LOCK, _as_checkpoint_error(target, "cannot write"):
                (arrays_written or write_arrays(here, kept))()
                _finish(here, target, kept, dims, head, verify)
        except BaseException as error:  # noqa: BLE001 (`Saving.wait` raises it)
            saving._error = error
            if jax.process_index() == 0:  # a partial save must not keep a full disk full
                remove(here)

    saving._thread = threading.Thread(target=run, name=f"save {target.name}")
    saving._thread.start()
    return saving


def _create_folder(here: Path, target: Path, leaves: list[Leaf]) -> None:
    """Create the folder ``here`` that the save of ``target`` writes into."""
    if target.exists() and not target.is_dir():
        raise OSError(errno.ENOTDIR, "it exists and is not a folder; delete it, or use another name")
    recover_one(target)  # otherwise `here` may be its only copy
    remove(here)  # left by a save that was killed
    _check_disk_space(target, leaves)
    here.mkdir(mode=0o700, parents=True)


def _finish(here: Path, target: Path, leaves: list[Leaf], dims: dict[str, Any], head: Manifest, verify: bool) -> None:
    """Write the checksums and the manifest of written arrays, then rename the folder; runs in the background."""
    tensors, files = dict[str, TensorRecord](), dict[str, tuple[int, int]]()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        entries = [entry(here, leaf, dims.get(leaf.path)) for leaf in leaves]
        summed = pool.map(lambda tensor, leaf: _sums(here, tensor, leaf, verify), entries, leaves)
        for leaf, (tensor, some) in zip(leaves, summed, strict=True):
            tensors[leaf.path] = tensor
            files |= some
    tensors, files = gather(here, tensors, files)
    if jax.process_index() == 0:
        others = sorted(p for p in here.rglob("*") if p.is_file() and p.relative_to(here).as_posix() not in files)
        files |= {(name := p.relative_to(here).as_posix()): crc_of(here, name) for p in others}
        folders = {here / tensor.folder for tensor in tensors.values()}
        sync_files(p for p in others if p.parent not in folders)  # in those, tensorstore syncs every file
        manifest.write(here, replace(head, tensors=tensors, files=files))
        _rename(here, target)


def _sums(
    here: Path, tensor: TensorRecord, leaf: Leaf, verify: bool
) -> tuple[TensorRecord, dict[str, tuple[int, int]]]:
    """A tensor's record with the CRC-32 of each of its pieces, and size and CRC-32 of their files, which are read back.

    Pieces that another process owns have checksum -1.
    """
    held = shards(leaf.value) if leaf.value.size else []
    sums, files = list[int](), dict[str, tuple[int, int]]()
    for name, bounds in tensor.grid():
        values = next((_part(array, at, bounds) for at, array in held if _within(bounds, at)), None)
        sums.append(-1)
        if values is None:
            continue
        sums[-1] = of_file = zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        if verify or values.shape != tensor.chunk:
            buffer = np.fromfile(here / name, np.uint8)
            of_file = zlib.crc32(buffer)
            if buffer.size != tensor.piece_bytes:
                raise CheckpointError(
                    f"{here / name}, which holds {leaf.path}, has {buffer.size:,} bytes when read back."
                )
            check_values(here / name, leaf.path, buffer, tensor, bounds, sums[-1], of_file)
        files[name] = (tensor.piece_bytes, of_file)
    return replace(tensor, sums=tuple(sums)), files


def _within(inner: Bounds, outer: Bounds) -> bool:
    return all(a <= b and c >= d for (a, c), (b, d) in zip(outer, inner, strict=True))


def _part(array: np.ndarray, at: Bounds, bounds: Bounds) -> np.ndarray:
    """The values within ``bounds`` of a shard whose bounds are ``at``."""
    return array[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(bounds, at, strict=True))]


def _rename(here: Path, target: Path) -> None:
    """Rename a complete folder to its final name, replacing any folder of that name."""
    old = target.with_name(target.name + REPLACED)
    replaces = os.path.lexists(target)
    if replaces:
        remove(old)
        os.rename(target, old)
    try:
        os.rename(here, target)
    except OSError:
        if replaces:
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    remove(old)


@contextmanager
def _as_checkpoint_error(target: Path, what: str) -> Iterator[None]:
    """Turn any error of the disk or of orbax into a ``CheckpointError`` that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _NO_SPACE in reason
        if full and not isinstance(error, OSError):
            reason = _NO_SPACE  # orbax's message also lists every pending write
        free = shutil.disk_usage(_existing(target)).free if full else 0
        remedy = f" {free:,} bytes are free. Remedy: free some space." if full else ""
        raise CheckpointError(f"{target}: {what}: {reason}.{remedy}") from error


def _check_disk_space(target: Path, leaves: list[Leaf]) -> None:
    """Raise ``ENOSPC`` if the arrays cannot fit on the disk, before a partial save fills it.

    Skipped with several processes: only process 0 runs this check, and the others would start the save without it.
    """
    usage = shutil.disk_usage(_existing(target))
    needed = sum(leaf.value.nbytes for leaf in leaves)
    if jax.process_count() == 1 and usage.total and usage.free < needed:
        raise OSError(errno.ENOSPC, f"{_NO_SPACE} for {needed:,} bytes")


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())
