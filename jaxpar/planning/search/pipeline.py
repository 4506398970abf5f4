"""Pipelines for a model of the user's own: what its :class:`jaxpar.pipeline.PipelineLoss` says of its layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from jaxpar.errors import ConfigError
from jaxpar.parallel.pipeline.options import Pipeline
from jaxpar.parallel.pipeline.schedules.registry import schedule
from jaxpar.parallel.pipeline.separate_layers import layer_keys
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.planning.names.annotate import AnnotatedLoss
from jaxpar.planning.search.plan import Plan
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel, build_shapes
from jaxpar.training.model.stacked import stack
from jaxpar.training.remat import RematPolicy


@dataclass(frozen=True)
class StagedModel:
    """A model whose layers a pipeline can run.

    Attributes:
      loss: the loss in parts.
      make_model: the model with its layers as one stack.
      count: the number of layers.
    """

    loss: PipelineLoss
    make_model: MakeModel
    count: int

    @classmethod
    def of(cls, make_model: MakeModel, loss_fn: LossFn) -> Self | None:
        """Returns the parts of a model; ``None`` if its loss is no :class:`jaxpar.pipeline.PipelineLoss`."""
        loss = loss_fn.loss_fn if isinstance(loss_fn, AnnotatedLoss) else loss_fn
        if not isinstance(loss, PipelineLoss):
            return None
        parent: Any = build_shapes(make_model).params
        for name in loss.path[:-1]:
            parent = parent[name]
        _, keys = layer_keys(parent, loss.path[-1])
        if keys:
            return cls(loss, stack(make_model, loss.layers), len(keys))
        return cls(loss, make_model, jax.tree.leaves(parent[loss.path[-1]])[0].shape[0])

    def staged(self, policy: str | RematPolicy) -> PipelineLoss:
        """Returns the loss with its layers recomputed by a policy; ``none`` and ``""`` keep what the schedule keeps.

        Raises:
          ConfigError: the policy selects layers, or stores activations in host memory.
        """
        if policy in ("", "none"):
            return self.loss
        found = RematPolicy.of(policy)
        if found.layers:
            raise ConfigError(
                "remat: layers selects layers of a pipeline, whose stages run the same code. Remedy: "
                "parallel.pipeline.recompute, or leave layers out."
            )
        found.refuse_host_memory()
        rule = found.rule(())
        return replace(self.loss, layer=_recomputed(self.loss.layer, rule))


def _recomputed(layer: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(block: Any, *args: Any) -> Any:
        nnx = sys.modules.get("flax.nnx")
        if nnx is None or not isinstance(block, nnx.Module):
            return jax.checkpoint(layer, policy=rule)(block, *args)
        structure, arrays = nnx.split(block)
        run = lambda arrays, *args: layer(nnx.merge(structure, arrays), *args)
        return jax.checkpoint(run, policy=rule)(arrays, *args)

    return recomputed


def pipeline_table(plan: Plan) -> Mapping[str, Any]:
    """Returns the pipeline of a plan as plain data, as ``parallel.pipeline`` has it."""
    return {
        "schedule": "1f1b" if plan.virtual_stages == 1 else "interleaved",
        "microbatches": plan.microbatches,
        "virtual_stages": plan.virtual_stages,
        "activation_checkpointing": "full" if plan.checkpoint_stages else "none",
        "grad_reduction": "per_chunk" if plan.scatters_chunks else "per_step",
    }


def pipeline_of(plan: Plan) -> Pipeline:
    """Returns the pipeline of a plan, for :func:`jaxpar.train_step`."""
    table = pipeline_table(plan)
    order = schedule(table["schedule"], plan.pipeline, plan.microbatches, chunks=plan.virtual_stages)
    return Pipeline(
        order, activation_checkpointing=table["activation_checkpointing"], grad_reduction=table["grad_reduction"]
    )
