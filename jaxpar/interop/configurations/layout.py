"""``AxisSizes``: the sizes of the forms of parallelism, as the mesh and rules of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_AXES = ("pipeline", "data", "expert", "context", "ulysses", "model")


@dataclass(frozen=True)
class AxisSizes:
    """How many devices each form of parallelism uses.

    Attributes:
      pipeline, data, expert, context, ulysses, model: sizes of the mesh axes; ``expert`` divides the ranks that other
        systems count as data parallel, so ``data * expert`` is their data-parallel size.
      sequence_parallel: the residual stream is sharded over ``model`` by sequence.
      vocab: the embedding and the head are sharded over ``model`` and ``pipeline``.

    >>> sizes = AxisSizes(pipeline=2, model=4)
    >>> sizes.devices, sizes.mesh()
    (8, {'pipeline': 2, 'data': 1, 'model': 4})
    """

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    ulysses: int = 1
    model: int = 1
    sequence_parallel: bool = False
    vocab: bool = True

    @property
    def devices(self) -> int:
        """The product of the sizes."""
        return math.prod(getattr(self, axis) for axis in _AXES)

    def mesh(self) -> dict[str, int]:
        """Returns the mesh: ``data``, and every axis larger than 1."""
        sizes = {axis: getattr(self, axis) for axis in _AXES}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}

    def rules(self, model: Mapping[str, Any], family: str) -> dict[str, Any]:
        """Returns the rules for the dims of a built-in model.

        Args:
          model: the fields of its configuration that are known.
          family: its family.
        """
        tensor, seq = "model" if self.model > 1 else None, ["context", "ulysses"]
        kv_heads = model.get("kv_heads", self.model)
        rules: dict[str, Any] = {
            "batch": ["replica", "data", *(["expert"] if self.expert > 1 else [])],
            "seq": seq,
            "residual_seq": [*seq, "model"] if self.sequence_parallel and tensor else seq,
            "layers": "pipeline",
            **dict.fromkeys(("embed", "norm", "head_dim")),
            "heads": tensor,
            "kv_heads": tensor if kv_heads % self.model == 0 else None,
            "mlp": tensor,
            "vocab": self._vocab(model.get("vocab", 0)),
        }
        if family != "llama":
            rules |= {"experts": "expert" if self.expert > 1 else None, "expert_mlp": tensor}
            rules |= {"latent": None, "dense_layers": None}
        return {dim: rule for dim, rule in rules.items() if dim not in _unused(model)}

    def zero_axes(self) -> dict[str, list[str]]:
        """Returns ``axis`` of ``parallel.optimizer``, where more than ``data`` replicates a weight; never ``model``."""
        others = [axis for axis in ("expert", "context", "ulysses") if getattr(self, axis) > 1]
        return {"axis": ["data", *others]} if others else {}

    def _vocab(self, size: int) -> Any:
        """The axes of the vocabulary: stages shard it only if they divide it, which other systems do not require."""
        axes = [axis for axis in ("pipeline", "model") if getattr(self, axis) > 1]
        if len(axes) > 1 and size % (self.pipeline * self.model):
            axes = ["model"]
        return (axes if len(axes) > 1 else axes[0]) if axes and self.vocab else None


def _unused(model: Mapping[str, Any]) -> set[str]:
    """The dims that a model with these fields does not have; none if they are not known."""
    if not model:
        return set()
    dense = model.get("dense_layers")
    # Without the weights of latent attention no tensor has its dim. All attention has activations with kv_heads.
    unused = set() if model.get("latent_attention") else {"latent"}
    if not dense:
        unused |= {"dense_layers"} | (set() if "experts" not in model or model.get("shared_experts") else {"mlp"})
    return unused
