"""``jaxpar verify``: compare a run's layout with one device."""

from __future__ import annotations

from rich.console import Console

import jaxpar as jp
from jaxpar.analysis.compare import Verdict, compare
from jaxpar.app.factory import FactoryModel
from jaxpar.app.job import Job, in_fp32
from jaxpar.app.train.run_data import global_stream
from jaxpar.errors import ConfigError
from jaxpar.parallel.precision.policy import FP8, INT8
from jaxpar.training.one_bit_adam import NAME, without_signs


def verify(job: Job, *, steps: int, bound: float, console: Console) -> Verdict:
    """Run ``steps`` steps of a job on one device and in its layout, in fp32, and print their differences.

    Args:
      job: the run. It is recast to fp32 with the highest matmul precision, so that the bound can be tight; a model of
        the user's own keeps its dtypes.
      steps: number of steps, at least 1.
      bound: the largest relative difference allowed, in the loss and in any gradient tensor.
      console: receives the verdict.

    Returns:
      The differences, and whether they are within the bound.

    Raises:
      ConfigError: ``bound`` is not above 0 and at most 1, the optimizer state is on disk, or the pipeline is
        asynchronous.
    """
    if job.config.parallel.offload.optimizer == "disk":
        raise ConfigError(
            "verify: the optimizer state is on disk, but verify runs the step in two layouts at the same time. Remedy: "
            "--set parallel.offload.optimizer=null --set parallel.offload.path=null; the results are the same."
        )
    if isinstance(job.pipeline, jp.pipeline.Asynchronous):
        raise ConfigError(
            f"verify: parallel.pipeline.schedule is {job.pipeline.name!r}, whose gradients are computed with weights "
            "of earlier steps, so no step equals that of one device. Remedy: --set parallel.pipeline.schedule=1f1b."
        )
    rounded = [name for name in ("gather", "reduce", "matmul") if getattr(job.precision, name) in (INT8, FP8)]
    job = in_fp32(job)
    layout = job.layout()
    stream = global_stream(job, layout)
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.sizes.items() if size > 1) or "a mesh of one device"
    dtype = job.model.dtype if isinstance(job.model, FactoryModel) else "fp32"
    console.print(f"[bold]{job.name}[/]  {mesh} against one device, {dtype}")
    if rounded:
        console.print(f"excluded            precision: {', '.join(rounded)}, which rounds to 8 bits")
    tx = without_signs(job.tx, steps)
    if tx is not job.tx:
        console.print(f"excluded            optimizer: the signs of {NAME}, which depend on the number of devices")
    batches = [next(stream) for _ in range(steps)]
    run = (layout.on_one_device(), layout, job.make_model, tx, job.loss_fn, batches, job.batch_dims())
    verdict = compare(*run, bound=bound, seed=job.config.train.seed, **job.step_options())
    stream.close()
    console.print(f"initial parameters  {'bitwise equal' if verdict.parameters_equal else 'DIFFER'}")
    console.print(f"loss                largest relative difference {verdict.loss:.2e} over {steps} steps")
    console.print(f"gradients           largest relative difference {verdict.gradients:.2e} ({verdict.worst})")
    console.print(f"updates             largest relative difference {verdict.updates:.2e}")
    if verdict.passed:
        console.print(f"[bold]verified[/]            within {bound:.0e}")
    else:
        console.print(f"[bold]NOT verified[/]        beyond {bound:.0e}; first module that diverges: {verdict.first}")
    return verdict
