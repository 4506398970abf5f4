"""The jitted train and eval steps.

A train step is an ordinary jitted function with donated, sharded state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpar.errors import ConfigError, LayoutError, ModelError, did_you_mean
from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.collectives.gather_reduce import precision_scope
from jaxpar.parallel.explicit_axes import without_explicit_axes
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.pipeline.options import Asynchronous, Pipeline, pipeline_options
from jaxpar.parallel.pipeline.schedules.schedule import Schedule
from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.sharding.layout import Layout, to_spec, tracing_under, with_sharding
from jaxpar.training.arguments import check_layout, check_state
from jaxpar.training.exact_weights import computing
from jaxpar.training.gradients import gradients, rows_apart
from jaxpar.training.loss import LossFn, Metrics, loss_of
from jaxpar.training.microbatches import GradientResult, GradReduction, StepConfig, WeightGather
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.offload.host_update import update as streaming_update
from jaxpar.training.optimizers import accepted, check_steps, check_update
from jaxpar.training.pipeline.evaluate import evaluate_pipeline
from jaxpar.training.rounded_weights import with_rounded_weights
from jaxpar.training.self_reducing import SelfReducing
from jaxpar.training.state import TrainState, place, problems_of
from jaxpar.training.step_call import StepCall, partitioned
from jaxpar.training.weight_changes import sampled
from jaxpar.utils.arrays import at_least_fp32, describe
from jaxpar.utils.checks import is_count


def train_step(
    layout: Layout,
    loss_fn: LossFn,
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
    """Returns a jitted ``step(state, batch) -> (state, metrics)``, with ``.lower()`` and ``.trace()`` as usual.

    Args:
      layout: the layout of the state that the step takes and returns. The step is traced under it, inside or outside a
        ``with`` block.
      loss_fn: ``loss_fn(model, batch)``, where ``model`` is what ``make_model`` returned (an NNX module, Linen
        variables or a pytree). The step carries assignments to an NNX module's variables to the next state; assignments
        to its parameters hold for that call only. It returns the scalar loss, ``(loss, aux)`` with a dict of metrics,
        or ``(loss, aux, updates)`` with the new values of mutable Linen collections. If it takes an argument named
        ``key``, it receives this step's PRNG key. The rule for ``batch`` shards dim 0 (the rows) of every array in
        ``batch``, including NumPy arrays and others that were not placed by :func:`jaxpar.shard_array`. Scalars are
        replicated, and so are arrays with one row when another array has more. On Explicit mesh axes every array keeps
        its own sharding.
      grad_accum_steps: number of microbatches that the batch is split into. Their gradients are summed in fp32. All
        microbatches have the same weight, unless ``loss_fn`` returns the metric ``weight`` (for example, the number of
        tokens its mean is over). A microbatch of weight 0 contributes nothing, even if its loss is NaN.
      weight_gather: ``per_use`` gathers sharded weights where they are used; ``per_step`` gathers them once, before the
        step (see :class:`jaxpar.Zero`).
      grad_reduction: ``per_step`` sums the gradients of each device's own rows locally and reduces them at the end of
        the step. The loss is then the mean of the per-device losses (weighted as above), and ``key`` differs between
        devices. ``per_microbatch`` leaves the reduction to the compiler, which reduces every microbatch (with a
        pipeline, use ``Pipeline(grad_reduction="per_microbatch")``). By default it is ``per_step`` if
        ``grad_accum_steps`` is above 1 and the batch's axes shard no parameter. If this and ``weight_gather`` are both
        ``per_step``, a step for TPUs with one microbatch may communicate while the layers compute instead; see
        :mod:`jaxpar.training.layer_gathers`.
      precision: dtypes of the compute, the gathers and the reductions; see :class:`jaxpar.Precision`.
      fusion: which tensors share one collective; see :class:`jaxpar.overlap.CollectiveFusion`.
      pipeline: runs the layers of a :class:`jaxpar.pipeline.PipelineLoss` ``loss_fn`` on the stages of the axis
        ``pipeline``, by this schedule; see :class:`jaxpar.Pipeline`.
      clip_norm: global norm that the gradients are scaled down to.
      skip_nonfinite: keep parameters, optimizer state and carried variables unchanged when the loss or a gradient is
        not finite; ``metrics["skipped"]`` reports it. ``state.step`` still increments, so the next step has another
        key.
      donate: donate the old state's memory to the new one.
      return_grads: also return the gradients (before clipping) as ``metrics["grads"]``, for verification.

    Returns:
      The step. ``metrics`` holds ``loss``, ``grad_norm`` (before clipping, L2, fp32), ``skipped`` (with
      ``skip_nonfinite``), ``loss_scale`` (if there is one), ``weights_changed`` (the share of the weights of 16 bits
      that the step changed, if there are any; updates below half of their spacing round away), and the metrics that
      ``loss_fn`` returned. With
      :func:`jaxpar.one_bit_adam`, ``grad_norm`` is the root mean square of the norms of the per-device gradients,
      which is at least the norm of their mean.

    Raises (when traced):
      LayoutError: a tensor does not fit the rules, the batch's axes do not divide its rows (unless the rules have
        ``indivisible={"batch": "replicate"}``), or another layout is ambient.
      ModelError: ``loss_fn`` needs other arguments, or returned no scalar, or a metric with a reserved name; or the
        step would change the shape or dtype of a parameter or of a carried array.
      StateError: ``state`` is not what :func:`jaxpar.init` returns. Also when called with a state that was donated to
        an earlier call.
      ConfigError: an argument is incompatible with the state's optimizer (such as :func:`jaxpar.one_bit_adam`), with
        weights in host memory, with the model's dtypes or with the stages of the pipeline.

    Raises (immediately):
      ConfigError: ``grad_accum_steps``, ``weight_gather``, ``grad_reduction`` or ``precision`` has no valid value, or
        ``fusion`` has a size that the compiler for the layout's devices does not support; or ``pipeline`` is
        asynchronous.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.numpy.ones(8), "embed")}
    >>> step = train_step(layout, lambda model, batch: (batch["x"] @ model["w"]).mean())
    >>> state, metrics = step(jp.init(layout, make_model, optax.sgd(0.5)), {"x": jax.numpy.ones((8, 8))})
    >>> float(metrics["loss"]), state.params["w"].sharding.spec, float(state.params["w"][0])
    (8.0, P('data',), 0.5)
    """
    check_layout(layout, "train_step(layout, loss_fn)")
    config = step_config(grad_accum_steps, weight_gather, grad_reduction, precision, skip_nonfinite, fusion)
    if isinstance(pipeline, Asynchronous):
        raise ConfigError(
            f"pipeline: {pipeline.name!r} carries microbatches from step to step, which train_step does not support. "
            "Remedy: use jp.pipeline.pipedream_train_step, or jp.pipeline.schedule('1f1b')."
        )
    config = replace(config, pipeline=pipeline_options(pipeline))
    options = config.fusion.compiler_options(layout)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        check_state(state)
        with tracing_under(layout):
            return partitioned(layout, run, state, batch)

    def run(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        tx, step_options = state.metadata.tx, config
        if isinstance(tx, SelfReducing):
            _check_supported(tx, config, clip_norm)
            step_options = replace(config, per_device_grads=True)
        batch = without_explicit_axes(layout, batch)
        found, grads, norm, finite = measure(layout, loss_fn, state, batch, step_options, clip_norm)
        loss = found.loss
        extra = {}
        if return_grads:
            own = step_options.per_device_grads
            extra["grads"] = jax.tree.map(lambda g: g.mean(0), grads) if own else found.grads
        keep = finite if skip_nonfinite else jnp.asarray(True)
        value = value_of(layout, loss_fn, state, batch, step_options)
        state, sample = sampled(layout, state)
        params, opt_state, hosted = _update(layout, state, grads, loss, value, keep)
        new = TrainState(
            state.step + 1, params, opt_state, found.variables, state.key, state.metadata, state.loss_scale
        )
        check_same(state, new)
        if skip_nonfinite:
            # With state in host memory, the streaming update has already selected; selecting here would copy the
            # old state.
            selected = any(map(on_host, jax.tree.leaves((new.params, new.opt_state))))
            parts = ("variables",) if selected else ("params", "opt_state", "variables")
            new, skip_metrics = keep_unless_finite(state, new, finite, config, parts)
            extra |= skip_metrics
        new = place_state(layout, new)
        extra |= sample.metric(new.params, hosted)
        return new, {"loss": loss, "grad_norm": norm, **found.metrics, **extra}

    # An abstract mesh has no compiler options; code that compiles for a topology passes its own.
    options = options if isinstance(layout.mesh, Mesh) else {}
    jitted = jax.jit(step, donate_argnums=(0,) if donate else (), compiler_options=options or None)
    return cast(jax.stages.Wrapped, StepCall(jitted))


def measure(
    layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig, clip_norm: float | None
) -> tuple[GradientResult, Any, jax.Array, jax.Array]:
    """Returns a batch's results, the clipped gradients, their norm before (L2, fp32), and whether all is finite."""
    found = gradients(layout, loss_fn, state, batch, config)
    grads, norm = clipped(found.grads, clip_norm, own=config.per_device_grads)
    return found, grads, norm, jnp.isfinite(norm) & jnp.isfinite(found.loss)


def value_of(
    layout: Layout, loss_fn: LossFn, state: TrainState, batch: Any, config: StepConfig
) -> Callable[[Any], jax.Array]:
    """Returns ``params -> loss`` with the step's own keys, microbatches, precision, ZeRO stage and pipeline.

    Its derivative comes from :func:`jaxpar.training.gradients.gradients`, so JAX differentiates through no pipeline and
    no loss scale. Nothing is traced before the first call.
    """

    @jax.custom_jvp
    def value(params: Any) -> jax.Array:
        return gradients(layout, loss_fn, replace(state, params=params), batch, config).loss

    @value.defjvp
    def derivative(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
        found = gradients(layout, loss_fn, replace(state, params=primals[0]), batch, config)
        # Not vdot: it flattens, which would gather sharded arrays.
        slopes = jax.tree.map(lambda g, t: jnp.sum(at_least_fp32(g) * at_least_fp32(t)), found.grads, tangents[0])
        return found.loss, sum(jax.tree.leaves(slopes), jnp.zeros(())).astype(found.loss.dtype)

    return value


def updated(
    layout: Layout,
    loss_fn: LossFn,
    state: TrainState,
    batch: Any,
    grads: Any,
    loss: jax.Array,
    *,
    clip_norm: float | None = None,
) -> tuple[Any, optax.OptState]:
    """Returns parameters and optimizer state after a step with the given gradients (before clipping) and loss.

    For verification: :func:`train_step` computes the gradients itself.
    """
    own = isinstance(state.metadata.tx, SelfReducing)
    config = StepConfig(per_device_grads=own)
    with tracing_under(layout):
        grads = jax.tree.map(lambda g: g[None], grads) if own else clipped(grads, clip_norm)[0]
        value = value_of(layout, loss_fn, state, batch, config)
        return _update(layout, state, grads, loss, value, jnp.asarray(True))[:2]


def clipped(grads: Any, clip_norm: float | None, *, own: bool = False) -> tuple[Any, jax.Array]:
    """Returns the gradients, scaled down to ``clip_norm`` if given, and their norm before that (L2, fp32).

    With ``own``, the gradients are per-device along dim 0, and the norm is the root mean square of the devices' norms.
    """
    norm = optax.tree.norm(jax.tree.map(at_least_fp32, grads))
    if own:  # root mean square of the per-device norms
        norm = norm / jnp.sqrt(jax.tree.leaves(grads)[0].shape[0]).astype(norm.dtype)
    if clip_norm is not None:
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return grads, norm


def step_config(
    grad_accum_steps: int = 1,
    weight_gather: WeightGather = "per_use",
    grad_reduction: GradReduction | None = None,
    precision: PrecisionLike = None,
    skip_nonfinite: bool = True,
    fusion: CollectiveFusion | None = None,
) -> StepConfig:
    """Checks these arguments of :func:`train_step` and returns them as a ``StepConfig``.

    Raises:
      ConfigError: an argument has no valid value, or ``precision`` has a loss scale and ``skip_nonfinite`` is false.
    """
    if not is_count(grad_accum_steps):
        raise ConfigError(f"grad_accum_steps must be a positive integer, got {grad_accum_steps!r}.")
    for name, value, known in (
        ("weight_gather", weight_gather, get_args(WeightGather)),
        ("grad_reduction", grad_reduction, (None, *get_args(GradReduction))),
    ):
        if value not in known:
            choices = " or ".join(map(repr, known))
            raise ConfigError(f"{name} must be {choices}, got {value!r}.{did_you_mean(str(value), known[1:])}")
    found = Precision.of(precision)
    if found.scale is not None and not skip_nonfinite:
        raise ConfigError(
            "precision: a loss scale is found by skipping steps that are not finite, but skip_nonfinite is False. "
            "Remedy: leave skip_nonfinite out, or use a precision without a loss scale."
        )
    return StepConfig(grad_accum_steps, weight_gather, grad_reduction, found, fusion or CollectiveFusion())


def _check_supported(tx: SelfReducing, config: StepConfig, clip_norm: float | None) -> None:
    """Raises if an argument is incompatible with an optimizer that reduces gradients itself."""
    fusion = ((f"fusion: {name}", value) for name, value in vars(config.fusion).items())
    groups = [(name, list(value), None) for name, value in fusion if isinstance(value, tuple)]
    tx.check_options(
        [
            ("clip_norm", clip_norm, None),
            ("weight_gather", config.weight_gather, "per_use"),
            ("grad_reduction", "per_step" if config.grad_reduction is None else config.grad_reduction, "per_step"),
            ("precision: reduce", config.precision.reduce, None),
            *groups,
        ]
    )


def eval_step(
    layout: Layout, loss_fn: LossFn, *, precision: PrecisionLike = None, pipeline: Pipeline | Schedule | None = None
) -> jax.stages.Wrapped:
    """Returns a jitted ``evaluate(state, batch) -> metrics`` for ``loss_fn``, without gradients or donation.

    Args:
      layout: the layout of the state, as for :func:`train_step`.
      loss_fn: as for :func:`train_step`.
      precision: as for :func:`train_step`.
      pipeline: as for :func:`train_step`; only its forward passes run, with the same number of microbatches. May also
        be a forward-only schedule (``circular``).

    Raises (when traced):
      LayoutError: the batch's rows cannot be split into that many microbatches; or, without ``pipeline``, the batch's
        axes do not divide its rows and the rules do not have ``indivisible={"batch": "replicate"}``.
      ModelError: ``loss_fn`` returned no scalar, or a metric with a reserved name.
      ConfigError: the layers cannot be split over the stages.

    Raises (immediately):
      ConfigError: ``precision`` has no valid value.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(batch="data", embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.numpy.ones(8), "embed")}
    >>> evaluate = eval_step(layout, lambda model, batch: ((batch["x"] @ model["w"]).mean(), {"rows": 8}))
    >>> state = jp.abstract_state(layout, make_model, optax.sgd(0.5))
    >>> sorted(jax.eval_shape(evaluate, state, {"x": jax.numpy.ones((8, 8))}))
    ['loss', 'rows']
    """
    check_layout(layout, "eval_step(layout, loss_fn)")
    policy, options = Precision.of(precision), pipeline_options(pipeline)

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        check_state(state)
        with tracing_under(layout):
            return partitioned(layout, run, state, batch)

    def run(state: TrainState, batch: Any) -> Metrics:
        with precision_scope(policy):
            batch, state = without_explicit_axes(layout, batch), with_rounded_weights(layout, state)
            if options is not None:
                return evaluate_pipeline(layout, loss_fn, state, batch, policy, options)
            weights = computing(state.params, state, policy)
            loss, (aux, _) = loss_of(loss_fn, state, rows_apart(layout, batch))(weights)
            return {"loss": loss, **aux}

    return cast(jax.stages.Wrapped, StepCall(jax.jit(evaluate)))


def _update(
    layout: Layout,
    state: TrainState,
    grads: Any,
    loss: jax.Array,
    value_fn: Callable[[Any], jax.Array],
    finite: jax.Array,
) -> tuple[Any, optax.OptState, jax.Array]:
    """Applies the optimizer, offering the extra arguments of optax's line searches, Polyak steps, SAM and Sophia.

    ``value_fn`` computes ``loss`` from parameters (see :func:`value_of`). It costs nothing if the optimizer does not
    call it. With state in host memory, this function leaves everything unchanged where ``finite`` is false; otherwise
    the caller does.

    Returns:
      The parameters, the optimizer state, and how many weights of 16 bits in host memory changed.
    """

    def loss_at(params: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        # A line search passes on the arguments that it does not know, and rejects those missing from this signature.
        del obj_fn, grad_fn
        return value_fn(params)

    gradient = jax.grad(loss_at)
    offered = {
        "value": loss,
        "grad": grads,
        "value_fn": loss_at,
        "obj_fn": loss_at,
        "grad_fn": lambda params, *_: gradient(params),
    }
    tx = state.metadata.tx
    extra = accepted(tx, offered)
    if isinstance(tx, SelfReducing):
        dims = dict(state.metadata.dims)
        updates, new = tx.update_sharded(layout, dims, grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), new, jnp.zeros(())
    if any(map(on_host, jax.tree.leaves((state.params, state.opt_state)))):
        return streaming_update(layout, state, grads, finite, extra)
    check_steps(state.opt_state)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
    check_update(state.params, updates, state.opt_state, opt_state)
    return optax.apply_updates(state.params, updates), opt_state, jnp.zeros(())


def keep_unless_finite(
    old: TrainState, new: TrainState, finite: jax.Array, config: StepConfig, parts: Sequence[str]
) -> tuple[TrainState, Metrics]:
    """Returns ``new``, with these parts of ``old`` where ``finite`` is false and the next loss scale; and metrics."""
    select = lambda a, b: a if a is b else jnp.where(finite, a, b)  # frozen weights are the same, and may be on a host
    kept = {name: jax.tree.map(select, getattr(new, name), getattr(old, name)) for name in parts}
    new, metrics = replace(new, **kept), {"skipped": ~finite}
    if config.precision.scale is not None:
        new = replace(new, loss_scale=config.precision.scale.next(old.loss_scale, finite))
        metrics["loss_scale"] = old.loss_scale["scale"]
    return new, metrics


def check_same(old: TrainState, new: TrainState) -> None:
    """Raises if the step changed a shape or dtype of the state, because the next call would then compile again.

    Raises:
      ModelError: the optimizer changed a parameter, or ``loss_fn`` a carried variable.
    """
    for part, cause in (("params", "the optimizer"), ("variables", "loss_fn")):
        before, after = (dict(leaves_with_paths(getattr(state, part))) for state in (old, new))
        for path in [*before, *(after.keys() - before.keys())]:
            was, now = ("nothing" if path not in leaves else describe(leaves[path]) for leaves in (before, after))
            if was != now:
                raise ModelError(
                    f"{cause} changed {show((part, *path))} from {was} to {now}, but a step must keep the shape and "
                    "dtype of everything that it trains and carries."
                )


def place_state(layout: Layout, state: TrainState) -> TrainState:
    """Returns ``state`` with every device leaf constrained to its sharding.

    Raises:
      LayoutError: the rules cannot place a tensor.
    """
    leaves, treedef = jax.tree.flatten(state)
    tensors = place(layout, state)
    if problems := problems_of(layout, tensors):
        raise LayoutError(problems)
    placed = [
        leaf if on_host(leaf) else with_sharding(layout.mesh, leaf, to_spec(tensor.resolved))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)
