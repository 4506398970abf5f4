"""Match a checkpoint's tensors to those of a state: by path, by renaming, and between stacked and separate layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpar.checkpoint.manifest import TensorRecord
from jaxpar.checkpoint.snapshot import Leaf
from jaxpar.errors import CheckpointError, did_you_mean

_MOST = 20
"""Number of tensors of each kind that an error lists."""
_NUMBERED = re.compile(r"(?:(.*)_)?([0-9]{1,6})")


@dataclass(frozen=True)
class Source:
    """Where a tensor's values come from: one tensor, one row of it, or (``stacked``) one tensor for each row."""

    tensors: tuple[tuple[str, TensorRecord], ...]
    row: int | None = None
    stacked: bool = False


def match(
    leaves: Sequence[Leaf],
    tensors: Mapping[str, TensorRecord],
    where: str,
    *,
    only: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
) -> dict[str, Source]:
    """Returns a source for every leaf whose path begins with an entry of ``only`` (every leaf if ``only`` is empty).

    Separate layers (``blocks/0/w``, ``blocks/1/w``, or ``block_0/w``, ...) are stacked along a new leading dim
    (``blocks/w``, ``block/w``), and a stack is split into separate layers, where the path itself is missing and the
    shapes match.

    Args:
      leaves: the tensors of the state.
      tensors: the records of the checkpoint, by path.
      where: the checkpoint's name, for errors.
      only: paths or path prefixes to restore.
      rename: maps paths or path prefixes of the checkpoint to those of the state.
      cast: whether a floating tensor may have another floating dtype than the leaf.

    Raises:
      CheckpointError: lists the tensors that are missing, extra, or of another shape or dtype; or an entry of
        ``rename`` or ``only`` matches nothing.
    """
    named = _renamed(tensors, rename or {}, where)
    for prefix in only:
        if not any(_below(leaf.path, prefix) for leaf in leaves):
            raise CheckpointError(
                "only: no path of `like` begins with "
                f"{prefix!r}.{did_you_mean(prefix, {p.path.split('/')[0] for p in leaves})}"
            )
    selected = {leaf.path: leaf for leaf in leaves if not only or any(_below(leaf.path, prefix) for prefix in only)}
    stacks, found, used = _stacks(named), dict[str, Source](), set[str]()
    missing, other = list[str](), list[str]()
    for path, leaf in selected.items():
        source = _source(leaf, named, stacks, cast)
        if source is None:
            missing.append(f"{path} {_described(leaf)}")
            continue
        used |= {name for name, _ in source.tensors}
        if not _fits(leaf, source, cast):
            other.append(
                f"{path} is {_described(source.tensors[0][1])} in the checkpoint, but {_described(leaf)} in the state"
            )
        found[path] = source
    unused = [name for name in named if name not in used and (not only or any(_below(name, prefix) for prefix in only))]
    extra = [f"{name} {_described(named[name])}" for name in unused]
    lines = [*listed("missing in the checkpoint", missing), *listed("only in the checkpoint", extra)]
    lines += listed("of another shape or dtype", other)
    if lines:
        remedy = (
            "Remedy: use the model and optimizer of the checkpoint, rename= for other names, or only= for a part, "
            "such as only=['params']."
        )
        raise CheckpointError("\n".join([f"{where} does not match the state to restore:", *lines, remedy]))
    return found


def _renamed(tensors: Mapping[str, TensorRecord], rename: Mapping[str, str], where: str) -> dict[str, TensorRecord]:
    """The checkpoint's tensors by their names in the state; the longest matching prefix of ``rename`` applies."""
    olds = sorted(rename, key=len, reverse=True)
    for old in olds:
        if not any(_below(path, old) for path in tensors):
            raise CheckpointError(f"rename: {where} has no tensor {old!r}.{did_you_mean(old, tensors)}")
    named: dict[str, TensorRecord] = {}
    for path, tensor in tensors.items():
        fits = next((old for old in olds if _below(path, old)), None)
        name = path if fits is None else rename[fits] + path[len(fits) :]
        if name in named:
            raise CheckpointError(f"rename: two tensors of {where} would become {name!r}.")
        named[name] = tensor
    return named


def _below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")


def _stacks(named: Iterable[str]) -> dict[str, dict[int, str]]:
    """For each possible stack path, the paths of its rows by row number."""
    found: dict[str, dict[int, str]] = {}
    for path in named:
        for stack, row in _rows(path):
            found.setdefault(stack, {})[row] = path
    return found


def _rows(path: str) -> list[tuple[str, int]]:
    """Each way to read a path as a row of a stack: the stack's path and the row number."""
    parts, found = path.split("/"), []
    for i, part in enumerate(parts):
        if number := _NUMBERED.fullmatch(part):
            stem = [number[1]] if number[1] else []
            found.append(("/".join([*parts[:i], *stem, *parts[i + 1 :]]), int(number[2])))
    return found


def _source(
    leaf: Leaf, named: Mapping[str, TensorRecord], stacks: Mapping[str, Mapping[int, str]], cast: bool
) -> Source | None:
    if leaf.path in named:
        return Source(((leaf.path, named[leaf.path]),))
    rows = stacks.get(leaf.path, {})
    found = [Source(((stack, named[stack]),), row=row) for stack, row in _rows(leaf.path) if stack in named]
    if leaf.shape and rows and sorted(rows) == list(range(leaf.shape[0])):
        found.insert(0, Source(tuple((rows[i], named[rows[i]]) for i in sorted(rows)), stacked=True))
    return next((source for source in found if _fits(leaf, source, cast)), None)


def _fits(leaf: Leaf, source: Source, cast: bool) -> bool:
    for _, tensor in source.tensors:
        shape = tensor.shape
        if source.row is not None:
            if not shape or source.row >= shape[0]:
                return False
            shape = shape[1:]
        expected = leaf.shape[1:] if source.stacked else leaf.shape
        same = tensor.dtype == str(leaf.dtype) or (cast and _is_floating(tensor.dtype) and _is_floating(leaf.dtype))
        if shape != expected or not same or tensor.key != leaf.key:
            return False
    return True


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # a name in a manifest that is no dtype's
        return False


def _described(tensor: Leaf | TensorRecord) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}{f' of {tensor.key} keys' if tensor.key else ''}"


def listed(title: str, texts: Sequence[str]) -> list[str]:
    """Returns lines that name tensors under a title, at most so many."""
    more = [f"and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    return [f"- {title}: {text}" for text in [*texts[:_MOST], *more]]
