"""Muon (K. Jordan et al. 2024) for any annotated model: the logical dims say which weights are matrices.

The optimizer is ``optax.contrib.muon``, which has to be told the dims of every weight that is not a plain matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optax
from optax.contrib import MuonDimensionNumbers

from jaxpar.errors import ConfigError
from jaxpar.parallel.collectives.gather_reduce import EXPERTS
from jaxpar.sharding.names import Names
from jaxpar.training.decay import shapes_and_names
from jaxpar.training.model import MakeModel, Path, map_with_paths, show
from jaxpar.training.model.lora_targets import STACKED, input_dims, matches, matching, stacked_dims
from jaxpar.training.model.matrices import without_biases

VOCAB = "vocab"


@dataclass(frozen=True)
class MuonConfig:
    """Which weights Muon updates; Adam updates all others.

    Attributes:
      targets: patterns of their paths, as for :class:`jaxpar.lora.LoraConfig`. By default the matrices of stacked
        layers; in a model without stacked layers, all matrices that have no dim ``vocab``. Biases of several dims are
        no matrices.
      inputs: pattern → the number of dims that the weight sums over, where it is not found: by default the number that
        makes its matrices most nearly square.
      stacked: logical dims along which a parameter holds separate matrices.

    Raises:
      ConfigError: ``targets`` or ``stacked`` is no list of texts.
    """

    targets: tuple[str, ...] = ()
    inputs: Mapping[str, int] = field(default_factory=dict)
    stacked: tuple[str, ...] = STACKED

    def __post_init__(self) -> None:
        for name, example in (("targets", "attention/*"), ("stacked", "layers")):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"muon: {name} must be a list, got {value!r}. Remedy: {name}: [{example}].")


def muon(
    make_model: MakeModel,
    learning_rate: float | optax.Schedule,
    *,
    adam_learning_rate: float | optax.Schedule | None = None,
    config: MuonConfig | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """Returns Muon for the matrices of a model, and Adam for all other parameters.

    Each step orthogonalizes the momentum of each matrix by Newton-Schulz iterations. The momentum is sharded like its
    parameter. The iterations multiply each matrix with its transpose, so the compiler gathers a sharded matrix in each
    of them.

    Args:
      make_model: as for :func:`jaxpar.init`; it is traced for the shapes and logical dims of the parameters.
      learning_rate: of the matrices.
      adam_learning_rate: of all other parameters; by default ``learning_rate``.
      config: which weights are matrices, and which of their dims are inputs.
      options: the other arguments of ``optax.contrib.muon``: ``weight_decay`` of matrices, ``adam_weight_decay``,
        ``adam_b2``, ``beta``, ``ns_steps`` and so on.

    Raises:
      ConfigError: no parameter is such a matrix, or a pattern matches none.

    >>> import jax, jaxpar as jp
    >>> make_model = lambda key: {
    ...     "up": jp.tag(jax.random.normal(key, (2, 8, 16)), "layers", "embed", "mlp"),
    ...     "embedding": jp.tag(jax.random.normal(key, (32, 8)), "vocab", "embed"),
    ... }
    >>> tx = muon(make_model, 0.02, adam_learning_rate=1e-3)
    >>> matrices_of(make_model)
    {'up': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,))}
    """
    found = _find(make_model, config)
    numbers = lambda params: map_with_paths(lambda path, _: found.get(path), params)
    return optax.contrib.muon(
        learning_rate, adam_learning_rate=adam_learning_rate, muon_weight_dimension_numbers=numbers, **options
    )


def matrices_of(make_model: MakeModel, config: MuonConfig | None = None) -> dict[str, MuonDimensionNumbers]:
    """Returns the weights that :func:`muon` takes for matrices, by path, each with its dims of inputs and outputs.

    Args:
      make_model, config: as for :func:`muon`.

    Raises:
      ConfigError: as :func:`muon`.
    """
    return {show(path): numbers for path, numbers in _find(make_model, config).items()}


def _find(make_model: MakeModel, config: MuonConfig | None) -> dict[Path, MuonDimensionNumbers]:
    return find_matrices(config or MuonConfig(), *shapes_and_names(make_model))


def find_matrices(
    config: MuonConfig, shapes: Mapping[Path, tuple[int, ...]], names: Mapping[Path, Names]
) -> dict[Path, MuonDimensionNumbers]:
    """Returns the dims of inputs and outputs of every weight that Muon updates.

    Args:
      config: which weights these are.
      shapes: of the parameters, by path.
      names: their logical dims; parameters without any are missing.

    Raises:
      ConfigError: no parameter is such a matrix, or a pattern matches none.
    """
    stacked = {path: stacked_dims(names.get(path), shape, config.stacked) for path, shape in shapes.items()}
    matrices = {path: shape for path, shape in shapes.items() if len(shape) - stacked[path] >= 2}
    middle = {
        path: stacked[path] + input_dims("muon", config.inputs, path, shape, stacked[path], names.get(path))
        for path, shape in matrices.items()
    }
    weights = without_biases({path: names.get(path) for path in matrices}, stacked, middle)
    found = [path for path in weights if path in names and VOCAB not in names[path]]
    found = [path for path in found if stacked[path] and names[path][0] != EXPERTS] or found
    if weights:
        shapes = {path: shapes[path] for path in weights}
        for key, patterns in (("targets", config.targets), ("inputs", config.inputs)):
            for pattern in patterns:
                matching(f"muon: {key}", pattern, shapes)
    if config.targets:
        found = [path for path in weights if any(matches(path, pattern) for pattern in config.targets)]
    if not found:
        raise ConfigError(
            "muon: no parameter is a matrix of a layer, because none has two logical dims beside "
            f"{', '.join(config.stacked)} and {VOCAB}. Remedy: annotate the model, or targets: patterns of the paths "
            "of its matrices."
        )
    dims = {path: tuple(range(len(shapes[path]))) for path in found}
    return {
        path: MuonDimensionNumbers(dims[path][stacked[path] : middle[path]], dims[path][middle[path] :])
        for path in found
    }
