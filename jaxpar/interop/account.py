"""Accounts for every tensor of a checkpoint: what is missing, unexpected, or of another shape or dtype."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping

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
    unexpected = [name for name in tensors if name not in expected]
    found = [name for name in expected if name in tensors]
    problems = [
        *_kinds("missing", (n for n in expected if n not in tensors), lambda name: _nearest(name, unexpected[:1000])),
        *_kinds("unexpected", unexpected, lambda name: f" {list(tensors[name].shape)}"),
        *_kinds(
            "shape",
            (name for name in found if tensors[name].shape != expected[name]),
            lambda name: f" must be {list(expected[name])}, got {list(tensors[name].shape)}",
        ),
        *_kinds(
            "dtype",
            (name for name in found if tensors[name].dtype not in DTYPES),
            lambda name: f" must be one of {', '.join(DTYPES)}, got {tensors[name].dtype}",
        ),
    ]
    if problems:
        raise CheckpointError("\n".join([f"{where} does not hold {holds}:", *problems, f"Remedy: {remedy}."]))


def _kinds(problem: str, names: Iterable[str], describe: Callable[[str], str]) -> list[str]:
    """Returns a line for each kind of tensors: names that differ only in numbers. The first one is described."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    shown = {
        kind: f"{same[0]:.200}" if len(same) == 1 else f"{kind:.200} ({len(same)} tensors)"
        for kind, same in list(kinds.items())[:_MOST]
    }
    return [f"- {problem}: {text}{describe(kinds[kind][0])}" for kind, text in shown.items()]


def _nearest(name: str, others: list[str]) -> str:
    """Describes the nearest unexpected name of the same layer, if there is one."""
    numbers = re.findall(r"\d+", name)
    same_layer = [other for other in others if re.findall(r"\d+", other) == numbers]
    near = difflib.get_close_matches(name, same_layer, n=1, cutoff=0.8)
    return f"; the nearest unexpected name is {near[0]:.200}" if near else ""
