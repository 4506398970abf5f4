"""Where a run's numbers go: JSON lines, TensorBoard, the loss curve; and what the hardware could do at best."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from jaxpar.accelerators import of_device
from jaxpar.errors import need


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device kind as jax names it, or ``None`` when it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3") == 989e12, peak_flops("cpu")
    (True, None)
    """
    device = of_device(device_kind)
    return device.bf16 if device else None


class MetricsWriter:
    """Appends every record to ``metrics.jsonl`` and its numbers to TensorBoard; a context manager.

    A run that goes on after step ``after`` keeps the records up to there: ``before`` has them, ``found`` all that there were. Of several processes
    one writes; in the others, which are told ``writes=False``, nothing happens.

    Raises:
      MissingExtraError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, after: int | None = None, *, writes: bool = True):
        self.found: list[dict[str, Any]] = []
        self.before: list[dict[str, Any]] = []
        self._lines: TextIO | None = None
        if not writes:
            return
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise need("tensorboardX", "train", "writing TensorBoard metrics") from error
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "metrics.jsonl"
        if after is not None:
            self.found = _records(file)
            self.before = [record for record in self.found if record["step"] <= after]
        # What was there stays there until all that is kept of it is on the new file.
        new = file.with_suffix(".new")
        new.write_text("".join(json.dumps(record) + "\n" for record in self.before), encoding="utf-8")
        new.replace(file)
        self._lines = file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, **values: float) -> None:
        """One record: the step and its values. Numbers that are not finite are written as strings, so the line stays JSON."""
        self.note(step, **{name: value if math.isfinite(value) else str(value) for name, value in values.items()})
        if self._lines is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def note(self, step: int, **values: Any) -> None:
        """One record of anything that is JSON, which TensorBoard does not see."""
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, **values}) + "\n")
            self._lines.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.close()
            self._board.close()


def _records(file: Path) -> list[dict[str, Any]]:
    """The records of a file; a line that a kill cut short is none."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def draw_loss(
    path: Path,
    losses: Sequence[float],
    evals: Sequence[tuple[int, float]],
    lines: dict[str, float],
    title: str,
) -> None:
    """The loss curve as a picture.

    Args:
      path: of the PNG.
      losses: training loss of step 1, 2, ...
      evals: (step, held-out loss) pairs.
      lines: horizontal lines to draw, label → loss.
      title: of the picture.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise need("matplotlib", "plots", "drawing the loss curve") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax: Any = figure.subplots()
    ax.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.45, linewidth=1, label="training loss")
    if evals:
        ax.plot(*zip(*evals, strict=True), color="tab:blue", marker="o", label="held-out loss")
    for (label, value), color in zip(lines.items(), ("tab:red", "tab:gray", "tab:green"), strict=False):
        ax.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{label} {value:.3f}")
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    figure.savefig(path, dpi=130)
