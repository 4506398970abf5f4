"""Takes models apart into arrays to train, arrays to carry, logical names of their dims, and a way back to the model.

``read`` takes anything that ``make_model`` returns (an NNX module, a Linen variable dict, a tagged pytree) and returns
``ModelParts``: plain nested dicts of arrays, so that every optax transform, mask and label function sees ordinary
pytrees.
"""

from __future__ import annotations

import sys
from typing import Any

from jaxpar.errors import ModelError
from jaxpar.training.model import pytree
from jaxpar.training.model.parts import Kind, MakeModel, ModelParts, Path, Tagged, leaves_with_paths, show, tag, to_path

__all__ = ["Kind", "MakeModel", "ModelParts", "Path", "Tagged", "leaves_with_paths", "read", "show", "tag", "to_path"]


def read(model: Any) -> ModelParts:
    """Takes a model apart.

    Args:
      model: an ``nnx.Module``; a mapping with the key ``params`` (Linen variables: other collections are carried, not
        trained); or any other pytree of arrays, with ``tag`` or Flax's ``nn.Partitioned`` boxes on annotated leaves.

    Returns:
      The arrays, the logical names of their dims, and how to rebuild the model.

    Raises:
      ModelError: no parameters, or a Linen module instead of its variables.
      AnnotationError: a malformed annotation.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        from jaxpar.training.model import nnx_module

        return nnx_module.read(model)
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        raise ModelError(
            f"make_model returned the Linen module {type(model).__name__}, which holds no arrays. Remedy: return its "
            "variables, as in make_model = lambda key: module.init(key, example_input)."
        )
    return pytree.read(model)
