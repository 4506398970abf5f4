"""The plans of a workload on a number of devices: every one that divides, and why the others do not exist."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jaxpar.errors import PlanError, did_you_mean, listing
from jaxpar.planning.search.experts import problem
from jaxpar.planning.search.plan import BATCH, EMBED, EXPERTS, LATENT, LAYERS, SEQ, VOCAB, Plan
from jaxpar.planning.search.workload import Workload
from jaxpar.sharding.hardware.torus import take
from jaxpar.sharding.mesh import AXES

_EXPOSED = ("expert", "ulysses", "model")
_HEADS = ("heads", "kv_heads")
_NOT_TENSOR = frozenset(
    (BATCH, SEQ, EMBED, LAYERS, LATENT, "dense_layers", "residual_seq", "norm", "head_dim")
    + ("positions", "features", "channels")
)
MOST_VIRTUAL = 8
"""The most chunks of a pipeline's stage."""


@dataclass(frozen=True)
class Space:
    """What the planner may choose for a run.

    Attributes:
      axes: the mesh axes that may have more than one device.
      tensor: the logical dims that may be sharded over ``model``.
      sequence_parallel: whether the residual stream may be sharded over ``model``.
      zero: the ZeRO stages.
      remat: the recomputation policies.
      copies: 1, or 1 and 2.
      accumulate: whether batches may be cut into microbatches that run one after the other.
      offload: whether the optimizer state may be stored in host memory.
      batches: sequences of a step; empty for the run's.
      fixed: a field of :class:`Plan` → the only value that it may have.
      own_model: whether the model is one of the user's own. Its sequence is not sharded in a pipeline, nor where each
        device computes the gradient of its own rows: XLA's partitioner aborts on the attention of such steps.
      slices: slices or hosts that the network joins. An axis of exposed collectives crosses them only if it is fixed.
      ragged: whether devices can exchange rows of which each pair has another number.
    """

    axes: tuple[str, ...] = ("replica", "data", "model")
    tensor: tuple[str, ...] = ()
    sequence_parallel: bool = False
    zero: tuple[int, ...] = (0, 1, 3)
    remat: tuple[str, ...] = ("",)
    copies: tuple[int, ...] = (1,)
    accumulate: bool = True
    offload: bool = False
    batches: tuple[int, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own_model: bool = False
    slices: int = 1
    ragged: bool = True

    def __post_init__(self) -> None:
        names = [f.name for f in fields(Plan)]
        for name in self.fixed:
            if name not in names:
                raise PlanError(f"a plan has no {name!r}.{did_you_mean(name, names)} It has {listing(names)}.")


def tensor_dims(workload: Workload) -> tuple[str, ...]:
    """Returns the dims of the parameters along which tensor parallelism may shard them."""
    found = {name for p in workload.params for name, _ in p.factors if name is not None}
    # The axis `expert` shards the experts of jp.experts; those that a model computes in plain matmuls are a dim as any.
    left_out = _NOT_TENSOR | ({EXPERTS} if workload.experts else set())
    return tuple(sorted(name for name in found if name not in left_out and not name.startswith("channels")))


def plans(
    workload: Workload, devices: int, space: Space, refused: Counter[str], *, offload: bool = False
) -> Iterator[Plan]:
    """Returns every plan for a number of devices, and counts in ``refused`` why meshes were left out.

    Args:
      workload: the step.
      devices: the number of devices.
      space: what may be chosen.
      refused: reason → number of meshes.
      offload: whether the plans store the optimizer state in host memory.
    """
    for mesh in meshes(workload, devices, space, refused, offload=offload):
        yield from step_options(mesh, workload, space)


def meshes(
    workload: Workload, devices: int, space: Space, refused: Counter[str], *, offload: bool = False
) -> Iterator[Plan]:
    """Returns a plan for every mesh and batch, before the options of its step are chosen. Arguments as for `plans`."""
    for mesh in factorizations(devices, space.axes):
        if any(mesh.get(axis, 1) != size for axis, size in space.fixed.items() if axis in AXES):
            refused["the mesh is fixed"] += 1
            continue
        for batch in space.batches or (0,):
            sizes: dict[str, Any] = dict(mesh)
            base = Plan(batch=batch, offload=offload, **sizes)
            reason = _problem(base, workload, space.tensor) or _slow(base, space)
            reason = reason or problem(base, workload, ragged=space.ragged)
            tensor = _tensor(base, workload, space)
            if reason is None and base.replica > 1 and (3 not in space.zero or base.token_axes == ("replica",)):
                reason = "replica is the same as a larger data where it shards no weights"
            if reason is None and base.model > 1 and not tensor:
                reason = f"model {base.model} divides no dim of the weights"
            if reason is not None:
                refused[reason] += 1
                continue
            yield replace(base, tensor=tensor)


def step_options(mesh: Plan, workload: Workload, space: Space) -> Iterator[Plan]:
    """Returns every plan on a mesh of :func:`meshes`."""
    return (p for p in _options(mesh, workload, space) if _as_fixed(p, space) and _can_run(p, space))


def _can_run(plan: Plan, space: Space) -> bool:
    own_rows = plan.zero == 1 or plan.pipeline > 1 or (plan.zero == 0 and plan.grad_accum_steps > 1)
    return not (space.own_model and own_rows and plan.context * plan.ulysses > 1)


def _as_fixed(plan: Plan, space: Space) -> bool:
    return all(getattr(plan, name) == value for name, value in space.fixed.items())


def factorizations(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields the sizes of every mesh of these axes on a number of devices.

    >>> [tuple(mesh.values()) for mesh in factorizations(4, ("data", "model"))]
    [(1, 4), (2, 2), (4, 1)]
    """
    first, *rest = axes
    if not rest:
        yield {first: devices}
        return
    for size in (n for n in range(1, devices + 1) if devices % n == 0):
        yield from ({first: size, **others} for others in factorizations(devices // size, rest))


def _problem(plan: Plan, workload: Workload, tensor: tuple[str, ...]) -> str | None:
    """Why a mesh does not fit the workload's sizes, if it does not."""
    size, rows = workload.sizes, plan.replica * plan.data * plan.expert
    batch, seq = plan.batch or size.get(BATCH, 1), size.get(SEQ, 1)
    if batch % rows:
        return f"a batch of {batch} does not divide over {rows} devices"
    along = plan.context * plan.ulysses
    if seq % along:
        return f"a sequence of {seq} does not divide over {along} devices"
    for name in _HEADS:
        if plan.ulysses > 1 and size.get(name, plan.ulysses) % plan.ulysses:
            return f"{size[name]} {name} do not divide over ulysses {plan.ulysses}"
        if plan.model > 1 and name in size and name in tensor and size[name] % (plan.ulysses * plan.model):
            return f"{size[name]} {name} do not divide over {plan.ulysses * plan.model} devices"
    if plan.pipeline > 1 and size.get(VOCAB, plan.pipeline) % plan.pipeline:
        return f"a vocab of {size[VOCAB]} does not divide over {plan.pipeline} stages"
    if size.get(LAYERS, 1) % plan.pipeline:
        return f"{size.get(LAYERS, 1)} layers do not divide over {plan.pipeline} stages"
    if (batch // rows) % plan.pipeline:
        return f"{batch // rows} rows of a device do not divide into microbatches for {plan.pipeline} stages"
    return None


def _slow(plan: Plan, space: Space) -> str | None:
    """Why a mesh would wait for the network between slices, if it would.

    Replicas, data and stages send little, or while they compute. So does a ring of ``context``, which the cost model
    charges at the speed of the network.
    """
    if space.slices == 1:
        return None
    crossing = take(plan.mesh, space.slices, plan.mesh)
    for axis in _EXPOSED:
        if crossing[axis] > 1 and axis not in space.fixed:
            return f"{axis} crosses {space.slices} slices: the step would wait for the network"
    return None


def _tensor(plan: Plan, workload: Workload, space: Space) -> tuple[str, ...]:
    """The dims that ``model`` shards: all that it divides."""
    if plan.model == 1:
        return ()
    return tuple(name for name in space.tensor if workload.sizes.get(name, 1) % plan.model == 0)


def _options(plan: Plan, workload: Workload, space: Space) -> Iterator[Plan]:
    """The options of the step on a mesh."""
    rows = (plan.batch or workload.sizes.get(BATCH, 1)) // (plan.replica * plan.data * plan.expert)
    seq = workload.sizes.get(SEQ, 1)
    sequence = space.sequence_parallel and plan.model > 1 and seq % (plan.context * plan.ulysses * plan.model) == 0
    for zero, remat in itertools.product(space.zero, space.remat):
        if zero and (not plan.token_axes or plan.token_axes == ("replica",)):
            continue  # nothing to shard over
        if plan.replica > 1 and zero != 3:
            continue  # the same as one larger `data`
        # The stages of a pipeline gather their weights once a step under stages 1 and 3 alike.
        if plan.pipeline > 1 and zero == 1:
            continue
        chosen = replace(plan, sequence_parallel=sequence, zero=zero, remat=remat)
        yield from _staged(chosen, workload, rows) if plan.pipeline > 1 else _unstaged(chosen, space, rows)


def _staged(plan: Plan, workload: Workload, rows: int) -> Iterator[Plan]:
    """The pipelines of a plan: their microbatches and virtual stages."""
    layers = workload.sizes.get(LAYERS, 1) // plan.pipeline
    for microbatches in (n for n in range(plan.pipeline, rows + 1, plan.pipeline) if rows % n == 0):
        for virtual in (v for v in range(1, MOST_VIRTUAL + 1) if layers % v == 0):
            yield replace(plan, microbatches=microbatches, virtual_stages=virtual)
            if virtual == 1 and plan.remat == "full":
                yield replace(plan, microbatches=microbatches, checkpoint_stages=True)


def _unstaged(plan: Plan, space: Space, rows: int) -> Iterator[Plan]:
    """The microbatches and copies of a plan without a pipeline."""
    for steps in (n for n in (2**i for i in range(6)) if rows % n == 0 and (n == 1 or space.accumulate)):
        for copies in space.copies:
            hides = plan.model > 1 or plan.ulysses > 1
            if copies == 1 or (hides and rows // steps % copies == 0):
                yield replace(plan, grad_accum_steps=steps, copies=copies)
