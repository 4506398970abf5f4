"""Verify that the files on disk match the manifest, for one checkpoint or every step of a run; needs no jax."""

from __future__ import annotations

import itertools
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.checkpoint.manifest import NAME, Bounds, Manifest, TensorPiece, TensorRecord, read
from jaxpar.checkpoint.validate import opened
from jaxpar.errors import CheckpointError, DamagedError
from jaxpar.utils.durable import link_text

_BLOCK_BYTES, _MOST, _PENDING = 1 << 20, 20, 256
STEP = re.compile(r"0|[1-9][0-9]{0,14}")
"""Matches the folder name of a step; other names in a run's folder are ignored."""


@dataclass(frozen=True)
class Health:
    """The result of verifying one step of a run.

    Attributes:
      step: its number.
      problems: one text each; empty if the checkpoint is intact.
      bytes, tensors: total bytes and number of its tensors.
      when: the time of the save from the manifest, or empty.
    """

    step: int
    problems: tuple[str, ...]
    bytes: int = 0
    tensors: int = 0
    when: str = ""

    @property
    def good(self) -> bool:
        return not self.problems


def problems_of(
    folder: str | os.PathLike[str], manifest: Manifest | None = None, *, step: int | None = None
) -> list[str]:
    """Read every file of a checkpoint completely and list all problems.

    Args:
      folder: the folder of one checkpoint.
      manifest: its manifest, if already read.
      step: the step of which it should be.

    Returns:
      One text per problem, with the tensor and the file, or the first 20 of them; empty if the checkpoint is intact.
    """
    root = Path(folder)
    try:
        manifest = manifest or read(root)
    except CheckpointError as error:
        return [str(error)]
    tensors = manifest.tensors.items()
    owners = {piece[0]: (path, tensor, piece) for path, tensor in tensors for piece in tensor.pieces()}

    def look(name: str) -> str | None:
        if name not in owners:
            return file_problem(root, name, manifest)
        path, tensor, piece = owners[name]
        try:
            read_piece(root, manifest, path, tensor, piece, np.empty(tensor.piece_bytes, np.uint8))
        except DamagedError as error:
            return str(error)
        return None

    found = [wrong_step(root, manifest, step)] if step is not None and manifest.step not in (None, step) else []
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for problem in map_in_order(pool, look, sorted(manifest.files)):
            if problem is not None:
                found.append(problem)
            if len(found) == _MOST:
                return [*found, "and possibly more: the search stopped here."]
    return found


def map_in_order[T, R](pool: Executor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Like ``pool.map``, which would queue all items immediately; a manifest may list a million files."""
    for some in itertools.batched(items, _PENDING):
        yield from pool.map(work, some)


def check(folder: str | os.PathLike[str], step: int | None = None) -> Manifest:
    """Returns the manifest of a checkpoint after verifying every byte of it.

    Raises:
      CheckpointError: there is no checkpoint.
      DamagedError: lists the problems; or the checkpoint is not of ``step``.
    """
    manifest = read(folder)
    found = problems_of(folder, manifest, step=step)
    if found:
        lines = "\n".join(f"{i}. {p}" for i, p in enumerate(found, 1))
        raise DamagedError(found[0] if len(found) == 1 else f"{folder}: {len(found)} problems:\n{lines}")
    return manifest


def wrong_step(folder: Path, manifest: Manifest, step: int) -> str:
    return (
        f"{folder / NAME} is of step {manifest.step}, but its folder is that of step {step}: the manifest belongs "
        "to another checkpoint."
    )


def steps_in(folder: str | os.PathLike[str]) -> list[int]:
    """Returns the steps whose folder has a manifest, oldest first; their data is not verified.

    A step's folder and its manifest must not be symbolic links.

    Raises:
      CheckpointError: the folder exists but cannot be read, so an empty list would be wrong.
    """
    root = Path(folder)
    return sorted(int(name) for name in names_in(root) if STEP.fullmatch(name) and not incomplete(root / name))


def names_in(folder: Path) -> list[str]:
    """Returns the names in a run's folder, none if there is no such folder. Raises as :func:`steps_in`."""
    try:
        return os.listdir(folder) if os.path.isdir(folder) else []
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _cannot_read(folder, error) from error


def incomplete(folder: Path) -> str | None:
    """Returns why ``folder``, in a run's folder, cannot be a complete checkpoint, or ``None``; its data is not read.

    Raises as :func:`steps_in`.
    """
    try:
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            return f"{folder} is {_kind(folder, mode)}, not a folder."
        mode = os.lstat(folder / NAME).st_mode
    except FileNotFoundError:
        return f"{folder} is incomplete: {NAME} is missing."
    except OSError as error:
        raise _cannot_read(folder.parent, error) from error
    return None if stat.S_ISREG(mode) else f"{folder / NAME} is {_kind(folder / NAME, mode)}, not a regular file."


def _kind(path: Path, mode: int) -> str:
    kinds = {stat.S_IFLNK: link_text(path), stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def _cannot_read(folder: Path, error: OSError) -> CheckpointError:
    text = f"{folder} cannot be read: {error.strerror}."
    return CheckpointError(f"{text} Remedy: grant read permission on it and on its step folders.")


def health(folder: str | os.PathLike[str]) -> Iterator[Health]:
    """Verify each step in a run's folder, oldest first, reading every byte; ``folder`` may also be a single checkpoint.

    Raises:
      CheckpointError: the folder is neither a checkpoint nor has one.
    """
    root = Path(folder)
    remedy = "Remedy: the folder of a run's checkpoints, or of one of them."
    if not os.path.isdir(root):
        raise CheckpointError(f"{root!s:.200} is not a folder, so it holds no checkpoint. {remedy}")
    single = (root / NAME).exists()
    steps = [None] if single else steps_in(root)
    if not steps:
        raise CheckpointError(f"{root} holds no checkpoint: it has neither {NAME} nor a step folder with one. {remedy}")
    for step in steps:
        at = root if step is None else root / str(step)
        try:
            manifest = read(at)
        except CheckpointError as error:
            yield Health(step or 0, (str(error),))
            continue
        found = problems_of(at, manifest, step=step)
        when = manifest.metadata.get("when", "")
        number = (manifest.step or 0) if step is None else step
        yield Health(number, tuple(found), manifest.bytes, len(manifest.tensors), when if isinstance(when, str) else "")


def file_problem(root: Path, name: str, manifest: Manifest) -> str | None:
    """Returns the problem of a file that holds no tensor's values, or ``None``."""
    (size, total), file = manifest.files[name], root / name
    try:
        there, found = crc_of(root, name, most=size)
    except (OSError, ValueError) as error:
        return unreadable(file, error)
    if there != size:
        return f"{file} has {there:,} bytes, expected {size:,}."
    if found == total:
        return None
    return f"{file} was changed after it was written: its checksum is {found:08x}, expected {total:08x}."


def read_piece(
    root: Path, manifest: Manifest, path: str, tensor: TensorRecord, piece: TensorPiece, buffer: np.ndarray
) -> None:
    """Read the file of a tensor's piece into ``buffer``, and verify its bytes and its values.

    Raises:
      DamagedError: with the name of the tensor and the file.
    """
    name, bounds, of_values = piece
    (size, total), into = manifest.files[name], memoryview(buffer)
    try:
        with opened(root, name) as f:
            there = os.fstat(f.fileno()).st_size
            if there != size or size != into.nbytes:
                raise DamagedError(f"{root / name}, which holds {path}, has {there:,} bytes, expected {into.nbytes:,}.")
            at = 0
            while at < size and (got := f.readinto(into[at:])):
                at += got
    except DamagedError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(unreadable(root / name, error, path)) from error
    found = zlib.crc32(into) if at == size else -1
    if found != total:
        raise DamagedError(
            f"{root / name}, which holds {path}, was changed after it was written: its checksum is "
            f"{found & 0xFFFFFFFF:08x}, expected {total:08x}."
        )
    check_values(root / name, path, buffer, tensor, bounds, of_values, total)


def check_values(
    file: Path, path: str, buffer: np.ndarray, tensor: TensorRecord, bounds: Bounds, total: int, of_file: int
) -> None:
    """Compare a piece's values with the checksum ``total`` that they had in memory.

    Args:
      of_file: the checksum of the piece's file, which is that of the values unless the piece extends beyond the tensor.

    Raises:
      DamagedError: with the name of the tensor and the file.
    """
    shape = tuple(stop - start for start, stop in bounds)
    found = of_file
    if shape != tensor.chunk:  # the piece extends beyond the tensor
        padded = buffer.view(f"V{tensor.itemsize}").reshape(tensor.chunk)
        found = zlib.crc32(np.ascontiguousarray(padded[tuple(slice(size) for size in shape)]))
    if found != total:
        raise DamagedError(
            f"{file} holds values of {path} that differ from those in memory: their checksum is {found:08x}, "
            f"expected {total:08x}."
        )


def crc_of(root: Path, name: str, most: int | None = None) -> tuple[int, int]:
    """Returns the size in bytes and the CRC-32 of a checkpoint's file; a file of more than ``most`` is not read."""
    total = 0
    with opened(root, name) as f:
        size = os.fstat(f.fileno()).st_size
        if most is not None and size > most:
            return size, -1
        size = 0
        while block := f.read(_BLOCK_BYTES):
            size, total = size + len(block), zlib.crc32(block, total)
    return size, total


def unreadable(file: Path, error: Exception, path: str = "") -> str:
    """Describe an error of reading a file."""
    if isinstance(error, DamagedError):
        return str(error)
    what = f"{file}{f', which holds {path},' if path else ''}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{what} is missing."
    return f"{what} cannot be read: {getattr(error, 'strerror', None) or error}."
