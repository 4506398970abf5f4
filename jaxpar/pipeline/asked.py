"""``Pipeline``: how a step's layers go over the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.schedules.schedule import Schedule
from jaxpar.schedules.table import Keeps


@dataclass(frozen=True)
class Pipeline:
    """How a step's layers go through a pipeline.

    Attributes:
      schedule: see :func:`jaxpar.schedule`.
      keeps: ``input`` keeps what a stage is given and computes its layers again for the backward; ``residuals`` keeps what the layers'
        own policies of recomputation keep, for every microbatch on its way.
      reduce: ``once`` sums a device's own gradients over all microbatches and scatters the sums, which lie whole in fp32 till then; ``each``
        scatters a layer's gradients with every microbatch, which sends that many times as much, and its sums are split as the gradients are.
      lowering: ``uniform`` makes all stages do in a tick what any of them does, beside whatever other axes; ``divergent`` makes each do its own,
        for schedules whose stages do different things in a tick, on meshes that split nothing but batches beside stages.
      layers: how many layers each piece has, in the order of the model; empty for all alike.
    """

    schedule: Schedule
    keeps: Keeps = "input"
    layers: tuple[int, ...] = ()
    reduce: Literal["once", "each"] = "once"
    lowering: Literal["uniform", "divergent"] = "uniform"

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("keeps", self.keeps, get_args(Keeps)),
            ("reduce", self.reduce, ("once", "each")),
            ("lowering", self.lowering, ("uniform", "divergent")),
        )
        for name, value, known in checks:
            if value not in known:
                wanted = " or ".join(map(repr, known))
                raise ConfigError(
                    f"pipeline: {name} is {value!r}, but {wanted} is wanted.{did_you_mean(str(value), known)}"
                )
        if self.lowering == "divergent" and self.reduce == "each":
            raise ConfigError(
                "pipeline: lowering is 'divergent', in which a stage's layers can hold no collective, but reduce is 'each', which scatters "
                "gradients layer by layer. Remedy: reduce='once', or lowering='uniform'."
            )
