"""A run's progress line: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_LINES = 20
"""Number of lines that a run prints without a terminal."""
_NARROW = 100
"""A terminal of at most so many columns shows no bar, but all of the text."""

type Rate = tuple[float, float | None]
"""Tokens or examples per second, and MFU, the share of the peak FLOP/s, if the peak is known."""


class StepLine:
    """Shows step, loss, held-out loss, tokens/s, step time, MFU, the loss's own metrics, and the remaining time.

    Args:
      console: where to show them.
      steps: the number of steps.
      unit: what is counted per second: tokens or examples.
    """

    def __init__(self, console: Console, steps: int, unit: str = "tokens"):
        self._unit = "tok" if unit == "tokens" else unit
        self._console, self._steps = console, steps
        self._first: tuple[int, float] | None = None  # the first step that this process ends, and when
        counter = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(f"{steps}") + 1))
        text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        bar = [BarColumn(bar_width=24)] if console.width > _NARROW else []
        self._bar = Progress(counter, *bar, text, TextColumn("ETA"), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("train", total=steps, text="")

    def update(
        self, step: int, loss: float, heldout: float, seconds: float, rate: Rate, metrics: Mapping[str, float]
    ) -> None:
        """Show a step that has just ended.

        Args:
          step: its number.
          loss: its loss.
          heldout: the last held-out loss; NaN, which is left out, if this process does not know it.
          seconds: its duration.
          rate: tokens or examples per second, and the share of the peak FLOP/s.
          metrics: what the loss returned besides.
        """
        per_second, mfu = rate
        known = "" if math.isnan(heldout) else f"  held-out {heldout:.4f}"
        text = f"loss {loss:.4f}{known}  {per_second:,.0f} {self._unit}/s  {seconds * 1e3:.0f} ms/step"
        text += f"  MFU {mfu:.1%}" if mfu is not None else ""
        text += "".join(f"  {name} {value:.4g}" for name, value in metrics.items())
        now = time.perf_counter()
        if self._first is None:
            # After a resume, the steps before took this process no time.
            self._first = (step, now)
            self._bar.reset(self._task, completed=step)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, text=text)
        elif step % max(1, self._steps // _LINES) == 0 or step == self._steps:
            first, then = self._first
            each = (now - then) / (step - first) if step > first else seconds
            left = each * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {text}  ETA {left:.0f} s")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()
