"""Says when most updates of a run round away, because its weights have 16 bits."""

from __future__ import annotations

from collections.abc import Callable

from jaxpar.app.job import Job
from jaxpar.models.llama import LlamaConfig

_STEPS = 5
"""Steps at the full learning rate after which a run is judged."""
_SHARE = 0.25
"""The share of the weights that a step changes, below which most updates round away."""


class LostUpdates:
    """Watches the share of the weights of 16 bits that each step changes.

    Args:
      job: the run.
      tell: called once with the message for the user.
    """

    def __init__(self, job: Job, tell: Callable[[str], None]):
        optimizer = job.config.optimizer
        self._warmup = min(optimizer.warmup, (optimizer.decay_steps or job.config.train.steps) - 1)
        self._model, self._tell, self._told = job.model, tell, False
        self._shares: list[float] = []

    def see(self, number: int, share: float, *, skipped: bool) -> None:
        """Count step ``number``, which changed this share of the weights."""
        if number > self._warmup and not skipped:
            self._shares.append(share)
            if len(self._shares) == _STEPS:
                self.end()

    def end(self) -> None:
        """Judge the steps since the warm-up, of which a short run has few."""
        if self._shares and max(self._shares) < _SHARE and not self._told:
            self._tell(self._message(max(self._shares), len(self._shares)))
        self._told = self._told or len(self._shares) >= _STEPS

    def _message(self, share: float, steps: int) -> str:
        remedy = "parameters in float32, and precision: bf16 for the compute"
        dtype = "16 bits"
        if isinstance(self._model, LlamaConfig):
            dtype = self._model.param_dtype
            remedy = (
                f"model.param_dtype: float32, with model.dtype: {dtype} for the compute; train.init_from casts the "
                "weights of a checkpoint"
            )
        return (
            f"[bold]updates round away[/]: a step changed at most {share:.1%} of the weights in {dtype}, in {steps} "
            f"steps at the full learning rate. An update below half of the spacing of {dtype} changes nothing. Remedy: "
            f"{remedy}."
        )
