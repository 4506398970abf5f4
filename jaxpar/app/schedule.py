"""``jaxpar schedule``: a pipeline schedule as text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jaxpar.app.arguments import File, Number
from jaxpar.app.outputs import write_figure


@dataclass(frozen=True)
class ScheduleCommand:
    """Print a pipeline schedule: ticks, bubble, memory, timeline; several: a table. Needs neither devices nor jax.

    Attributes:
      names: a schedule such as 1f1b, or several
      stages: number of pipeline stages
      microbatches: number of microbatches of a batch
      virtual_stages: pieces of the model on each stage, for schedules that support several
      sequence_chunks: chunks of each sequence, for schedules that support them
      costs: durations: F forward, B backward, W weight gradient
      draw: also draw the schedule to this file (extra plots)
      timing: what each operation waits for in the picture
      width: characters per line of text
    """

    names: Annotated[tuple[str, ...], Positional, arg(metavar="NAME...")]
    stages: int
    microbatches: int
    virtual_stages: Number = None
    sequence_chunks: int = 1
    costs: Annotated[str, arg(metavar="F=1,B=1,W=1", help_behavior_hint="(default: 1 each)")] = ""
    draw: File = None
    timing: Literal["ticks", "neighbours", "stages"] = "ticks"
    width: int = 120

    def run(self) -> int:
        from jaxpar.parallel.pipeline.schedules.describe import answer

        print(answer(**{**vars(self), "draw": functools.partial(write_figure, "--draw", self.draw)}))
        return 0
