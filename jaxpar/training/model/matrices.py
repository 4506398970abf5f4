"""Which parameters of a model are matrices: stacked vectors are none, nor are biases of several dims."""

from __future__ import annotations

from collections.abc import Mapping

from jaxpar.sharding.names import Names
from jaxpar.training.model.lora_targets import input_dims, stacked_dims
from jaxpar.training.model.parts import Path

_VECTORS = ("bias", "scale")
"""How Flax names the vectors of its layers; a name such as ``q_bias`` ends like one of them."""


def find_weights(
    shapes: Mapping[Path, tuple[int, ...]], names: Mapping[Path, Names | None]
) -> tuple[list[Path], list[Path]]:
    """Returns the matrices, and the other parameters with two dims or more beside the stacked ones.

    The latter are biases and scales: they have the dims of one side of a weight, or a vector's name. The name also
    tells the stacked vectors of a model whose dims have no names.

    Args:
      shapes: of the parameters, by path.
      names: their logical dims; parameters without any may be missing.

    >>> shapes = {("q",): (3, 8, 2, 4), ("q_shift",): (3, 2, 4), ("norm",): (3, 8), ("other", "scale"): (3, 8)}
    >>> dims = {"q": ("embed", "heads", "head_dim"), "q_shift": ("heads", "head_dim"), "norm": ("embed",)}
    >>> find_weights(shapes, {(name,): ("layers", *rest) for name, rest in dims.items()})
    ([('q',)], [('q_shift',), ('other', 'scale')])
    """
    stacked = {path: stacked_dims(names.get(path), shape) for path, shape in shapes.items()}
    wide = {path: shape for path, shape in shapes.items() if len(shape) - stacked[path] >= 2}
    inputs = {path: input_dims("", {}, path, shape, stacked[path], names.get(path)) for path, shape in wide.items()}
    middle = {path: stacked[path] + count for path, count in inputs.items()}
    weights = without_biases({path: names.get(path) for path in wide}, stacked, middle)
    matrices = [path for path in weights if not _is_vector(path)]
    return matrices, [path for path in wide if path not in matrices]


def without_biases(
    names: Mapping[Path, Names | None], stacked: Mapping[Path, int], middle: Mapping[Path, int]
) -> list[Path]:
    """Returns the paths of weights that are no biases of several dims, such as heads and their width.

    Such a bias has the dims of the outputs, or of the inputs, of another weight.

    Args:
      names: the logical dims of the weights with two dims or more beside the stacked ones.
      stacked: the numbers of these.
      middle: the numbers of dims before those of the outputs.
    """
    sides = set()
    for path, dims in names.items():
        if dims is not None:
            sides |= {dims[stacked[path] : middle[path]], dims[middle[path] :]}
    unstacked = {path: None if dims is None else dims[stacked[path] :] for path, dims in names.items()}
    return [path for path, dims in unstacked.items() if dims is None or None in dims or dims not in sides]


def _is_vector(path: Path) -> bool:
    last = [name for name in path if name != "value"][-1:]  # NNX adds one step to the path of a variable
    return any(name == vector or name.endswith(f"_{vector}") for name in last for vector in _VECTORS)
