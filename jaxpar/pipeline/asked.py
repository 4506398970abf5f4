"""``Pipeline``: how a step's layers go over the stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

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
      layers: how many layers each piece has, in the order of the model; empty for all alike.
    """

    schedule: Schedule
    keeps: Keeps = "input"
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = get_args(Keeps)
        if self.keeps not in known:
            wanted = " or ".join(map(repr, known))
            raise ConfigError(
                f"pipeline: keeps is {self.keeps!r}, but {wanted} is wanted.{did_you_mean(str(self.keeps), known)}"
            )
