"""``jaxpar plan``: the fastest layout of a run on a topology, as a configuration that trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import yaml

from jaxpar.app.config import Loaded, OverlapConfig, PipelineConfig, RunConfig, load_run
from jaxpar.app.factory import FactoryModel
from jaxpar.app.job import Job, make_job
from jaxpar.app.model_facts import about
from jaxpar.app.outputs import write_figure, write_output
from jaxpar.errors import JaxparError, PlanError
from jaxpar.models.moe.config import MoEConfig
from jaxpar.models.moe.model import make_decoder
from jaxpar.planning.names.annotate import trace_loss
from jaxpar.planning.names.program import NamedProgram
from jaxpar.planning.operators.choose import SearchName, SearchRequest, chosen_space
from jaxpar.planning.operators.given import rules_given
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.search.compiled import PlannedRun
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.experts import has_ragged_exchange
from jaxpar.planning.search.pipeline import pipeline_table
from jaxpar.planning.search.plan import EMBED, Plan
from jaxpar.planning.search.report import PlanReport
from jaxpar.planning.search.scaling import ScalingReport
from jaxpar.planning.search.search import CompilerMeasures, Objective, SearchOptions, find, has_values
from jaxpar.planning.search.space import Space, tensor_dims
from jaxpar.planning.search.topologies import TopologyReport
from jaxpar.planning.search.traced import workload
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.rules import ROLES
from jaxpar.training.remat import RematPolicy
from jaxpar.utils.terminal import say, terminal_width
from jaxpar.utils.yaml_config import build, load_yaml, override

_REMAT = ("none", "save_outputs", "save_attention", "dots", "full")
_CHOICES = {
    "parallel.remat": "remat",
    "parallel.optimizer.stage": "zero",
    "parallel.pipeline.microbatches": "microbatches",
    "parallel.pipeline.virtual_stages": "virtual_stages",
    "parallel.overlap.ways": "copies",
    "train.grad_accum_steps": "grad_accum_steps",
}
"""Keys of a configuration, and the field of :class:`Plan` that ``--set`` fixes with them."""
_LLAMA_AXES = ("pipeline", "replica", "data", "context", "ulysses", "model")
_MOE_AXES = ("pipeline", "replica", "data", "expert", "context", "ulysses", "model")


_MOE_NOTE = (
    "not considered: two interleaved half batches, which layers with experts do not have, and experts over axes of the "
    "batch or the sequence (experts: [context, data])"
)


@dataclass(frozen=True)
class PlanOptions:
    """What ``jaxpar plan`` minimizes, the largest batch, the number of programs that it compiles, and its search."""

    objective: Objective = "time"
    max_batch: int | None = None
    programs: int = 12
    search: SearchName = "enumerate"


@dataclass(frozen=True)
class PlanOutputs:
    """Files that ``jaxpar plan`` writes: the best plan as YAML, all plans as JSON, and a picture."""

    yaml: Path | None = None
    json: Path | None = None
    picture: Path | None = None

    def show(self, report: PlanReport | ScalingReport | TopologyReport) -> None:
        """Prints a report, and writes it as JSON if that was asked for."""
        print(f"\n{report.to_text(terminal_width())}", end="")
        write_output("--json", self.json, report.to_json)


def go(config: Path, settings: Sequence[str], topology: str, options: PlanOptions, outputs: PlanOutputs) -> int:
    """Run ``jaxpar plan``: print the ranked plans, and write what was asked for."""
    parsed = Topology.parse(topology)
    planner = RunPlanner(config, settings)
    model = CostModel(planner.workload, parsed)
    space = planner.space(options.max_batch, parsed)
    chosen = chosen_space(planner.request(options.search), planner.trace, model, space)
    given, own = planner.given(parsed.devices), planner.own_options(parsed.devices)
    search = SearchOptions(options.objective, at_most=options.programs, given=given, own_options=own)
    searched = find(model, chosen.space, CompilerMeasures(planner.run_of, parsed), search, progress=say)
    searched.notes = (*chosen.notes, *searched.notes, *planner.notes)
    report = PlanReport(searched, planner)
    outputs.show(report)
    write_best(report, planner, outputs)
    return 0


def write_best(report: PlanReport, planner: RunPlanner, outputs: PlanOutputs) -> None:
    """Write the best plan as YAML, and the plans as a picture."""
    if outputs.yaml is not None:
        text = f"# {report.headline()}\n" + yaml.safe_dump(planner.config_of(report.best.plan), sort_keys=False)
        write_output("--output", outputs.yaml, lambda: text)
        print(f"wrote {outputs.yaml}: jaxpar check {outputs.yaml} --topology {report.search.topology}")
    write_figure("--picture", outputs.picture, report.draw)


def _fixed(settings: Sequence[str]) -> dict[str, Any]:
    """The choices that ``--set`` makes: a field of :class:`Plan` → its value.

    >>> _fixed(["mesh.model=4", "parallel.remat=full", "train.steps=10"])
    {'model': 4, 'remat': 'full'}
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, _, _ = setting.partition("=")
        chosen = _CHOICES.get(key) or key.removeprefix("mesh.") * key.startswith("mesh.")
        if chosen:
            value: Any = override({}, [setting])
            for part in key.split("."):
                value = value[part]
            found[chosen] = value
    return {name: value for name, value in found.items() if value != -1}


class RunPlanner:
    """A run whose layout is to be planned: its data, and the data of each plan.

    Args:
      config: the YAML file of the run.
      settings: changes to it, as ``--set`` takes them.
    """

    def __init__(self, config: Path, settings: Sequence[str] = ()):
        self.loaded: Loaded = load_run(config, settings)
        self.fixed = _fixed(settings)
        self._given: dict[int, dict[str, Any]] = {}
        self.data = override(load_yaml(config, paths=("layout",)), settings)
        # What the plans decide is left out: it may need the run's own mesh.
        parallel = replace(self.loaded.config.parallel, overlap=OverlapConfig(), pipeline=None, remat=None)
        plain = replace(self.loaded.config, parallel=parallel)
        self.job: Job = make_job(replace(self.loaded, config=plain, layout={**self.loaded.layout, "mesh": {}}))

    @cached_property
    def workload(self) -> Workload:
        """What one step of the run computes and keeps."""
        return replace(self._traced, compiler_options=self._compiler_options)

    @property
    def _compiler_options(self) -> dict[str, dict[str, Any]]:
        """Platform → the options that its compiler is given."""
        return {str(platform): options for platform, options in self.loaded.config.compiler.items()}

    @property
    def _traced(self) -> Workload:
        job, model = self.job, self.job.model
        if isinstance(model, FactoryModel):
            return cast(ModelPlanner, self._own).workload
        models = {name: make_decoder(replace(model, remat=name)) for name in _REMAT}
        run = (job.make_model, job.loss_fn, job.batch_spec(), job.tx)
        return workload(*run, models=models, flash=True, reduce_bytes=self._reduce_bytes)

    @property
    def _reduce_bytes(self) -> int:
        reduced = self.job.precision.reduce
        return 4 if reduced is None else 1 if reduced == "int8" else jax.numpy.dtype(reduced).itemsize

    @cached_property
    def _own(self) -> ModelPlanner | None:
        """The planner of a model of the user's own."""
        job, model = self.job, self.job.model
        if not isinstance(model, FactoryModel):
            return None
        run = (job.make_model, job.loss_fn, job.batch_spec(), job.tx, bool(model.found))
        return ModelPlanner(*run, reduce_bytes=self._reduce_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which plans were not tried, and why."""
        if self._own is not None:
            return self._own.notes
        return (_MOE_NOTE,) if isinstance(self.job.model, MoEConfig) else ()

    def trace(self) -> NamedProgram:
        """Returns the traced loss."""
        return trace_loss(self.job.make_model, self.job.loss_fn, self.job.batch_spec())

    def request(self, search: SearchName) -> SearchRequest:
        """Returns a search by name; what a propagation is given are the run's rules."""
        rules = self.loaded.layout["rules"] or {}
        given = rules_given(rules, self.trace()) if search == "sharding_propagation" else {}
        return SearchRequest(search, given)

    def space(self, max_batch: int | None = None, topology: Topology | None = None) -> Space:
        """Returns what may be chosen for the run: more for a built-in model than for one of the user's own."""
        batches = () if max_batch is None else tuple(_batches(self.job.config.data.batch, max_batch))
        space = Space(tensor=tensor_dims(self.workload), batches=batches, fixed=self.fixed)
        if topology is not None:
            space = replace(space, slices=topology.slices, ragged=has_ragged_exchange(topology))
        if self._own is not None:
            remat = [name for name in (self._own_remat(),) if name in self.workload.backward]
            remat = [*dict.fromkeys((*self.workload.policies, *remat))]
            sequence_parallel = self._own.sequence_parallel
            own = replace(space, own_model=True, axes=self._own.axes, remat=tuple(remat))
            return replace(own, sequence_parallel=sequence_parallel)
        moe = isinstance(self.job.model, MoEConfig)
        axes, copies = (_MOE_AXES, (1,)) if moe else (_LLAMA_AXES, (1, 2))
        offload = self.job.config.parallel.offload.optimizer is None
        return replace(space, axes=axes, sequence_parallel=True, remat=_REMAT, copies=copies, offload=offload)

    def given(self, devices: int) -> dict[str, Any]:
        """Returns the fields of the plan that the run's own layout is, if it is for this number of devices."""
        if devices not in self._given:
            self._given[devices] = self._read_given(devices)
        return self._given[devices]

    def _read_given(self, devices: int) -> dict[str, Any]:
        config, parallel, rules = self.loaded.config, self.loaded.config.parallel, self.loaded.layout["rules"] or {}
        if not self.loaded.layout["mesh"]:
            return {}
        try:
            job = make_job(self.loaded, training=False)
            sizes = job.layout(devices).sizes
        except JaxparError:
            return {}
        stage = parallel.optimizer.stage if parallel.optimizer is not None else 0
        params = rules.get("params")
        sharded = isinstance(params, dict) and bool(params.get(EMBED))
        fields: dict[str, Any] = {**sizes, "zero": stage or 3 * sharded}
        fields |= {"grad_accum_steps": config.train.grad_accum_steps, "copies": parallel.overlap.ways, "batch": 0}
        own = isinstance(self.job.model, FactoryModel)
        fields["remat"] = self._own_remat() if own else RematPolicy.of(job.model.remat).policy
        if parallel.pipeline is not None:
            fields["microbatches"] = parallel.pipeline.microbatches
            fields["virtual_stages"] = parallel.pipeline.virtual_stages
            fields["checkpoint_stages"] = parallel.pipeline.activation_checkpointing == "full"
        return fields

    def own_options(self, devices: int) -> bool:
        """Returns whether the run's own layout has options that no plan has."""
        given, config = self.given(devices), self.loaded.config.parallel
        if not given:
            return False
        if self.loaded.layout.get("rings") or config.overlap != OverlapConfig(ways=config.overlap.ways):
            return True
        if config.pipeline is None:
            return False
        names = ("pipeline", "zero", "microbatches", "virtual_stages", "checkpoint_stages")
        return config.pipeline != PipelineConfig(**pipeline_table(Plan(**{name: given[name] for name in names})))

    def _own_remat(self) -> str:
        """The policy of the run's own layout, for a model of the user's own."""
        given = self.loaded.config.parallel.remat
        if given is None:
            return self.workload.own_policy
        return given if isinstance(given, str) else given.policy

    def config_of(self, plan: Plan) -> dict[str, Any]:
        """Returns the run with a plan's layout and options, as data for a YAML file."""
        data: dict[str, Any] = {key: value for key, value in self.data.items() if key != "layout"}
        if has_values(plan, self.given(plan.devices)):  # the run as it is, with options that no plan has
            return data | {name: dict(value or {}) for name, value in self.loaded.layout.items()}
        rules = self.loaded.layout["rules"] or {}
        names = [*(name for name in rules if name not in ROLES), *(n for n in self.workload.names if n not in rules)]
        kept = {name: rules[name] for name in ("indivisible", "unannotated") if name in rules}
        data["mesh"] = plan.mesh_data
        named, stored = plan.names(name for name in names if name not in kept), self.workload.stored
        data["rules"] = plan.rules(named, stored) | kept
        own = isinstance(self.job.model, FactoryModel)
        stage = plan.own_stage(named, stored)
        data["parallel"] = _parallel(data.get("parallel") or {}, plan, own_model=own, stage=stage)
        data["model"] = {key: value for key, value in data["model"].items() if own or key != "remat"}
        if plan.grad_accum_steps > 1 or "grad_accum_steps" in (data.get("train") or {}):
            data["train"] = {**(data.get("train") or {}), "grad_accum_steps": plan.grad_accum_steps}
        if plan.batch:
            data["data"] = {**data["data"], "batch": plan.batch}
        return data

    def run_of(self, plan: Plan) -> PlannedRun:
        """Returns what a plan runs."""
        data = self.config_of(plan)
        config = build(RunConfig, data, self.loaded.name)
        job = make_job(Loaded(config, {"mesh": config.mesh, "rules": config.rules}, self.loaded.name))
        run = (job.layout(plan.devices), job.make_model, job.tx, job.loss_fn, job.batch_spec())
        return PlannedRun(*run, job.step_options(), self._compiler_options, about(job))


def _batches(own: int, most: int) -> list[int]:
    """The run's batch, doubled while it stays within a maximum."""
    if most < own:
        raise PlanError(f"--max-batch {most} is less than data.batch {own}. Remedy: a larger --max-batch.")
    return [own * 2**i for i in range(int(math.log2(most // own)) + 1)]


def _parallel(own: Mapping[str, Any], plan: Plan, *, own_model: bool, stage: int) -> dict[str, Any]:
    """The table ``parallel`` of a plan: what it decides, and what it leaves as it was; ``stage`` is that of ZeRO."""
    planned = ("optimizer", "remat", "context", "pipeline", "overlap")
    table = {key: value for key, value in own.items() if key not in planned}
    if stage:
        table["optimizer"] = {"stage": stage, "axis": list(plan.zero_axes)}
    if plan.remat:
        table["remat"] = plan.remat
    if plan.context_impl is not None and not own_model:
        table["context"] = {**(own.get("context") or {}), "impl": plan.context_impl}
    if plan.pipeline > 1:
        table["pipeline"] = dict(pipeline_table(plan))
    if plan.copies > 1:
        table["overlap"] = {"ways": plan.copies}
    if plan.offload:
        table["offload"] = {**(own.get("offload") or {}), "optimizer": "host"}
    return table
