"""The entries of a manifest other than the tensors: package versions, layout, PRNG keys, time."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
from typing import Any

import jax
import numpy as np

from jaxpar.checkpoint.snapshot import Leaf
from jaxpar.sharding.layout import Layout


def layout_metadata(layout: Layout | None, leaves: list[Leaf]) -> dict[str, Any]:
    """The mesh (of the layout, or of the first tensor that has one), the process count, and a digest of the rules."""
    found = (getattr(getattr(leaf.value, "sharding", None), "mesh", None) for leaf in leaves)
    mesh = layout.mesh if layout is not None else next((m for m in found if m is not None), None)
    sizes = {} if mesh is None else {str(axis): int(size) for axis, size in mesh.shape.items()}
    found_layout: dict[str, Any] = {"mesh": sizes, "processes": jax.process_count()}
    if layout is not None:
        text = json.dumps(layout.rules.to_dict(), sort_keys=True)
        found_layout["rules"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return found_layout


def keys_of(leaves: list[Leaf]) -> dict[str, Any]:
    """The data of the state's small PRNG keys, for display; a restore reads the tensors."""
    few = [leaf for leaf in leaves if leaf.key is not None and leaf.value.is_fully_addressable and leaf.value.size <= 8]
    return {leaf.path: {"impl": leaf.key, "data": np.asarray(leaf.value).tolist()} for leaf in few}


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that write the checkpoint."""
    names = ("jaxpar", "jax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def now() -> str:
    """The current time in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
