"""What the report of a compiled step says about a run's model, and the FLOPs of its MFU."""

from __future__ import annotations

from jaxpar.analysis.checkup.findings import About
from jaxpar.app.job import Job
from jaxpar.training.remat import RematPolicy


def step_flops(job: Job) -> float:
    """Returns the FLOPs that a step over all devices needs, without recomputation; 0 if the batch has no tokens.

    Each parameter and token needs 2 FLOPs in the forward pass, 2 for the gradient of the inputs and 2 for the gradient
    of the parameter. Under adapters (``model.lora``) the model's weights have no gradient, which leaves 4 of 6. The
    adapters themselves are not counted.
    """
    tokens = job.tokens or 0
    frozen = job.model.matmul_params if job.lora is not None else 0
    return tokens * (job.model.flops_per_token(tokens // job.config.data.batch) - 2.0 * frozen)


def about(job: Job) -> About:
    """Returns the facts about a run's model that its compiled program does not show."""
    tokens = job.tokens or 0
    return About(
        tokens=tokens,
        model_flops=step_flops(job),
        vocab=job.model.vocab or 0,
        seq=tokens // job.config.data.batch,
        remat=RematPolicy.of(job.model.remat).policy,
        reshard_after_forward=job.config.parallel.reshard_after_forward,
    )
