"""Which layout a script's train step gets: the one that it is given, or a plan for the devices that are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxpar.errors import ConfigError, LayoutError, MissingExtraError, PlanError, did_you_mean
from jaxpar.planning.plan import ModelPlanner
from jaxpar.planning.script.naming import BATCH, NamedStep
from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.search import Candidate, CompilerMeasures, Measures, Search, SearchOptions, search
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout
from jaxpar.sharding.mesh import MeshSpec
from jaxpar.sharding.rules import Rules

ESTIMATED = SearchOptions(at_least=0, at_most=0, traced=0)
"""A search that compiles nothing: the plan with the lowest estimate."""
SEARCHED = SearchOptions(at_most=4, traced=0)
"""A search that compiles a few plans, before the first step."""

Chosen = str | Layout | Rules | Plan | None
_NAMED = {"data": 0, "zero1": 1, "fsdp": 3}


@dataclass(frozen=True)
class ChosenLayout:
    """A layout and why it was chosen.

    Attributes:
      layout: the layout, on this machine's devices.
      name: what it is, in the words of the field.
      reason: who chose it, and why.
      search: the plans that were compared; ``None`` if none were.
      sharded: how FSDP shards weights without a dim ``embed``; empty if there are none.
    """

    layout: Layout
    name: str
    reason: str
    search: Search | None = None
    sharded: str = ""


def choose(
    step: NamedStep,
    asked: Chosen,
    *,
    topology: str | Topology | None = None,
    options: SearchOptions = SEARCHED,
    progress: Callable[[str], None] = lambda line: None,
) -> ChosenLayout:
    """Returns the layout of a step.

    Args:
      step: the step, with names.
      asked: a layout; rules, for a mesh whose devices are all on ``data``; a plan; ``data``, ``zero1`` or ``fsdp``
        over all devices; ``None`` or ``auto`` for the best plan of the hardware.
      topology: the hardware to plan for, by default that of this machine's devices.
      options: how long to search.
      progress: is given a line for each plan that is compiled.

    Raises:
      ConfigError: ``asked`` is none of these.
      LayoutError: the batch does not divide over the devices.
      PlanError: no plan fits.
    """
    devices = jax.devices()
    if isinstance(asked, Layout):
        return ChosenLayout(asked, "the given layout", "layout= names it")
    if isinstance(asked, Rules):
        return ChosenLayout(
            Layout(MeshSpec(data=-1).build(), asked), "the given rules", "layout= has rules: all on data"
        )
    if isinstance(asked, str) and asked in _NAMED:
        asked = Plan(data=len(devices), zero=_NAMED[asked])
    if isinstance(asked, Plan):
        return planned(asked, step, "layout= names it")
    if asked not in (None, "auto"):
        hint = did_you_mean(asked, ("auto", *_NAMED)) if isinstance(asked, str) else ""
        raise ConfigError(
            f"layout must be a Layout, Rules, a Plan, 'auto', 'data', 'zero1' or 'fsdp', got {asked!r}.{hint} Remedy: "
            "leave it out for the best plan of this machine's devices."
        )
    here = topology_of(devices) if topology is None else str(topology)
    if here is None:
        plan = Plan(data=len(devices), zero=3)
        return planned(plan, step, _default_reason(devices))
    return _searched(step, Topology.parse(here), devices, options, progress)


def topology_of(devices: Sequence[Any]) -> str | None:
    """Returns the name of the devices' topology; ``None`` if it is not known, as for CPUs."""
    links = links_of(MeshSpec(data=-1).build(devices))
    return None if links is None else links.name


def planned(plan: Plan, step: NamedStep, reason: str, search: Search | None = None) -> ChosenLayout:
    """Returns a plan's layout, whose rules replicate what their axes do not divide, except for the batch."""
    names, stored = step.annotation.names, step.stored
    names = names if BATCH in names else (*names, BATCH)
    layout, _ = plan.layout(names, jax.devices(), stored)
    rules = layout.rules.to_dict()
    others = {name: "replicate" for name in layout.rules.table if name != BATCH}
    rules["indivisible"] = {**others, **rules.get("indivisible", {})}
    sharded = plan.how_stored(names, stored)
    return ChosenLayout(Layout(layout.mesh, Rules.from_dict(rules)), plan.describe(), reason, search, sharded)


def _default_reason(devices: Sequence[Any]) -> str:
    what = f"the figures of {devices[0].device_kind} are not known"
    if devices[0].platform == "cpu":
        what = "simulated CPU devices have no speed to plan for"
    return (
        f"the default: {what}, and FSDP needs the least memory of the layouts that fit every model; layout= chooses "
        "another, topology= plans for other hardware"
    )


def _searched(
    step: NamedStep, topology: Topology, devices: Sequence[Any], options: SearchOptions, progress: Callable[[str], None]
) -> ChosenLayout:
    if topology.devices != len(devices):
        raise ConfigError(
            f"topology {topology} has {topology.devices} devices, but there are {len(devices)} here. Remedy: name a "
            "topology of as many, or leave it out."
        )
    trace, found = step.trace, step.annotation
    batch = {trace.call.paths[i]: trace.shapes[i] for i in step.batch}
    planner = ModelPlanner(found.make_model, found.loss_fn, found.tagged(batch), _stand_in(step), True)
    work = planner.workload
    refused: Counter[str] = Counter()
    space = Space(tensor=tensor_dims(work), zero=(0, 1, 3), accumulate=False)
    every = list(plans(work, topology.devices, space, refused))
    if not every:
        raise LayoutError(
            f"no plan fits {len(devices)} devices: {'; '.join(refused)}. Remedy: a batch of a multiple of the devices."
        )
    model = CostModel(work, topology)
    measures: Measures = CompilerMeasures(planner.run_of, topology)
    how = "compiled for it"
    try:
        result = search(model, every, measures, refused, options, progress=progress)
    except MissingExtraError:
        result = search(model, every, measures, Counter(refused), ESTIMATED)
        how = f"estimated in closed form, because the compiler for {topology} is not installed"
    best: Candidate | None = next(iter([*result.ranked, *result.waiting()]), None)
    if best is None:
        raise PlanError(
            f"no plan fits {topology}: {result.too_large} plans exceed its memory. Remedy: more devices, or a smaller "
            "batch."
        )
    how = how if best.compiled is not None or "closed form" in how else "estimated in closed form"
    reason = (
        f"the best of {len(result.candidates)} plans for {topology}, {how}: {best.step_seconds * 1e3:.3g} ms a step"
    )
    return planned(best.plan, step, reason, result)


def _stand_in(step: NamedStep) -> optax.GradientTransformation:
    """An optimizer with about as much state as the script's, which a search knows only as a part of the step."""
    size = lambda indices: sum(step.trace.shapes[i].size * step.trace.shapes[i].dtype.itemsize for i in indices)
    others = (i for i in step.trace.updates if i not in step.params and step.trace.shapes[i].shape)
    share = size(others) / max(size(step.params), 1)
    return optax.adam(1e-3) if share > 1.5 else optax.sgd(1e-3, momentum=0.9 if share > 0.5 else None)
