"""Pipeline parallelism: schedules, models cut into stages, and pipelines that are not flushed between steps."""

from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.parallel.pipeline.schedules.registry import schedule
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.pipeline.schedules.simulate import simulate
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss, stacked_part
from jaxpar.training.asynchronous.step import pipedream_train_step
from jaxpar.training.model.stacked import stack

__all__ = [
    "Asynchronous",
    "PipelineLoss",
    "Schedule",
    "pipedream_train_step",
    "schedule",
    "simulate",
    "stack",
    "stacked_part",
]
