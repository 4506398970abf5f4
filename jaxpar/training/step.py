"""The train step: an ordinary jitted function, donated, laid out; it adds nothing to what one would write by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpar.errors import ConfigError, LayoutError, ModelError, did_you_mean
from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.collectives.gather_reduce import asking, wide
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.pipeline.options import Asynchronous, Pipeline
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.sharding.layout import Layout, lay_out, to_spec, tracing_under
from jaxpar.training import one_bit_adam
from jaxpar.training.gradients import gradients, rows_apart
from jaxpar.training.loss import Metrics, loss_of
from jaxpar.training.microbatches import GradientResult, GradReduction, StepConfig, WeightGather
from jaxpar.training.model import show, to_path
from jaxpar.training.offload.host_update import update as streaming_update
from jaxpar.training.optimizers import check_steps, check_update
from jaxpar.training.pipeline.evaluate import evaluated
from jaxpar.training.state import TrainState, place, problems_of
from jaxpar.utils.checks import is_count


def train_step(
    layout: Layout,
    loss_fn: Callable[..., Any],
    *,
    grad_accum_steps: int = 1,
    weight_gather: WeightGather = "per_use",
    grad_reduction: GradReduction | None = None,
    precision: PrecisionLike = None,
    fusion: CollectiveFusion | None = None,
    pipeline: Pipeline | Schedule | None = None,
    clip_norm: float | None = None,
    skip_nonfinite: bool = True,
    donate: bool = True,
    return_grads: bool = False,
) -> jax.stages.Wrapped:
    """A jitted ``step(state, batch) -> (state, metrics)``; ``.lower()`` and ``.trace()`` work as on any jitted function.

    Args:
      layout: the layout of the state that goes in and comes out. The step traces under it, inside or outside a ``with``.
      loss_fn: ``loss_fn(model, batch)`` with what ``make_model`` returned (an NNX module, Linen variables or a pytree).
        What it assigns to an NNX module's variables is carried; to its parameters, holds for that call only.
        It returns the scalar loss, ``(loss, aux)`` with a dict of metrics, or ``(loss, aux, updates)`` with the new
        values of mutable Linen collections. If it takes an argument named ``key`` it receives a PRNG key for this step.
        The rule of ``batch`` shards dim 0 of every array of ``batch``, its rows, also of an array that was not put (:func:`jaxpar.shard_array`), as one of
        NumPy's. Scalars, and arrays of one row beside arrays of more, are replicated. On Explicit axes every array keeps its own sharding.
      grad_accum_steps: cut the batch into so many microbatches, and sum their gradients in fp32. A microbatch counts as the others do,
        or by the metric ``weight`` that ``loss_fn`` returns (as the number of tokens its mean is over). One of weight 0 adds nothing, also
        where its loss is NaN.
      weight_gather: ``per_use`` gathers sharded weights where they are used, ``per_step`` once before (see :class:`jaxpar.Zero`).
      grad_reduction: ``per_step`` makes each device sum the gradients of its own rows, and reduces at the end: the loss is then the mean of
        the devices' (weighted, as above), and a ``key`` differs from device to device. ``per_microbatch`` leaves the reduction to the
        compiler, which reduces every microbatch (under a pipeline it is ``Pipeline(grad_reduction="per_microbatch")``). If not given, ``per_step`` where microbatches are asked for and the batch's axes
        split no parameter.
      precision: dtypes of compute, gathers and reductions; see :class:`jaxpar.Precision`.
      fusion: what goes in one collective; see :class:`jaxpar.CollectiveFusion`.
      pipeline: give the layers of a :class:`jaxpar.PipelineLoss` ``loss_fn`` to the stages of the axis ``pipeline``, by this schedule; see
        :class:`jaxpar.Pipeline`.
      clip_norm: scale gradients down to this global norm.
      skip_nonfinite: leave parameters, optimizer state and carried variables as they are where the loss or a gradient is not
        finite; ``metrics["skipped"]`` says so. The step still counts, so the next one has another key.
      donate: give the old state's memory to the new one.
      return_grads: also return the gradients (before clipping), as ``metrics["grads"]``. For verification.

    Returns:
      The step. ``metrics`` holds ``loss``, ``grad_norm`` (before clipping, L2, fp32; with :func:`jaxpar.one_bit_adam`
      the root mean square of the norms of the devices' own gradients, which is not less than the norm of their mean), ``skipped`` (unless told not to),
      ``loss_scale`` where there is one, and what ``loss_fn`` returned beside.

    Raises (when traced):
      LayoutError: a tensor does not fit the rules, the batch's axes do not divide its rows (unless the rules say
        ``indivisible={"batch": "replicate"}``), or another layout is ambient.
      ModelError: ``loss_fn`` returned no scalar, or a metric under a name that is taken; or the step would change the
        shape or dtype of a parameter or of a carried array.

    Raises (at once):
      ConfigError: ``grad_accum_steps``, ``weight_gather``, ``grad_reduction`` or ``precision`` is none of what is there, or ``fusion`` has a size that the
        compiler for the layout's devices does not take. When traced with :func:`jaxpar.one_bit_adam`: an argument that does not go
        with it.
    """
    how = how_of(grad_accum_steps, weight_gather, grad_reduction, precision, skip_nonfinite, fusion)
    if isinstance(pipeline, Asynchronous):
        raise ConfigError(
            f"pipeline: {pipeline.name!r} carries microbatches from step to step, which train_step does not. Remedy: jp.PipedreamStep, or "
            f"jp.schedule('1f1b')."
        )
    how = replace(how, pipeline=Pipeline(pipeline) if isinstance(pipeline, Schedule) else pipeline)
    options = how.fusion.compiler_options(layout)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        own = isinstance(state.metadata.tx, one_bit_adam.OneBit)
        if own:
            _refuse(how, clip_norm)
        with tracing_under(layout):
            found, grads, norm, finite = measure(layout, loss_fn, state, batch, replace(how, own=own), clip_norm)
            loss = found.loss
            kept = {"grads": jax.tree.map(lambda g: g.mean(0), grads) if own else found.grads} if return_grads else {}
            keep = finite if skip_nonfinite else jnp.asarray(True)
            value = value_of(layout, loss_fn, state, batch, replace(how, own=own))
            params, opt_state = _update(layout, state, grads, loss, value, keep)
            new = TrainState(
                state.step + 1, params, opt_state, found.variables, state.key, state.metadata, state.loss_scale
            )
            check_same(state, new)
            if skip_nonfinite:
                new = _keep(state, new, finite)
                kept["skipped"] = ~finite
                if how.precision.scale is not None:
                    new = replace(new, loss_scale=how.precision.scale.next(state.loss_scale, finite))
                    kept["loss_scale"] = state.loss_scale["scale"]
            return place_state(layout, new), {"loss": loss, "grad_norm": norm, **found.metrics, **kept}

    # Without devices there is nothing to compile for: who compiles it for a topology hands them over there.
    options = options if isinstance(layout.mesh, Mesh) else {}
    return jax.jit(step, donate_argnums=(0,) if donate else (), compiler_options=options or None)


def measure(
    layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: StepConfig, clip_norm: float | None
) -> tuple[GradientResult, Any, jax.Array, jax.Array]:
    """What a batch gave, its gradients after clipping, their norm before (L2, fp32), and whether it and the loss are finite."""
    found = gradients(layout, loss_fn, state, batch, how)
    grads, norm = clipped(found.grads, clip_norm, own=how.own)
    return found, grads, norm, jnp.isfinite(norm) & jnp.isfinite(found.loss)


def value_of(
    layout: Layout, loss_fn: Callable[..., Any], state: TrainState, batch: Any, how: StepConfig
) -> Callable[[Any], jax.Array]:
    """``params -> loss``, the same function as the step's own loss: its keys, microbatches, precision, ZeRO stage and pipeline.

    Its derivative is made of the gradients that :func:`jaxpar.training.gradients.gradients` returns, so jax differentiates through no pipeline and no
    loss scale. Nothing is traced before the first call.
    """

    @jax.custom_jvp
    def value(params: Any) -> jax.Array:
        return gradients(layout, loss_fn, replace(state, params=params), batch, how).loss

    @value.defjvp
    def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
        found = gradients(layout, loss_fn, replace(state, params=primals[0]), batch, how)
        # Not vdot: it flattens, which would gather what is sharded.
        slopes = jax.tree.map(lambda g, t: jnp.sum(wide(g) * wide(t)), found.grads, tangents[0])
        return found.loss, sum(jax.tree.leaves(slopes), jnp.zeros(())).astype(found.loss.dtype)

    return value


def updated(
    layout: Layout,
    loss_fn: Callable[..., Any],
    state: TrainState,
    batch: Any,
    grads: Any,
    loss: jax.Array,
    *,
    clip_norm: float | None = None,
) -> tuple[Any, optax.OptState]:
    """Parameters and optimizer state after a step whose gradients (before clipping) and loss are given.

    For verification: :func:`train_step` computes the gradients itself.
    """
    own = isinstance(state.metadata.tx, one_bit_adam.OneBit)
    how = replace(how_of(1, "per_use", None, None, True, None), own=own)
    with tracing_under(layout):
        grads = jax.tree.map(lambda g: g[None], grads) if own else clipped(grads, clip_norm)[0]
        return _update(layout, state, grads, loss, value_of(layout, loss_fn, state, batch, how), jnp.asarray(True))


def clipped(grads: Any, clip_norm: float | None, *, own: bool = False) -> tuple[Any, jax.Array]:
    """Gradients, scaled down to a norm where one is given, and their norm before (L2, fp32)."""
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))
    if own:  # the root mean square of the norms of the devices' own
        norm = norm / jnp.sqrt(jax.tree.leaves(grads)[0].shape[0]).astype(norm.dtype)
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return grads, norm


def how_of(
    grad_accum_steps: int,
    weight_gather: WeightGather,
    grad_reduction: GradReduction | None,
    precision: PrecisionLike,
    skip_nonfinite: bool,
    fusion: CollectiveFusion | None,
) -> StepConfig:
    """The ways that these arguments of :func:`train_step` ask for; raises what that raises at once."""
    if not is_count(grad_accum_steps):
        raise ConfigError(
            f"grad_accum_steps is {grad_accum_steps!r}, but a number of microbatches, 1 or more, is wanted."
        )
    for name, value, known in (
        ("weight_gather", weight_gather, get_args(WeightGather)),
        ("grad_reduction", grad_reduction, (None, *get_args(GradReduction))),
    ):
        if value not in known:
            wanted = " or ".join(repr(option) for option in known)
            raise ConfigError(f"{name} is {value!r}, but {wanted} is wanted.{did_you_mean(str(value), known[1:])}")
    found = Precision.of(precision)
    if found.scale is not None and not skip_nonfinite:
        raise ConfigError(
            "precision: a loss scale is found by skipping steps that are not finite, but skip_nonfinite is False. Remedy: leave "
            "skip_nonfinite out."
        )
    return StepConfig(grad_accum_steps, weight_gather, grad_reduction, found, fusion or CollectiveFusion())


def _refuse(how: StepConfig, clip_norm: float | None) -> None:
    """What does not go with an optimizer that reduces gradients itself."""
    fusion = ((f"fusion: {name}", value) for name, value in vars(how.fusion).items())
    groups = [(name, list(value), None) for name, value in fusion if isinstance(value, tuple)]
    one_bit_adam.refuse(
        [
            ("clip_norm", clip_norm, None),
            ("weight_gather", how.weight_gather, "per_use"),
            ("grad_reduction", "per_step" if how.grad_reduction is None else how.grad_reduction, "per_step"),
            ("precision: reduce", how.precision.reduce, None),
            *groups,
        ]
    )


def eval_step(
    layout: Layout,
    loss_fn: Callable[..., Any],
    *,
    precision: PrecisionLike = None,
    pipeline: Pipeline | Schedule | None = None,
) -> jax.stages.Wrapped:
    """A jitted ``evaluate(state, batch) -> metrics`` of the same ``loss_fn``, without gradients; nothing is donated.

    Args:
      pipeline: as for :func:`train_step`, of which the forwards alone are done, as many microbatches; or a schedule of forwards (``circular``).

    Raises (when traced):
      LayoutError: the batch's rows do not make that many microbatches; or, without ``pipeline``, the batch's axes do not divide its rows, and
        the rules do not say ``indivisible={"batch": "replicate"}``.
    """
    how, asked = Precision.of(precision), Pipeline(pipeline) if isinstance(pipeline, Schedule) else pipeline

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        with tracing_under(layout), asking(how):
            if asked is not None:
                return evaluated(layout, loss_fn, state, batch, how, asked)
            loss, (aux, _) = loss_of(loss_fn, state, rows_apart(layout, batch))(
                jax.tree.map(how.computing, state.params)
            )
            return {"loss": loss, **aux}

    return jax.jit(evaluate)


def _update(
    layout: Layout,
    state: TrainState,
    grads: Any,
    loss: jax.Array,
    value_fn: Callable[[Any], jax.Array],
    finite: jax.Array,
) -> tuple[Any, optax.OptState]:
    """The optimizer's step, with whatever optax's line searches, Polyak steps, SAM and Sophia ask for beside gradients.

    ``value_fn`` is the function whose value is ``loss`` (see :func:`value_of`); an optimizer that does not call it costs nothing.
    With a state in the host's memory, all stays as it was where ``finite`` is false; otherwise that is for the caller to see to.
    """

    def again(params: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        # A line search hands on to it what it does not know itself, and refuses what this does not take.
        del obj_fn, grad_fn
        return value_fn(params)

    gradient = jax.grad(again)
    offered = {
        "value": loss,
        "grad": grads,
        "value_fn": again,
        "obj_fn": again,
        "grad_fn": lambda params, *_: gradient(params),
    }
    tx = state.metadata.tx
    wanted = inspect.signature(tx.update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    extra = {name: value for name, value in offered.items() if takes_any or name in wanted}
    if isinstance(tx, one_bit_adam.OneBit):
        dims = dict(state.metadata.dims)
        updates, new = one_bit_adam.update(layout, tx.settings, dims, grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), new
    if any(map(on_host, jax.tree.leaves((state.params, state.opt_state)))):
        return streaming_update(layout, state, grads, finite, extra)
    check_steps(state.opt_state)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
    check_update(state.params, updates, state.opt_state, opt_state)
    return optax.apply_updates(state.params, updates), opt_state


def _keep(old: TrainState, new: TrainState, update: jax.Array) -> TrainState:
    """``new``, but with what ``old`` has trained and carried where ``update`` is false."""
    # With the optimizer's state on the host the update itself has seen to it; a second look at the old would be a copy of it.
    seen_to = any(map(on_host, jax.tree.leaves((new.params, new.opt_state))))
    parts = {
        name: jax.tree.map(lambda a, b: jnp.where(update, a, b), getattr(new, name), getattr(old, name))
        for name in (("variables",) if seen_to else ("params", "opt_state", "variables"))
    }
    return replace(new, **parts)


def check_same(old: TrainState, new: TrainState) -> None:
    """A step keeps the shape and dtype of all it trains and carries, or the next one would be another program."""
    for part, cause in (("params", "the optimizer"), ("variables", "loss_fn")):
        before, after = (
            {to_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(getattr(state, part))}
            for state in (old, new)
        )
        for path in [*before, *(after.keys() - before.keys())]:
            was, now = (_describe(leaves.get(path)) for leaves in (before, after))
            if was != now:
                raise ModelError(
                    f"{cause} turned {show((part, *path))} from {was} into {now}, but a step keeps the shape and dtype of "
                    f"all it trains and carries."
                )


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(jnp.shape(leaf))}"


def place_state(layout: Layout, state: TrainState) -> TrainState:
    """``state`` with every leaf constrained to its place."""
    leaves, treedef = jax.tree.flatten(state)
    tensors = place(layout, state)
    if problems := problems_of(layout, tensors):
        raise LayoutError(problems)
    placed = [
        leaf if on_host(leaf) else lay_out(layout.mesh, leaf, to_spec(tensor.resolved))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)
