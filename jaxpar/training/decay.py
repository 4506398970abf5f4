"""Which parameters weight decay shrinks: a mask for optax, by the paths and the logical dims of a model's parameters.

``ndim > 1`` is wrong for layers that are stacked in one array: the scales of their norms have two dims.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar.errors import ConfigError, listing
from jaxpar.sharding.names import Names
from jaxpar.training.model import MakeModel, Path, build_with_or_without_mesh, leaves_with_paths, map_with_paths, show
from jaxpar.training.model.lora_targets import STACKED, matches, matching, stacked_dims

VECTORS = "vectors"


@dataclass(frozen=True)
class DecayMask:
    """The ``mask`` that optax takes beside ``weight_decay``: called with parameters, it returns which of them decay.

    Attributes:
      excluded: for each parameter, by path, the entry of ``exclude`` that matches it; ``None`` where it decays.
    """

    excluded: tuple[tuple[Path, str | None], ...]

    def __call__(self, params: Any) -> Any:
        """Returns a tree like ``params``, or like a part of them, of bools.

        Raises:
          ConfigError: ``params`` has a parameter that the model has not.
        """
        table = dict(self.excluded)

        def decays(path: Path, _: Any) -> bool:
            if path not in table:
                raise ConfigError(
                    f"optimizer.decay: {show(path)} is no parameter of the model for which the rule was made, whose "
                    f"parameters are {listing([show(known) for known in table][:4])}. Remedy: decay_mask(make_model) "
                    "of this model."
                )
            return table[path] is None

        return map_with_paths(decays, params)


def decay_mask(
    make_model: MakeModel, exclude: Sequence[str] = ("norm", "bias", "embed"), *, stacked: Collection[str] = STACKED
) -> DecayMask:
    """Returns the mask of weight decay for all parameters of a model but some.

    Args:
      make_model: as for :func:`jaxpar.init`; it is traced for the shapes and logical dims of the parameters.
      exclude: what does not decay. ``vectors`` are the parameters with fewer than two dims. Another word matches the
        parameters that have it in their path (``norm`` matches ``blocks/attention_norm/scale``), in lower or upper
        case, and the vectors whose logical dim it is. An entry with ``*``, ``?`` or a slash is a pattern of paths, as
        for :class:`jaxpar.lora.LoraConfig`.
      stacked: logical dims along which a parameter holds separate weights, such as layers; they do not count as dims.

    Raises:
      ConfigError: an entry matches no parameter, or the entries match all of them.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {
    ...     "up": {"kernel": jp.tag(jnp.ones((2, 8, 16)), "layers", "embed", "mlp")},
    ...     "scale": jp.tag(jnp.ones((2, 8)), "layers", "embed"),
    ... }
    >>> mask = decay_mask(make_model, ["vectors"])
    >>> tx = optax.adamw(1e-3, weight_decay=0.1, mask=mask)
    >>> mask(jax.eval_shape(lambda: {"up": {"kernel": jnp.ones((2, 8, 16))}, "scale": jnp.ones((2, 8))}))
    {'scale': False, 'up': {'kernel': True}}
    """
    if isinstance(exclude, str) or not exclude or not all(isinstance(word, str) and word for word in exclude):
        raise ConfigError(f"decay: exclude must be a list of texts, got {exclude!r}. Remedy: exclude: [norm, bias].")
    shapes, names = shapes_and_names(make_model)
    vectors = {
        path: () if path not in names else names[path][stacked_dims(names[path], shape, stacked) :]
        for path, shape in shapes.items()
        if len(shape) - stacked_dims(names.get(path), shape, stacked) < 2
    }
    excluded: dict[Path, str] = {}
    for word in exclude:
        matched = _matched(word, shapes, vectors)
        excluded = dict.fromkeys(matched, word) | excluded
    if len(excluded) == len(shapes):
        raise ConfigError(
            f"decay: exclude: {list(exclude)} matches all {len(shapes)} parameters, so none decays. Remedy: fewer "
            "entries, or weight_decay: 0."
        )
    return DecayMask(tuple((path, excluded.get(path)) for path in shapes))


def shapes_and_names(make_model: MakeModel) -> tuple[dict[Path, tuple[int, ...]], dict[Path, Names]]:
    """Returns the shapes of a model's parameters, and the logical dims of those that have some, by path."""
    names: dict[Path, Names] = {}

    def build(key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False):
            parts, _ = build_with_or_without_mesh(make_model, key)
        names.update({path[1:]: dims for path, dims in parts.dims if path[0] == "params"})
        return parts.params

    params = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
    return {path: tuple(leaf.shape) for path, leaf in leaves_with_paths(params)}, names


def _matched(word: str, shapes: Mapping[Path, tuple[int, ...]], vectors: Mapping[Path, Names]) -> list[Path]:
    """Returns the parameters that an entry excludes."""
    if any(character in word for character in "*?[/"):
        matched = [path for path in shapes if matches(path, word)]
    else:
        contains = lambda path: any(word.lower() in part.lower() for part in path)
        matched = [path for path in shapes if contains(path) or path in vectors and word in (VECTORS, *vectors[path])]
    return matched or matching("decay: exclude", word, shapes)
