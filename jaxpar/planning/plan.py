"""``plan``: the fastest layout of a model on a topology, found, compiled and explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import optax

from jaxpar.analysis.checkup.findings import About
from jaxpar.parallel.offload.placement import to_host
from jaxpar.planning.layers.remat import remat_layers
from jaxpar.planning.names.annotate import annotate, trace_loss
from jaxpar.planning.names.given import Patterns
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.operators.choose import SearchName, SearchRequest, chosen_space
from jaxpar.planning.operators.given import Shardings
from jaxpar.planning.search.compiled import PlannedRun
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.experts import has_ragged_exchange
from jaxpar.planning.search.pipeline import StagedModel, pipeline_of, pipeline_table
from jaxpar.planning.search.plan import BATCH, EXPERTS, SEQ, Plan
from jaxpar.planning.search.report import PlanReport
from jaxpar.planning.search.search import FASTEST, CompilerMeasures, SearchOptions, find
from jaxpar.planning.search.sequence import SequenceSharding
from jaxpar.planning.search.space import Space, tensor_dims
from jaxpar.planning.search.traced import workload
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel, Tagged, build_shapes, tag


def plan(
    make_model: MakeModel,
    loss_fn: LossFn,
    batch: Any,
    tx: optax.GradientTransformation,
    topology: str | Topology,
    *,
    names: Patterns | None = None,
    fixed: Mapping[str, Any] | None = None,
    search: SearchName = "enumerate",
    shardings: Shardings | None = None,
    options: SearchOptions = FASTEST,
    progress: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Returns the layouts of a model on a topology, best first, with the reasons.

    All layouts are estimated in closed form from one trace. The best are compiled by the topology's own compiler, which
    needs no device of it, until no estimate that is left promises more than 5 % less.

    Args:
      make_model: as for :func:`jaxpar.init`. A model that names no dim is annotated first.
      loss_fn: as for :func:`jaxpar.train_step`.
      batch: a pytree of arrays or shapes, as for :func:`jaxpar.annotate`.
      tx: the optimizer.
      topology: the hardware, such as ``v5e:4x4``.
      names: as for :func:`jaxpar.annotate`.
      fixed: a field of :class:`Plan` → the only value that it may have, such as ``{"model": 4}``.
      search: ``enumerate`` estimates all layouts; ``dynamic_programming``, ``recursive`` and ``sharding_propagation``
        look at each operator's shardings instead, on meshes of ``data`` and ``model``.
      shardings: for ``sharding_propagation``: a logical dim → its mesh axis or ``None``, or a path pattern → an axis or
        ``None`` for each dim of the parameters (or arrays of the batch, as ``batch/...``) that it matches.
      options: what is minimized, and how many programs are compiled.
      progress: is given a line for each plan that is compiled.

    Returns:
      The report. ``report.layout()`` is the best layout on this machine's devices, ``report.run`` what it trains.

    Raises:
      AnnotationError, ModelError: as for :func:`jaxpar.annotate`.
      MissingExtraError: there is no compiler for the topology's devices.
      PlanError: no plan fits, ``fixed`` has an unknown field, there is no such search, or no rules shard what
        ``shardings`` gives.

    >>> import jax, jax.numpy as jnp, optax
    >>> def make_model(key):
    ...     up, down = jax.random.split(key)
    ...     return {"up": jax.random.normal(up, (512, 2048)), "down": jax.random.normal(down, (2048, 512))}
    >>> def loss_fn(model, batch):
    ...     return ((jax.nn.relu(batch["x"] @ model["up"]) @ model["down"] - batch["x"]) ** 2).mean()
    >>> batch = {"x": jax.ShapeDtypeStruct((1024, 512), jnp.float32)}
    >>> found = plan(make_model, loss_fn, batch, optax.adam(1e-3), "v5e:2x2")  # doctest: +SKIP
    >>> found.best.plan.describe()  # doctest: +SKIP
    'FSDP 4'
    """
    topology, request = Topology.parse(str(topology)), SearchRequest(search, shardings or {})
    planner = ModelPlanner.of(make_model, loss_fn, batch, tx, names)
    space = Space(
        tensor=tensor_dims(planner.workload),
        axes=planner.axes,
        own_model=True,
        sequence_parallel=planner.sequence_parallel,
        remat=planner.workload.policies,
        offload=True,
        fixed=fixed or {},
        slices=topology.slices,
        ragged=has_ragged_exchange(topology),
    )
    model = CostModel(planner.workload, topology)
    chosen = chosen_space(request, planner.trace, model, space)
    measures = CompilerMeasures(planner.run_of, topology)
    searched = find(model, chosen.space, measures, options, progress=progress)
    searched.notes = (*chosen.notes, *searched.notes, *planner.notes)
    return PlanReport(searched, planner)


@dataclass(frozen=True)
class ModelPlanner:
    """A model whose layout is to be planned.

    Attributes:
      make_model, loss_fn: with names for their dims.
      batch: a pytree of tagged shapes.
      tx: the optimizer.
      annotated: whether the names were found, so that the loss has constraints.
      step: keyword arguments of :func:`jaxpar.train_step` that every plan has.
      reduce_bytes: bytes of an element of reduced gradients.
    """

    make_model: MakeModel
    loss_fn: LossFn
    batch: Any
    tx: optax.GradientTransformation
    annotated: bool
    step: Mapping[str, Any] = field(default_factory=dict)
    reduce_bytes: int = 4

    @classmethod
    def of(
        cls,
        make_model: MakeModel,
        loss_fn: LossFn,
        batch: Any,
        tx: optax.GradientTransformation,
        names: Patterns | None = None,
    ) -> ModelPlanner:
        """Returns the planner of a model, whose dims are named if it names none of them."""
        annotated = bool(names) or not any(path[0] == "params" for path, _ in build_shapes(make_model).dims)
        if not annotated:
            return cls(make_model, loss_fn, _first_dim_is_batch(batch), tx, False)
        found = annotate(make_model, loss_fn, batch, names=names)
        return cls(found.make_model, found.loss_fn, found.tagged(batch), tx, True)

    @cached_property
    def workload(self) -> Workload:
        """What one step computes and keeps."""
        sequence = self._sequence
        return replace(self._traced, flash=sequence.flash, causal=sequence.causal)

    @cached_property
    def _traced(self) -> Workload:
        make_model = self.make_model if self.staged is None else self.staged.make_model
        return workload(make_model, self.loss_fn, self.batch, self.tx, remat=True, reduce_bytes=self.reduce_bytes)

    @cached_property
    def staged(self) -> StagedModel | None:
        """The model as a pipeline runs it; ``None`` if its loss does not say how."""
        return StagedModel.of(self.make_model, self.loss_fn)

    @cached_property
    def _sequence(self) -> SequenceSharding:
        return SequenceSharding.of(self.trace(), self._traced, annotated=self.annotated)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that plans may use."""
        stages = () if self.staged is None else ("pipeline",)
        experts = ("expert",) if self._traced.experts and not self._experts_note else ()
        return (*stages, "replica", "data", *experts, *self._sequence.axes, "model")

    @property
    def _experts_note(self) -> str:
        """Why no plan shards the experts of a model that has some."""
        found, sharded = self._traced.experts, [p for p in self._traced.params if EXPERTS in dict(p.factors)]
        if found and not sharded:
            return (
                "left out: expert, because no parameter has a dim named 'experts', although the model calls "
                "jp.experts; to plan it, annotate the experts' weights as the call names them"
            )
        if sharded and not found:
            more = f" and {len(sharded) - 1} others have" if len(sharded) > 1 else " has"
            return (
                f"left out: expert, because {sharded[0].path}{more} a dim 'experts', but the model does not call "
                "jp.experts, so tokens would not travel to their experts; to plan it, call jp.experts"
            )
        return ""

    @property
    def sequence_parallel(self) -> bool:
        """Whether plans may shard the residual stream over ``model``."""
        return self.annotated and SEQ in self._traced.sizes

    @property
    def notes(self) -> tuple[str, ...]:
        """Which plans were not tried, and why."""
        found = self._traced.layers
        note = ""
        if self.staged is None and found:
            note = (
                f"left out: pipelines, because the loss does not say what runs beside its {found[0]}; to plan them, "
                "give a jp.pipeline.PipelineLoss(layers=..., embed=..., layer=..., head=...)"
            )
        return tuple(note for note in (self._sequence.note, self._experts_note, note) if note)

    def trace(self) -> NamedProgram:
        """Returns the traced loss."""
        return trace_loss(self.make_model, self.loss_fn, self.batch)

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """Returns a plan as plain data, as a configuration's YAML file has it."""
        work = self.workload
        names = plan.names(work.names)
        own = plan.own_stage(names, work.stored)
        data: dict[str, Any] = {"mesh": plan.mesh_data, "rules": plan.rules(names, work.stored)}
        parallel: dict[str, Any] = {"optimizer": {"stage": own, "axis": list(plan.zero_axes)}} if own else {}
        if plan.remat:
            parallel["remat"] = plan.remat
        if plan.pipeline > 1:
            parallel["pipeline"] = dict(pipeline_table(plan))
        if parallel:
            data["parallel"] = parallel
        if plan.grad_accum_steps > 1:
            data["train"] = {"grad_accum_steps": plan.grad_accum_steps}
        return data

    def run_of(self, plan: Plan) -> PlannedRun:
        """Returns what a plan runs."""
        layout, zero = plan.layout(self.workload.names, plan.devices, self.workload.stored)
        options = {**self.step, "grad_accum_steps": plan.grad_accum_steps, **zero.step}
        tx = to_host(self.tx) if plan.offload else self.tx
        w = self.workload
        tokens = w.sizes.get(BATCH, 1) * w.sizes.get(SEQ, 0)  # 0, which is unknown, for a model without a sequence
        about = About(tokens, w.model_flops, w.sizes.get("vocab", 0), w.sizes.get(SEQ, 0), plan.remat or "none")
        make_model, loss_fn = self.make_model, self.loss_fn
        if self.staged is not None and plan.pipeline > 1:
            make_model, loss_fn = self.staged.make_model, self.staged.staged(plan.remat)
            options["pipeline"] = pipeline_of(plan)
        elif plan.remat:
            loss_fn = remat_layers(loss_fn, plan.remat)
        return PlannedRun(layout, make_model, tx, loss_fn, self.batch, options, about=about)


def _first_dim_is_batch(batch: Any) -> Any:
    """The batch with its shapes tagged: the first dim of an array without a tag is ``batch``."""
    is_tag = lambda x: isinstance(x, Tagged)

    def tagged(x: Any) -> Any:
        if is_tag(x):
            return x
        shape = jax.numpy.shape(x)
        return tag(jax.ShapeDtypeStruct(shape, x.dtype), *(BATCH, *[None] * len(shape))[: len(shape)])

    return jax.tree.map(tagged, batch, is_leaf=is_tag)
