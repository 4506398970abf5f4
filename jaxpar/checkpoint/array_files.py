"""Write arrays to disk as raw pieces through orbax (zarr without compression), readable by any zarr reader."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax

from jaxpar.checkpoint.manifest import ARRAYS, TensorRecord
from jaxpar.checkpoint.snapshot import Leaf
from jaxpar.errors import CheckpointError

PIECE = 16 << 20
"""Maximum bytes of a piece, the smallest unit that a process can read and verify."""


def write_arrays(here: Path, leaves: list[Leaf]) -> Callable[[], None]:
    """Start writing the arrays with orbax; the returned function blocks until they are written."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_quiet)
    tree: dict[str, Any] = {}
    for leaf in leaves:
        *parents, last = _names(leaf.path)
        if leaf.value.size:  # orbax writes no empty array
            functools.reduce(lambda at, name: at.setdefault(name, {}), parents, tree)[last] = leaf.value
    if not tree:
        return lambda: None
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    writer = ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=False, use_compression=False, type_handler_registry=registry
        )
    )
    sizes = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=PIECE), tree)
    writer.save(here / ARRAYS, args=ocp.args.PyTreeSave(tree, save_args=sizes))

    def wait() -> None:
        writer.wait_until_finished()
        writer.close()

    return wait


def _quiet(record: logging.LogRecord) -> bool:
    """Filter orbax's warning at every save that there is nothing to merge; here that is always so."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def _names(path: str) -> list[str]:
    """The parts of a path, percent-encoded except for letters, digits, ``_`` and ``-``: orbax joins them by dots."""
    return [quote(part, safe="").replace(".", "%2E").replace("~", "%7E") or "%" for part in path.split("/")]


def entry(here: Path, leaf: Leaf, dims: Any) -> TensorRecord:
    """Returns a leaf's record, without checksums, with the pieces that orbax chose."""
    folder, chunk = f"{ARRAYS}/{'.'.join(_names(leaf.path))}", leaf.shape
    if leaf.value.size:
        found = json.loads((here / folder / ".zarray").read_text())
        chunk = tuple(found["chunks"])
        if found["compressor"] is not None or found["order"] != "C" or found["dimension_separator"] != ".":
            raise CheckpointError(
                f"{here / folder}: orbax wrote {leaf.path} in a format that this version of jaxpar does not "
                f"support: {found}."
            )
    names = None if dims is None else tuple(dims)
    return TensorRecord(str(leaf.dtype), leaf.dtype.itemsize, leaf.shape, chunk, folder, (), names, leaf.spec, leaf.key)
