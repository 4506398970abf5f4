"""Folders of checkpoints of other libraries: a configuration and safetensors files, which all processes share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.errors import CheckpointError, DamagedError
from jaxpar.interop.compressed_tensors import Writes
from jaxpar.interop.safetensors import StoredTensor, create_files, read_json, write_bytes
from jaxpar.interop.tensor_map import TensorRule
from jaxpar.interop.transfer import AnyTensor, OpenFiles, read_parameter, write_parameter
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.utils.durable import remove, sync_files, sync_folder, write_atomically
from jaxpar.utils.multihost import settled

_MAX_CONFIG = 10_000_000
_UNFINISHED = ".unfinished"
_WORKERS = 4
"""Threads of a process; each reads parts of one tensor, of at most 16 MiB, at a time."""


def read_object(file: Path, missing: str) -> dict[str, Any]:
    """Returns the fields of a JSON object.

    Args:
      file: its file.
      missing: the error if there is none.

    Raises:
      CheckpointError: the file is missing.
      DamagedError: it is no JSON object.
    """
    if not os.path.isfile(file):  # of a name that is too long, Path would raise
        raise CheckpointError(missing)
    fields = read_json(file, _MAX_CONFIG)
    if not isinstance(fields, dict):
        raise DamagedError(f"{file} must be a JSON object, got {type(fields).__name__}.")
    return fields


def read_parameters(rules: Mapping[str, TensorRule], tensors: Mapping[str, AnyTensor], like: Any) -> tuple[Any, int]:
    """Returns parameters with the values of a checkpoint's tensors, and the number of bytes that this process read.

    Args:
      rules: of the parameters, by path.
      tensors: of the checkpoint; they have the right shapes.
      like: the parameters as shapes with shardings.
    """
    with OpenFiles() as files, ThreadPoolExecutor(_WORKERS) as pool:
        pairs = leaves_with_paths(like)
        made = [read_parameter(pool, files, rules[show(path)], tensors, leaf) for path, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), made), files.bytes_read


def write_folder(
    directory: str | os.PathLike[str],
    lay_out: Callable[[Path], dict[str, StoredTensor]],
    writes: Writes,
    extra: Mapping[str, np.ndarray],
    config: tuple[str, Mapping[str, Any]],
) -> None:
    """Writes a checkpoint; the folder gets its name when it is complete. All processes call it.

    Args:
      directory: the folder to create.
      lay_out: returns where each tensor is stored in a folder.
      writes: the arrays, with the rules of their tensors.
      extra: small tensors beside them, which one process writes.
      config: name and fields of the configuration.

    Raises:
      CheckpointError: the folder exists.
    """
    target = Path(os.path.abspath(directory))
    here = target.with_name(target.name + _UNFINISHED)
    stored, first = lay_out(here), jax.process_index() == 0

    def create() -> None:
        if target.exists():
            raise CheckpointError(f"export: {target} exists. Remedy: delete it, or use another name.")
        remove(here)  # left by an export that was killed
        here.mkdir(parents=True)
        create_files(stored.values())

    def write() -> None:
        with OpenFiles(os.O_WRONLY) as files:
            for rule, array in writes:
                write_parameter(files, rule, stored, array)
            for name, numbers in extra.items() if first else ():
                write_bytes(files.descriptor(stored[name].file), stored[name], 0, memoryview(numbers.view(np.uint8)))
        sync_files({tensor.file for tensor in stored.values()})

    def finish() -> None:
        name, fields = config
        write_atomically(here / name, json.dumps(fields, indent=2, sort_keys=True) + "\n")
        os.rename(here, target)
        sync_folder(target.parent)

    settled(lambda: create() if first else None)
    settled(write)
    settled(lambda: finish() if first else None)
