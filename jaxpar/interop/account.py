"""Accounts for every tensor of a checkpoint: what is missing, unexpected, or of another shape or dtype."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from jaxpar.errors import CheckpointError
from jaxpar.interop.quantized_tensors import ScaledTensor
from jaxpar.interop.safetensors import DTYPES, StoredTensor
from jaxpar.interop.tensor_map import TensorRule

_MOST = 20
"""The number of kinds of tensors that an error lists for each problem."""


def check_tensors(
    rules: Iterable[TensorRule],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor | ScaledTensor],
    where: str,
    *,
    holds: str = "the tensors of the model that its config.json describes",
    remedy: str = "config.json and weights of one model; dequantize weights in 8 bits first",
) -> None:
    """Checks that a checkpoint has exactly the tensors of a model.

    Args:
      rules: of the model.
      shapes: of the parameters, by path.
      tensors: of the checkpoint, by name, without those to ignore.
      where: the checkpoint's name, for errors.
      holds: what it must hold, for errors.
      remedy: what to do otherwise, for errors.

    Raises:
      CheckpointError: lists the tensors that are missing, unexpected, or of another shape or dtype. Tensors that differ
        only in their numbers (layers, experts) are listed once.
    """
    expected = {name: rule.shape(shapes[rule.path]) for rule in rules for _, name in rule.names(shapes[rule.path])}
    missing = _kinds(name for name in expected if name not in tensors)
    unexpected = _kinds(name for name in tensors if name not in expected)
    nearby = [name for names in unexpected.values() for name in names][:1000]
    problems = [_with_nearest(kind, names, nearby) for kind, names in list(missing.items())[:_MOST]]
    problems += [
        f"unexpected: {_named(kind, names)} {list(tensors[names[0]].shape)}" for kind, names in unexpected.items()
    ][:_MOST]
    found = {name: tensors[name] for name in expected if name in tensors}
    shaped = _kinds(name for name, tensor in found.items() if tensor.shape != expected[name])
    problems += [
        f"shape: {_named(kind, names)} must be {list(expected[names[0]])}, got {list(found[names[0]].shape)}"
        for kind, names in shaped.items()
    ][:_MOST]
    typed = _kinds(name for name, tensor in found.items() if tensor.dtype not in DTYPES)
    problems += [
        f"dtype: {_named(kind, names)} must be one of {', '.join(DTYPES)}, got {found[names[0]].dtype}"
        for kind, names in typed.items()
    ][:_MOST]
    if problems:
        raise CheckpointError(
            "\n".join(
                [
                    f"{where} does not hold {holds}:",
                    *(f"- {problem}" for problem in problems),
                    f"Remedy: {remedy}.",
                ]
            )
        )


def _kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names that differ only in numbers."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return found


def _named(kind: str, names: list[str]) -> str:
    return f"{names[0]:.200}" if len(names) == 1 else f"{kind:.200} ({len(names)} tensors)"


def _with_nearest(kind: str, names: list[str], others: list[str]) -> str:
    """Describes missing tensors, with the nearest unexpected name of the same layer, if there is one."""
    numbers = re.findall(r"\d+", names[0])
    same_layer = [name for name in others if re.findall(r"\d+", name) == numbers]
    near = difflib.get_close_matches(names[0], same_layer, n=1, cutoff=0.8)
    return f"missing: {_named(kind, names)}{f'; the nearest unexpected name is {near[0]:.200}' if near else ''}"
