"""``pipedream_train_step``: train steps of a pipeline that is not flushed between steps, so no stage ever idles.

PipeDream (Harlap et al. 2018, arXiv:1806.03377) and PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import ConfigError, LayoutError
from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.collectives.gather_reduce import precision_scope
from jaxpar.parallel.explicit_axes import without_explicit_axes
from jaxpar.parallel.offload.placement import on_host
from jaxpar.parallel.partitioner.repair import avoid_faults
from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.parallel.pipeline.staged_loss import PipelineLoss
from jaxpar.parallel.precision.policy import PrecisionLike
from jaxpar.sharding.layout import Layout, tracing_under
from jaxpar.training.asynchronous import in_flight, weight_stashing
from jaxpar.training.asynchronous.in_flight import InFlight, InFlightCall
from jaxpar.training.loss import LossFn, Metrics
from jaxpar.training.microbatches import GradReduction, StepConfig, WeightGather
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.offload.disk_state import disk_of
from jaxpar.training.pipeline.model_split import ModelSplit
from jaxpar.training.pipeline.transfer import row_axes
from jaxpar.training.self_reducing import SelfReducing
from jaxpar.training.state import TrainState
from jaxpar.training.step import check_same, clipped, place_state, step_config
from jaxpar.training.weight_changes import sampled, share_changed
from jaxpar.utils.arrays import describe


def pipedream_train_step(
    layout: Layout,
    loss_fn: LossFn,
    pipeline: Asynchronous,
    *,
    grad_accum_steps: int = 1,
    weight_gather: WeightGather = "per_use",
    grad_reduction: GradReduction | None = None,
    precision: PrecisionLike = None,
    fusion: CollectiveFusion | None = None,
    clip_norm: float | None = None,
    skip_nonfinite: bool = True,
    donate: bool = True,
) -> PipedreamStep:
    """Returns ``step(state, batch) -> (state, metrics)`` of a pipeline that is not flushed between calls.

    Args:
      layout: as for :func:`jaxpar.train_step`.
      loss_fn: a :class:`jaxpar.pipeline.PipelineLoss`.
      pipeline: the variant, the number of stages and the number of microbatches.
      grad_accum_steps: must be 1: the pipeline's microbatches are the accumulation.
      weight_gather, grad_reduction, precision, fusion, clip_norm: as for :func:`jaxpar.train_step`, where a pipeline
        supports them.
      skip_nonfinite: skip an update whose gradients are not finite; ``metrics["skipped"]`` reports it.
      donate: donate the old state's memory to the new one.

    Returns:
      The step; its ``start`` makes the state, its ``flush`` applies the gradients of the last batch.

    Raises:
      ConfigError: a loss scale, ``grad_accum_steps`` above 1, or ``clip_norm`` under ``pipedream``. When traced: an
        optimizer whose state is on host or disk, or which reduces gradients itself; layers that cannot be split over
        the stages; under ``pipedream``, layers that are not sharded over the stages.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> loss = jp.pipeline.PipelineLoss(
    ...     "blocks", lambda model, x: x, lambda block, x, side: x @ block, lambda model, x, batch: jnp.mean(x**2)
    ... )
    >>> layout = jp.Layout(
    ...     jp.MeshSpec(pipeline=1).build(jax.devices()[:1]), jp.Rules(batch=None, layers="pipeline", embed=None)
    ... )
    >>> make_model = lambda key: {"blocks": jp.tag(jnp.ones((1, 1, 1)), "layers", "embed", "embed")}
    >>> step = pipedream_train_step(layout, loss, jp.pipeline.Asynchronous("pipedream_2bw", stages=1, microbatches=2))
    >>> state = step.start(jp.init(layout, make_model, optax.sgd(0.25)), jnp.ones((2, 1)))
    >>> for _ in range(3):
    ...     state, metrics = step(state, jnp.ones((2, 1)))
    ...     print(float(metrics["loss"]), float(state.params["blocks"][0, 0, 0]))
    1.0 1.0
    1.0 0.5
    0.25 0.0
    """
    config = step_config(grad_accum_steps, weight_gather, grad_reduction, precision, skip_nonfinite, fusion)
    _check(pipeline, config, clip_norm)
    return PipedreamStep(layout, loss_fn, pipeline, config, clip_norm, skip_nonfinite, donate)


@dataclass(eq=False)
class PipedreamStep:
    """The step that :func:`pipedream_train_step` returns.

    :meth:`start` makes the state. It holds the microbatches in flight as arrays, and can be saved between any two
    calls. A call runs the forward passes of its batch and the same number of backward passes: those of the last
    microbatches of the previous batch and of the first ones of its own. The next call runs the remaining backward
    passes.

    ``pipedream_2bw``: after call t the parameters are W(t + 1) = W(t) - u(g(W(t - 1))). A call computes its batch with
    the weights it receives, also before and after the layers. At its end, the optimizer receives the mean gradient g of
    the *previous* batch, which is then complete and was computed with the previous weights. The first call makes no
    update, and the optimizer does not count it. :meth:`flush` applies the gradients of the last batch.

    ``pipedream``: stage s of S updates its layers with every microbatch m: W_s(m + 1) = W_s(m) - u(g_s). Here g_s is
    the gradient of the microbatch's loss at the weights W_r(m - 2 (S - 1 - r)) of all stages r, those of its forward
    pass (W_r(0) if the index is negative). The parameters that ``PipelineLoss.embed`` reads belong to stage 0; those
    that ``PipelineLoss.head`` reads belong to stage S - 1, whose gradients are never late. Parameters that both read
    (tied embeddings) belong to stage 0: both uses see W_0(m - 2 (S - 1)), and one update takes the gradients of both.
    Each stage has its own optimizer state, and so have the parameters before and after the layers. An optimizer that
    sums over all parameters therefore sums over one stage's.
    """

    layout: Layout
    loss_fn: LossFn
    pipeline: Asynchronous
    config: StepConfig
    clip_norm: float | None
    skip_nonfinite: bool
    donate: bool

    def __post_init__(self) -> None:
        options = self.config.fusion.compiler_options(self.layout) if isinstance(self.layout.mesh, Mesh) else {}
        jit = functools.partial(jax.jit, donate_argnums=(0,) if self.donate else (), compiler_options=options or None)
        self._start = jax.jit(self._started)
        self._step, self._flush = jit(self._stepped), jit(lambda state: self._stepped(state, None))

    def start(self, state: TrainState, batch: Any) -> InFlight:
        """Returns ``state`` with room for the microbatches in flight; only the shapes of ``batch`` matter.

        Args:
          state: as :func:`jaxpar.init` returns it.
          batch: a batch with the shapes and dtypes of those to come.
        """
        return self._start(state, batch)

    def abstract(self, state: TrainState, batch: Any) -> InFlight:
        """Returns what :meth:`start` would return, as shapes with shardings. Needs no devices.

        Args:
          state: as :func:`jaxpar.abstract_state` returns it.
          batch: shapes with shardings, or arrays.
        """
        program, shapes = jax.make_jaxpr(self._started, return_shape=True)(state, batch)
        mesh = self.layout.mesh
        shardings = dict(
            zip(map(id, program.jaxpr.invars), (x.sharding for x in jax.tree.leaves((state, batch))), strict=True)
        )
        # The last operation on every array that start makes is a sharding constraint.
        constraints = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
        shardings |= {id(eqn.outvars[0]): eqn.params["sharding"] for eqn in constraints}
        placed = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings.get(id(v), NamedSharding(mesh, PartitionSpec())))
            for x, v in zip(jax.tree.leaves(shapes), program.jaxpr.outvars, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), placed)

    def __call__(self, state: InFlight, batch: Any) -> tuple[InFlight, Metrics]:
        """Runs one call.

        Args:
          state: what :meth:`start` or the previous call returned.
          batch: arrays with the shapes and dtypes that :meth:`start` received.

        Returns:
          The next state and metrics. ``loss`` and the loss's own metrics are means over the microbatches whose loss
          this call computed: the last ``stages - 1`` of the previous batch, and all but the last ``stages - 1`` of this
          one. ``updated`` reports whether an optimizer updated parameters. ``grad_norm`` is the norm of the gradient
          that the optimizer received, before clipping, and 0 if there was none; under ``pipedream`` it is the root mean
          square of that norm over the call's ticks.

        Raises:
          ConfigError: the state does not come from a step like this one.
          LayoutError: the batch has other shapes or dtypes than the batch in flight.
        """
        return self._step(state, batch)

    def flush(self, state: InFlight) -> tuple[InFlight, Metrics]:
        """Finishes everything in flight, including the last update; the next call starts with an empty pipeline.

        Returns:
          The state, and metrics of the microbatches whose loss was pending.
        """
        return self._flush(state)

    def lower(self, state: InFlight, batch: Any = None) -> jax.stages.Lowered:
        """Lowers the call, like any jitted function; without a batch, lowers :meth:`flush`."""
        return self._flush.lower(state) if batch is None else self._step.lower(state, batch)

    def _call(self, state: TrainState, batch: Any) -> InFlightCall:
        """Returns a call on ``state``; without a batch, one that finishes everything in flight."""
        full = self.pipeline.schedule
        window = full if batch is not None else full.flush()
        return InFlightCall(self.layout, self.loss_fn, self.config, self.pipeline, window, state)

    def _started(self, state: TrainState, batch: Any) -> InFlight:
        _check_state(state, self.pipeline)
        start = in_flight.start if self.pipeline.name == "pipedream_2bw" else weight_stashing.start
        with tracing_under(self.layout), precision_scope(self.config.precision):
            batch = without_explicit_axes(self.layout, batch)
            return start(self._call(state, batch), batch)

    def _stepped(self, state: InFlight, batch: Any) -> tuple[InFlight, Metrics]:
        _check_state(state, self.pipeline)
        if not isinstance(state, InFlight):
            raise ConfigError(
                "asynchronous pipeline: the state has no buffers for microbatches in flight. Remedy: state = "
                "step.start(state, batch)."
            )
        if isinstance(self.loss_fn, PipelineLoss):  # the pipeline itself reports any other loss
            split = ModelSplit(state, self.loss_fn)
            self._check_flight(state, split)
            if batch is not None:
                self._check_batch(state, batch, split)
        with tracing_under(self.layout):
            return avoid_faults(self._computed)(state, batch)

    def _computed(self, state: InFlight, batch: Any) -> tuple[InFlight, Metrics]:
        batch = without_explicit_axes(self.layout, batch)
        if self.pipeline.name == "pipedream":
            return self._every_microbatch(state, batch)
        with precision_scope(self.config.precision):
            found, flight = in_flight.two_versions(self._call(state, batch), batch)
        grads, norm = clipped(found.grads, self.clip_norm)
        finite = jnp.isfinite(norm)
        ready = state.flight["pending"] == 1
        landed, sample = sampled(self.layout, state.landed)
        state = replace(state, params=landed.params)
        updates, opt_state = state.metadata.tx.update(grads, state.opt_state, state.params)
        updated = ready & finite if self.skip_nonfinite else ready
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(updated, a, b), new, old)
        new = replace(state.landed, params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state))
        new = replace(new, step=state.step + (batch is not None))
        check_same(state.landed, new)
        new = place_state(self.layout, new)
        skip_metric = {"skipped": ready & ~finite} if self.skip_nonfinite else {}
        metrics = {"loss": found.loss, "grad_norm": norm, "updated": updated, **found.metrics, **skip_metric}
        metrics |= sample.metric(new.params, jnp.zeros(()))
        return InFlight(**vars(new), flight=flight), metrics

    def _every_microbatch(self, state: InFlight, batch: Any) -> tuple[InFlight, Metrics]:
        with precision_scope(self.config.precision):
            call = self._call(state, batch)
            new, metrics = weight_stashing.every_stage(call, batch, skips=self.skip_nonfinite)
        new = replace(new, step=state.step + (batch is not None))
        check_same(state, new)
        # No rule places the per-stage optimizer states; weight_stashing shards them like their parameters' moments.
        placed = place_state(self.layout, replace(new.landed, opt_state=()))
        metrics |= share_changed(state.params, placed.params)  # the versions of the weights include the old ones
        return replace(new, **{**vars(placed), "opt_state": new.opt_state}), metrics

    def _check_flight(self, state: InFlight, split: ModelSplit) -> None:
        """Raises if another kind of step made the microbatches in flight."""
        act, options = state.flight["in_flight"]["activations"], self.pipeline
        num_shards = math.prod(self.layout.sizes[axis] for axes in row_axes(self.layout, act) for axis in axes)
        kind = "pipedream_2bw" if "previous" in state.flight else "pipedream"
        kept = "none" if "residuals" in state.flight["in_flight"] else "full"
        layers = jax.tree.leaves(split.stack(state.params))[0].shape[0]
        (found_layers,) = state.flight["layers"]
        own_layers = "-".join(map(str, options.layers_per_stage or (layers // options.stages,) * options.stages))
        was = (kind, act.shape[0], found_layers, act.shape[1], kept)
        now = (options.name, options.stages, own_layers, num_shards, options.activation_checkpointing)
        if was != now:
            described = [
                f"{kind!r} with {n} stages of {each} layers, rows sharded over {m} devices and "
                f"activation_checkpointing {kept!r}"
                for kind, n, each, m, kept in (was, now)
            ]
            raise ConfigError(
                f"asynchronous pipeline: the microbatches in flight come from {described[0]}, but this step is "
                f"{described[1]}. Remedy: call flush(state) of the step that they come from, then start(state.landed, "
                "batch)."
            )

    def _check_batch(self, state: InFlight, batch: Any, split: ModelSplit) -> None:
        """Raises if the batch differs in shapes or dtypes from the one in flight; the call computes both."""
        with tracing_under(self.layout):
            prepared = jax.eval_shape(lambda batch: split.loss_fn.prepare(split.model(split.shapes), batch), batch)
        want, got = (
            {path: describe(x) for path, x in leaves_with_paths(tree)} for tree in (state.flight["batch"], prepared)
        )
        for path in want | got:
            if want.get(path) != got.get(path):
                raise LayoutError(
                    f"{show(('batch', *path))} is {got.get(path, 'missing')}, but in the batch in flight it is "
                    f"{want.get(path, 'missing')}. Remedy: use batches of one shape and dtype, or call flush(state) "
                    "and then start(state.landed, batch)."
                )


def _check(pipeline: Asynchronous, config: StepConfig, clip_norm: float | None) -> None:
    """Raises if an argument is incompatible with asynchronous pipelines, or with this variant."""
    start, name = "asynchronous pipeline", pipeline.name
    if config.grad_accum_steps != 1:
        raise ConfigError(
            f"{start}: grad_accum_steps is {config.grad_accum_steps}, but the {pipeline.microbatches} microbatches of "
            f"{name!r} already accumulate gradients. Remedy: leave grad_accum_steps out, or set "
            f"microbatches={config.grad_accum_steps * pipeline.microbatches}."
        )
    if config.precision.scale is not None:
        raise ConfigError(
            f"{start}: precision scales the loss, but {name!r} has gradients of two steps, with two scales, in flight "
            "together. Remedy: compute in bf16, which requires no loss scale, or use jp.pipeline.schedule('1f1b')."
        )
    if name == "pipedream" and clip_norm is not None:
        raise ConfigError(
            f"{start}: clip_norm is {clip_norm:g}, but under 'pipedream' each stage updates on its own, so the norm "
            "of all gradients is not known. Remedy: set clip_norm=None, or use 'pipedream_2bw'."
        )


def _check_state(state: TrainState, pipeline: Asynchronous) -> None:
    """Raises if the optimizer or its placement is incompatible with asynchronous pipelines."""
    what = None
    if isinstance(state.metadata.tx, SelfReducing):
        what = "an optimizer that reduces gradients itself (one_bit_adam)"
    elif disk_of(state) is not None:
        what = "optimizer state on disk"
    elif any(map(on_host, jax.tree.leaves((state.params, state.opt_state)))):
        what = "parameters or optimizer state in host memory"
    if what is not None:
        raise ConfigError(
            f"asynchronous pipeline: {what} cannot be used, because {pipeline.name!r} keeps versions of the weights "
            "on the devices. Remedy: leave it out, or use jp.pipeline.schedule('1f1b')."
        )
