"""``explain`` reports how every tensor is sharded and why; ``check`` raises if the report lists problems.

Neither needs devices: both work on shapes, with a concrete or an abstract mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxpar.analysis.layout.notes import (
    assumed_replicated,
    gathered_exactly,
    narrow_sums,
    unequal_initial_values,
    with_reason,
    wrongly_partitioned,
)
from jaxpar.analysis.layout.report import Report
from jaxpar.analysis.layout.rows import Row
from jaxpar.analysis.memory.estimate import Memory, estimate
from jaxpar.analysis.units import device_bytes, shard_count, show_bytes
from jaxpar.errors import LayoutError
from jaxpar.parallel.attention.select import Choice
from jaxpar.parallel.collectives.gather_reduce import precision_scope
from jaxpar.parallel.experts.options import DispatchPlan
from jaxpar.parallel.offload.placement import no_layers
from jaxpar.parallel.partitioner.repair import noting_repairs
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.parallel.tensor.route import MatmulRoute
from jaxpar.parallel.tensor.traffic import Matmuls
from jaxpar.sharding.layout import Layout, tracing_under
from jaxpar.sharding.messages import entry
from jaxpar.sharding.resolve import Resolved
from jaxpar.sharding.rules import Over, Rules
from jaxpar.training.disk_step import AHEAD
from jaxpar.training.exact_weights import ExactWeights, exact_weights
from jaxpar.training.loss import loss_of
from jaxpar.training.model import MakeModel, Tagged, show, to_path
from jaxpar.training.model.fixed_order import FIXED
from jaxpar.training.offload.disk_state import disk_of, groups_of, refusal, stored_tensors
from jaxpar.training.state import PlacedLeaf, TrainState, place, problems_of, shape_state_and_causes
from jaxpar.utils.arrays import item_bytes
from jaxpar.utils.checks import Range, check_number
from jaxpar.utils.contexts import attention_observer, experts_observer, hint_observer, matmul_observer


def explain(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    *,
    batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    step: Mapping[str, Any] | None = None,
) -> Report:
    """Returns how every parameter, optimizer array, batch array and activation is sharded, by which rule and why.

    Args:
      layout: the layout, on a concrete or an abstract mesh.
      make_model: as for :func:`jaxpar.init`. Only its shapes are computed.
      tx: any optax transform.
      batch: a pytree of ``jp.tag(jax.ShapeDtypeStruct(shape, dtype), *dims)`` leaves, with global shapes.
      loss_fn: as for :func:`jaxpar.train_step`. With ``loss_fn`` and ``batch``, the loss is traced once. The report
        then also lists the activations that the model constrains, the implementation that attention ``auto`` selects
        and why, and an estimate of a step's memory on the device that the mesh names (``MeshSpec.on``). Only then is
        :attr:`Report.unused` exact.
      step: keyword arguments of :func:`jaxpar.train_step`, such as ``{"grad_accum_steps": 4}``, for the
        memory estimate.

    Returns:
      A :class:`Report`. It lists the layout's problems; ``explain`` does not raise them.

    Raises:
      LayoutError: a leaf of ``batch`` carries no logical dims.
      ModelError, AnnotationError: ``make_model`` returned something without parameters, or with malformed logical dims.
      ConfigError: ``step`` has a bad ``precision``.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=4096).abstract(), jp.Rules(embed="data", mlp=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (8192, 512)), "embed", "mlp")}
    >>> report = explain(layout, make_model, optax.adam(1e-3))
    >>> report.total("params").device_bytes
    4096
    """
    step = step or {}
    state, causes = shape_state_and_causes(layout, make_model, tx, step.get("precision"))
    unordered = {path: sorted(names - FIXED) for path, names in causes.items() if names - FIXED}
    tensors, stored = place(layout, state), stored_tensors(layout, state)
    used: set[tuple[str, str]] = set()
    rows = [_row(layout, t, "other" if t.role in ("step", "key", "loss_scale") else t.role) for t in tensors]
    on_disk, unsupported = disk_of(state), refusal(state)
    rows += [_row(layout, t, t.role, disk=on_disk.path) for t in stored if on_disk is not None]
    rows = [with_reason(row, unordered.get(row.path, ())) for row in rows]
    layers_missing = no_layers(tx, any(tensor.host and tensor.is_weight for tensor in tensors))
    problems = [*problems_of(layout, [*tensors, *stored]), *filter(None, (unsupported, layers_missing))]
    for tensor in [*tensors, *stored]:
        used |= tensor.resolved.used
        if tensor.role == "params" and tensor.names is not None:
            gradient = layout.resolve(
                tensor.names, tensor.shape, role="gradients", dtype=tensor.dtype, path=f"gradient of {tensor.path}"
            )
            used |= gradient.used
            problems += [] if tensor.problems else gradient.problems
    inputs, plain_batch = _batch(layout, batch)
    loss = None if batch is None else loss_fn
    precision = Precision.of(step.get("precision"))
    activations, attentions = ([], ()) if loss is None else _activations(layout, loss, state, plain_batch, precision)
    if isinstance(loss_fn, PipelineLoss) and loss_fn.dims is not None and step.get("pipeline") is not None:
        # A pipelined step shards the activations between layers by these dims. Tracing the loss does not use them.
        used |= layout.resolve(loss_fn.dims).used
    for tensor in [*inputs, *activations]:
        used |= tensor.resolved.used
        problems += tensor.problems
        rows.append(_row(layout, tensor, tensor.role))
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1}
    unused, texts = _unused(layout, used), tuple(dict.fromkeys(problems))
    notes: tuple[str, ...] = () if problems or on_disk is None else (_on_disk(layout, state, rows, on_disk.path),)
    notes += _converted(layout)
    memory = None if loss is None else Memory("", {}, ("the layout has problems",))
    if loss is not None and not problems:
        with noting_repairs() as repaired:  # the estimate traces the step
            memory = estimate(layout, loss, state, plain_batch, [*tensors, *inputs], **step)
        notes += wrongly_partitioned(repaired)
        notes += gathered_exactly(rows, precision.gather, _exact(layout, loss, state, plain_batch, step))
        notes += narrow_sums(rows, memory.narrow, precision.reduce == INT8) + assumed_replicated(memory.assumed)
    notes += unequal_initial_values(unordered)
    return Report(sizes, layout.mesh.size, tuple(rows), unused, loss is not None, texts, memory, (*notes, *attentions))


def check(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    *,
    batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    step: Mapping[str, Any] | None = None,
    strict: bool = True,
    max_replicated: float | None = None,
) -> Report:
    """Returns the report of :func:`explain`, or raises one error that lists all its problems.

    Args:
      layout, make_model, tx, batch, loss_fn, step: as for :func:`explain`.
      strict: treat an unused rule, unless it is ``None``, as a problem, provided that the activations were traced.
      max_replicated: the largest fraction, from 0 to 1, of the bytes of parameters and optimizer state that may be
        replicated on all devices.

    Returns:
      The report, without problems.

    Raises:
      LayoutError: with all problems, also that the step cannot be traced.
      ModelError, AnnotationError, ConfigError: as for :func:`explain`; or ``max_replicated`` is no fraction.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data", mlp=None))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}
    >>> check(layout, make_model, optax.adam(1e-3)).total("params").device_bytes
    32
    """
    if max_replicated is not None:
        check_number("max_replicated", max_replicated, Range(0, 1.0))
    report = explain(layout, make_model, tx, batch=batch, loss_fn=loss_fn, step=step)
    return check_report(report, layout, strict=strict, max_replicated=max_replicated)


def check_report(report: Report, layout: Layout, *, strict: bool = True, max_replicated: float | None = None) -> Report:
    """Returns a report that :func:`explain` made for a layout, or raises one error that lists all its problems.

    Args:
      report, layout: the report, and what it is of.
      strict, max_replicated: as for :func:`check`.

    Raises:
      LayoutError: with all problems, also that the step cannot be traced.
    """
    problems = list(report.problems)
    if report.memory is not None and report.memory.untraced:
        problems.append(f"the step cannot be traced: {report.memory.untraced}")
    if strict and report.traced:
        base = dict(layout.rules.base)
        # A rule of None shards nothing. Tables that several models share name dims that some of them lack.
        misleading = [rule for rule in report.unused if base.get(rule) != ()]
        problems += [
            f"the rule {rule} is not used by any tensor. Remedy: {_without(layout.rules, rule, report.unused)}, or "
            "correct its intended annotation."
            for rule in misleading
        ]
    total = report.total("params", "opt_state")
    if max_replicated is not None and total.replicated > max_replicated:
        replicated = [row for row in report.rows if row.part in ("params", "opt_state") and row.replicated]
        worst = sorted(replicated, key=lambda row: -row.bytes)[:3]
        problems.append(
            f"{total.replicated:.2%} of the {show_bytes(total.bytes)} of parameters and optimizer state are "
            f"replicated on all {report.devices} devices, more than max_replicated={max_replicated:.2%}. The "
            f"largest: {', '.join(f'{row.path} ({show_bytes(row.bytes)})' for row in worst)}. Remedy: shard their "
            "dims over an axis, or raise max_replicated."
        )
    if problems:
        raise LayoutError(problems)
    return report


def _row(layout: Layout, tensor: PlacedLeaf, part: str, *, disk: str = "") -> Row:
    itemsize = item_bytes(tensor.dtype)
    resolved = tensor.resolved
    dims = resolved.dims
    num_shards = [shard_count(dim.axes, layout.sizes) for dim in dims]
    # Without logical dims the reasons of all dims are the same; the tensor's own note gives them once.
    why = [f"{dim.name or f'dim {i}'}: {dim.why}" for i, dim in enumerate(dims) if dim.why and dim.name is not None]
    if tensor.names is not None:
        why += [f"dim {i}: {dim.why}" for i, dim in enumerate(dims) if dim.why and dim.name is None]
    why += [note for note in (tensor.note, resolved.note) if note]
    size = device_bytes(tensor.shape, itemsize, num_shards)
    where = f"on disk in {disk}" if disk else "in host memory"
    why += [f"{where}, {show_bytes(size)} per device"] if tensor.host or disk else []
    return Row(
        part=part,
        path=tensor.path,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        dims=tuple(dim.name for dim in dims),
        spec=resolved.axes,
        bytes=math.ceil(itemsize * math.prod(tensor.shape)),
        device_bytes=0 if tensor.host or disk else size,
        disk_bytes=size if disk else 0,
        rules=tuple(dict.fromkeys(dim.rule for dim in dims if dim.axes)),
        why=tuple(why),
        problems=resolved.problems,
    )


def _on_disk(layout: Layout, state: TrainState, rows: Sequence[Row], path: str) -> str:
    stored = [row for row in rows if row.disk_bytes]
    if not stored:
        return f"on disk in {path}: no arrays, because every array of the optimizer state is smaller than min_bytes"
    pieces = [
        sum(math.prod(m.sharding.shard_shape(m.shape)) * m.dtype.itemsize for m in group.stored)
        for group in groups_of(layout, state)
    ]
    return (
        f"on disk in {path}: {len(stored)} arrays of the optimizer state, "
        f"{show_bytes(sum(row.bytes for row in stored))}, stored in two generations. The step consists of two kinds "
        "of programs. The one estimated or compiled here computes the gradients. The update then holds, besides "
        f"parameters and gradients, up to {AHEAD + 1} pieces in flight, old and new, of at most "
        f"{show_bytes(max(pieces))} per device each"
    )


def _batch(layout: Layout, batch: Any) -> tuple[list[PlacedLeaf], Any]:
    """Returns the tensors of the batch, and the batch without its tags."""
    tensors = []

    def one(keys: Any, leaf: Any) -> Any:
        path = show(("batch", *to_path(keys)))
        if not isinstance(leaf, Tagged):
            raise LayoutError(
                f"{path} has no logical dims. Remedy: wrap it: jp.tag(jax.ShapeDtypeStruct(shape, dtype), 'batch', "
                "'seq')."
            )
        x = leaf.value
        resolved = layout.resolve(leaf.dims, x.shape, dtype=x.dtype, path=path)
        tensors.append(PlacedLeaf("batch", path, x.shape, x.dtype, leaf.dims, resolved))
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    plain = jax.tree_util.tree_map_with_path(one, batch, is_leaf=lambda x: isinstance(x, Tagged))
    return tensors, plain


def _activations(
    layout: Layout, loss_fn: Callable[..., Any], state: Any, batch: Any, precision: Precision
) -> tuple[list[PlacedLeaf], tuple[str, ...]]:
    """Trace the loss; return the activations that the model constrains, and notes on attention, experts and matmuls."""
    found: dict[Any, PlacedLeaf] = {}
    notes: dict[str, None] = {}

    def note(place: str, dims: Sequence[str | None], x: Any, resolved: Resolved) -> None:
        key = (place, tuple(dims), x.shape, str(x.dtype))
        found[key] = PlacedLeaf("activations", place, x.shape, x.dtype, tuple(dims), resolved)

    def take(place: str, q: Any, k: Any, choice: Choice) -> None:
        sizes = f"{' × '.join(map(str, q.shape))} queries, {k.shape[1]} keys of {k.shape[2]} heads, {q.dtype.name}"
        notes[f"attention in {place}, {sizes}: auto selects {choice.impl}; {choice.why}"] = None

    def route(place: str, plan: DispatchPlan, why: str) -> None:
        notes[f"experts in {place}: {plan.describe()}; dispatch {plan.dispatch}: {why}"] = None

    def multiply(place: str, x: Any, ws: Sequence[Any], routes: Sequence[MatmulRoute]) -> None:
        if any(route.is_tensor for route in routes):
            names = ", ".join(str(route.dims).replace("'", "") for route in routes)
            notes[f"matmul in {place}, {names}: {Matmuls.of(x, ws, routes, precision).describe(layout.sizes)}"] = None

    hints, attention, experts = hint_observer(note), attention_observer(take), experts_observer(route)
    with hints, attention, experts, matmul_observer(multiply), tracing_under(layout):
        jax.eval_shape(lambda state, batch: loss_of(loss_fn, state, batch)(state.params)[0], state, batch)
    return list(found.values()), tuple(notes)


def _exact(
    layout: Layout, loss_fn: Callable[..., Any], state: Any, batch: Any, step: Mapping[str, Any]
) -> ExactWeights:
    precision = Precision.of(step.get("precision"))
    per_step = "per_step" in (step.get("grad_reduction"), step.get("weight_gather"))
    loss = lambda params, state, batch: loss_of(loss_fn, state, batch)(params)[0]
    with tracing_under(layout), precision_scope(precision):
        return exact_weights(
            loss, state, precision, state, batch, all_rounded=per_step or step.get("pipeline") is not None
        )


def _converted(layout: Layout) -> tuple[str, ...]:
    if not layout.converted:
        return ()
    axes = ", ".join(layout.converted)
    return (f"Explicit axes used as Auto axes: {axes} (to keep them: Layout(mesh, rules, explicit=True))",)


def _unused(layout: Layout, used: set[tuple[str, str]]) -> tuple[str, ...]:
    rules = layout.rules
    # A role may overlay only what the base table names, so a base rule of None says no more than that the name exists.
    needed = {dim for role, dim in used if role and rules.table.get(dim) == ()}
    all_rules = [("", dim) for dim, _ in rules.base if dim not in needed]
    for role, overlay in rules.overlays:
        all_rules += [(role, "over")] if isinstance(overlay, Over) else [(role, dim) for dim, _ in overlay]
    return tuple(entry(role, dim) for role, dim in all_rules if (role, dim) not in used)


def _without(rules: Rules, rule: str, unused: Sequence[str]) -> str:
    """Returns how to remove an unused rule, if another part of the table requires the name of its dim."""
    owners = [role for role, own in rules.overlays if not isinstance(own, Over) and rule in dict(own)]
    needed = [entry(role, rule) for role in owners if entry(role, rule) not in unused]
    if needed:
        return f"set it to None, because {' and '.join(needed)} requires the name"
    others = [*owners, *(["indivisible"] if rule in rules.indivisible else [])]
    return f"remove it, also from {' and '.join(others)}" if others else "remove it"
