"""Transfer into a pipeline and out of it.

On entry, weights are gathered and cut into the stages' layers, and the batch is split into microbatches. On exit,
gradients are reduce-scattered and returned to the model's order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError, LayoutError, listing
from jaxpar.parallel.collectives.gather_reduce import Parts, batch_axes, gather, parts_of, reduce, seq_axes, summable
from jaxpar.parallel.collectives.hierarchical import scatter_local
from jaxpar.parallel.overlap.permute_collectives import ppermute_all_gather, ppermute_reduce_scatter, scatter_parts
from jaxpar.parallel.pipeline.executor import layer_slice
from jaxpar.parallel.pipeline.executor.frozen import trained_part
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS, Layers
from jaxpar.parallel.pipeline.executor.layer_slice import LayerSlice, blocks_of
from jaxpar.parallel.pipeline.executor.sequence_chunks import in_chunks, joined
from jaxpar.parallel.pipeline.options import Asynchronous, Pipeline
from jaxpar.parallel.pipeline.schedules.residual_slots import Kept, kept_of
from jaxpar.parallel.precision.policy import INT8, Exact, Precision
from jaxpar.sharding.hardware.links import links_of
from jaxpar.sharding.layout import Layout, manual_axes
from jaxpar.sharding.resolve import Resolved
from jaxpar.sharding.rules import Axes
from jaxpar.training.exact_weights import exact_by_path
from jaxpar.training.microbatches import pieces_of, resolved_tree
from jaxpar.training.model import Path, map_with_paths, show, to_path
from jaxpar.training.pipeline.model_split import ModelSplit
from jaxpar.training.state import TrainState


@dataclass(frozen=True)
class StageTransfer:
    """The transfers before the first tick and after the last one, each once a step.

    Attributes:
      layout: the ambient layout.
      axes: the axes of the batch and of the sequence, over which each device has its own rows.
      split: the parameters, as the stack of layers and all others.
      layers: which stage has which layers.
      precision: dtypes of the gathers and reductions.
      param_shardings: the shardings of the parameters, a tree of :class:`LeafSharding`.
      grad_shardings: the shardings of their gradients, a tree of :class:`LeafSharding`.
      scattered: the layers' gradients leave the ticks already scattered.
      chunks: number of chunks of each sequence.
      head_parts: the parts of the loss whose gradients also leave the ticks already scattered, such as ``head``.
    """

    layout: Layout
    axes: Axes
    split: ModelSplit
    layers: Layers
    precision: Precision
    param_shardings: Any
    grad_shardings: Any
    scattered: bool
    chunks: int
    head_parts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, layout: Layout, split: ModelSplit, precision: Precision, options: Pipeline | Asynchronous, batch: Any
    ) -> StageTransfer:
        """Returns the transfers for a state.

        Args:
          layout: the ambient layout.
          split: the state's parameters.
          precision: dtypes of the gathers and reductions.
          options: the pipeline's options.
          batch: a batch that :meth:`ModelSplit.prepare` returned, or its shapes; ``None`` if no weight is gathered.

        Raises:
          ConfigError, LayoutError: the layers cannot be split over the pieces, or the rules shard parameters so that
            stages cannot get theirs.
        """
        axes = (*batch_axes(layout), *seq_axes(layout))
        loss = lambda params: split.loss(params, batch)
        exact = exact_by_path(None if batch is None else loss, split.state, precision)
        weights = split.state.params
        params = _leaf_shardings(layout, split.state, weights, "params", axes, exact)
        grads = _leaf_shardings(layout, split.state, trained_part(weights), "gradients", axes, exact)
        scattered = options.grad_reduction != "per_step"
        for sharding in jax.tree.leaves(split.stack(grads)):
            first = sharding.parts(axes).dims[0]
            if scattered and first:
                raise ConfigError(
                    f"pipeline: grad_reduction is {options.grad_reduction!r}, which reduces the gradients of one "
                    f"layer at a time, but the rules shard the layers of the gradients over {listing(first)}. Remedy: "
                    "set grad_reduction='per_step', or use rules that shard another dim."
                )
        chunks = options.schedule.sequence_chunks
        head: tuple[str, ...] = ()
        if isinstance(options, Pipeline) and options.head_grad_reduction == "per_microbatch":
            head = ("head", "embed") if options.embedding == "per_microbatch" else ("head",)
        return cls(layout, axes, split, _layers(split, options), precision, params, grads, scattered, chunks, head)

    def residual_slots(self, options: Pipeline) -> Kept | None:
        """Returns the residual slots of each layer, if the first layers of a stage recompute; else ``None``.

        Raises:
          ConfigError: ``recompute`` of a stage exceeds its number of layers.
        """
        counts, path = self.layers.sizes, "/".join(self.split.path)
        for stage, (recomputed, most) in enumerate(zip(options.recompute, counts.max(axis=1).tolist(), strict=False)):
            if recomputed > most:
                raise ConfigError(
                    f"pipeline: recompute is {list(options.recompute)}, but stage {stage} has {most} of the "
                    f"{self.layers.total} layers of {path} in its largest piece. Remedy: set a number up to {most} "
                    f"for stage {stage}."
                )
        return kept_of(options.schedule, options.recompute, counts) if options.recompute else None

    def scatter_to_stages(
        self, params: Any, batch: Any, x: jax.Array | None, microbatches: int, *, shards: bool = False
    ) -> tuple[Any, tuple[Any, Any]]:
        """Moves weights and a batch into the pipeline.

        Args:
          params: the parameters, in the model's order; with ``shards``, as :meth:`with_stage_shards` returned them.
          batch: arrays ``[rows, ...]``.
          x: the first layer's input ``[rows, ...]``, or ``None``.
          microbatches: number of microbatches; each chunk of a sequence counts as one.
          shards: gather the layers of each stage's first chunk only, and return zeros for the others.

        Returns:
          The weights, with the layers as ``[stages, chunks, layers, ...]``; and ``batch`` and ``x`` as
          ``[devices, microbatches, rows, ...]``.
        """

        def local(params: Any, batch: Any, x: jax.Array | None) -> Any:
            gathered = lambda w, sharding: gather(w, sharding.parts(self.axes), self.precision)
            layers = self._gather_first_chunk if shards else self._gather_layers
            weights = self.split.map_parts(params, self.param_shardings, gathered, layers)
            pieces = in_chunks(pieces_of((batch, x), microbatches // self.chunks, 1, 0), self.chunks)
            return weights, jax.tree.map(lambda x: x[None], pieces)

        device_axes, per_device = self.axes or None, PartitionSpec(self.axes or None)
        of_other = lambda _, sharding: sharding.spec((AXIS,))
        of_layer = lambda _, sharding: sharding.kept_spec(AXIS, None, None)
        weights = self.split.map_parts(self.param_shardings, self.param_shardings, of_other, of_layer)
        rows = lambda x: PartitionSpec(*row_axes(self.layout, x))
        param_specs = jax.tree.map(lambda sharding: sharding.spec(), self.param_shardings)
        if shards:
            param_specs = self.split.join(self.shard_specs, self.split.others(param_specs))
        x_in = jax.tree.map(lambda x: self._columns(x, x.ndim, *row_axes(self.layout, x)), x)
        x_out = jax.tree.map(lambda x: self._columns(x, x.ndim + 2, device_axes), x)
        in_specs = param_specs, jax.tree.map(rows, batch), x_in
        out_specs = weights, (jax.tree.map(lambda _: per_device, batch), x_out)
        return self.inside(local, in_specs, out_specs)(params, batch, x)

    @property
    def gathers_layers(self) -> bool:
        """Whether a layer's weights are gathered over the devices of a stage."""
        shardings = jax.tree.leaves(self.split.stack(self.param_shardings))
        return any(sharding.layer_parts(self.axes).crossed for sharding in shardings)

    def with_stage_shards(self, params: Any) -> Any:
        """Returns the parameters with the shards of the layers ``[stages, chunks, layers, ...]`` on their stages."""
        stack = self.split.stack(self.param_shardings)
        local = lambda params: jax.tree.map(lambda w, sharding: self._stage_shards(w, sharding)[None], params, stack)
        in_specs = (jax.tree.map(lambda sharding: sharding.spec(), stack),)
        moved = self.inside(local, in_specs, self.shard_specs)(self.split.stack(params))
        return self.split.join(moved, params)

    @property
    def shard_specs(self) -> Any:
        """The specs of the shards of the layers' weights ``[stages, chunks, layers, ...]``, a tree."""
        spec = lambda sharding: PartitionSpec(AXIS, None, None, *sharding.layer_parts(self.axes).spec)
        return jax.tree.map(spec, self.split.stack(self.param_shardings))

    @property
    def weight_specs(self) -> Any:
        """The specs of the layers' weights in the ticks, a tree; ``None`` if they are sharded over stages alone."""
        stack = self.split.stack(self.param_shardings)
        if not any(sharding.kept for sharding in jax.tree.leaves(stack)):
            return None
        return jax.tree.map(lambda sharding: sharding.kept_spec(AXIS, None, None), stack)

    def gather_from_stages(
        self, grads: Any, sums: Any, weight: jax.Array, x: jax.Array | None
    ) -> tuple[Any, jax.Array, Any, Any]:
        """Moves gradients and metrics out of the pipeline.

        Args:
          grads: each device's own gradients.
          sums: each device's own sums of loss and metrics, ``[devices, ...]``.
          weight: each device's own weight, ``[devices]``.
          x: the cotangents of the first layer's input, or ``None``.

        Returns:
          The sums and the weight over all devices, the gradients in their shardings, and ``x`` in the shape of the
          input.
        """

        shardings = self.split.join(self.split.stack(self.grad_shardings), self.other_grads)

        def local(grads: Any, sums: Any, weight: jax.Array, x: jax.Array | None) -> Any:
            sums, weight, x = jax.tree.map(lambda x: x[0], (sums, weight, x))
            grads = self.split.map_parts(grads, shardings, self._reduce_other, self._reduce_layers)
            sums, weight = jax.lax.psum((sums, weight), self.axes) if self.axes else (sums, weight)
            flat = lambda x: x.reshape(-1, *x.shape[2:])
            return sums, weight, grads, jax.tree.map(lambda x: flat(joined(x, self.chunks)), x)

        device_axes, per_device = self.axes or None, PartitionSpec(self.axes or None)
        of_other = lambda _, sharding: self.sum_spec(sharding)
        of_layers = lambda *_: PartitionSpec(AXIS, device_axes)
        grads_in = self.split.map_parts(shardings, shardings, of_other, of_layers)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[3:]), x.dtype), x)
        in_specs = grads_in, per_device, per_device, jax.tree.map(lambda x: self._columns(x, x.ndim, device_axes), x)
        grads_out = jax.tree.map(lambda sharding: sharding.spec(), self.grad_shardings)
        x_out = jax.tree.map(lambda x: self._columns(x, x.ndim, *row_axes(self.layout, x)), like)
        out_specs = PartitionSpec(), PartitionSpec(), grads_out, x_out
        return self.inside(local, in_specs, out_specs)(grads, sums, weight, x)

    @property
    def other_grads(self) -> Any:
        """The shardings of the gradients outside the layers, marked where they leave the ticks already scattered.

        The parts of the loss must have been traced: gradients of parameters that they do not read are 0.
        """
        read = frozenset(path for part in self.head_parts for path in self.split.read[part])
        mark = lambda path, sharding: replace(
            sharding, scattered=path in read and bool(sharding.parts(self.axes).crossed)
        )
        return map_with_paths(mark, self.split.others(self.grad_shardings))

    def own_spec(self, sharding: LeafSharding) -> PartitionSpec:
        """Returns the spec of each device's own gradient of a parameter outside the layers, [devices, ...]."""
        return sharding.spec((AXIS,), self.axes or None)

    def sum_spec(self, sharding: LeafSharding) -> PartitionSpec:
        """Returns the spec of its sum over microbatches: :meth:`own_spec`, or that of the scattered gradient."""
        return sharding.spec() if sharding.scattered else self.own_spec(sharding)

    def summed(self, sums: Any) -> Any:
        """Sums each device's own values ``[1, ...]`` over all devices."""
        if not self.axes:
            return jax.tree.map(lambda x: x[0], sums)
        local = lambda sums: jax.lax.psum(jax.tree.map(lambda x: x[0], sums), self.axes)
        return self.inside(local, (PartitionSpec(self.axes),), PartitionSpec())(sums)

    def on_all_stages(self, weights: Any) -> Any:
        """Replicates parameters outside the layers over the stages."""
        return self.inside(lambda weights: weights, (PartitionSpec(),), PartitionSpec())(weights)

    def trace_piece(self, f: Callable[[Any], Any], pieces: Any) -> None:
        """Traces ``f(microbatch)`` with the manual axes of a tick, and discards the result.

        Args:
          f: a function of one device's microbatch.
          pieces: arrays ``[devices, microbatches, rows, ...]``.
        """

        def local(pieces: Any) -> tuple[()]:
            f(jax.tree.map(lambda x: x[0, 0], pieces))
            return ()

        jax.eval_shape(self.inside(local, (PartitionSpec(self.axes or None),), PartitionSpec()), pieces)

    def of_one_layer(self, grads: Any) -> Any:
        """Reduce-scatters one layer's gradients over the devices."""
        one = lambda g, sharding: reduce(g, sharding.layer_parts(self.axes), self.axes, self.precision, _scatter_inner)
        return jax.tree.map(one, grads, self.split.stack(self.grad_shardings))

    def of_bucket(self, grads: Any) -> Any:
        """Reduce-scatters one layer's gradients in a bucket, a tree of :class:`LayerSlice`."""
        alone = lambda grad, parts: reduce(grad.read(), parts, self.axes, self.precision, _scatter_inner)
        # No block waits for another: XLA:TPU hoists those that do into every tick.
        return self._in_blocks(grads, alone, lambda grad, before: grad, layer_slice.BLOCK_BYTES)

    def of_bucket_beside(self, grads: Any) -> Any:
        """Reduce-scatters one layer's gradients, a tree of :class:`LayerSlice`, by permutes beside compute.

        The weights follow each other: all at the same time would need the memory of a second bucket. They do in the
        reverse order of their names, which is often the order in which a backward computes their gradients.
        """
        return self._in_blocks(grads, self._ring, LayerSlice.after, layer_slice.RING_BLOCK_BYTES)

    def _in_blocks(
        self,
        grads: Any,
        scatter: Callable[[LayerSlice, Parts], jax.Array],
        after: Callable[[LayerSlice, jax.Array], LayerSlice],
        most: int,
    ) -> Any:
        """Reduce-scatters the weights of a layer, and large ones in blocks."""
        leaves, structure = jax.tree.flatten(grads)
        shardings = jax.tree.leaves(self.split.stack(self.grad_shardings))
        found: list[jax.Array] = []
        before: jax.Array | None = None
        for grad, sharding in zip(reversed(leaves), reversed(shardings), strict=True):
            parts = sharding.layer_parts(self.axes)
            whole = not parts.crossed or self.precision.reduce == INT8  # a scale of int8 spans the whole gradient
            blocks = [] if whole else blocks_of(grad.shape, [dim for dim, _ in parts.crossed], most)
            pieces = list[jax.Array]()
            for block in blocks if len(blocks) > 1 else [None]:
                one = replace(grad, block=block)
                pieces.append(scatter(one if before is None else after(one, before), parts))
                before = pieces[-1] if parts.crossed else before
            found.append(pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, blocks[0].dim))
        return jax.tree.unflatten(structure, found[::-1])

    def _ring(self, grad: LayerSlice, parts: Parts) -> jax.Array:
        """Reduce-scatters the gradient of one weight of a layer by permutes."""
        if len(parts.crossed) != 1 or len(grad.shape) > 3 or self.precision.reduce == INT8:
            scatter = lambda g, axes, dim: ppermute_reduce_scatter(g, axes, dim=dim, rings=self._rings(axes))
            return reduce(grad.read(), parts, self.axes, self.precision, scatter)
        ((dim, axes),) = parts.crossed
        precision = self.precision.for_weight(parts.exact)
        part_of = lambda start, size: summable(precision.reducing(grad.part(start, size, dim)))
        own = scatter_parts(part_of, grad.shape[dim], axes, dim=dim, rings=self._rings(axes))
        others = tuple(axis for axis in self.axes if not any(axis in dim for dim in parts.dims))
        return reduce(own, Parts(()), others, precision)

    def gather_layer(self, shards: Any) -> Any:
        """Returns the weights of one layer from their shards, by permutes, which overlap with compute."""

        def one(w: jax.Array, sharding: LeafSharding) -> jax.Array:
            ring = lambda w, axes, dim: ppermute_all_gather(w, axes, dim=dim, rings=self._rings(axes))
            return gather(w, sharding.layer_parts(self.axes), self.precision, ring)

        return jax.tree.map(one, shards, self.split.stack(self.param_shardings))

    def _rings(self, axes: Axes) -> tuple[int, ...]:
        links = links_of(self.layout.mesh, self.layout.rings)
        return () if links is None else links.rings(axes)

    def _stage_shards(self, w: jax.Array, sharding: LeafSharding) -> jax.Array:
        """Returns a stage's layers [chunks, layers, ...] as they are sharded, in the dtype in which they are sent."""
        first, *_ = sharding.parts(self.axes).dims
        precision = self.precision.for_weight(sharding.exact)
        w = gather(w, Parts((first,)), precision) if first else w
        # Cast before the transfer to another stage, which then moves fewer bytes.
        return self.layers.cut(precision.crossing(w))

    def _gather_layers(self, w: jax.Array, sharding: LeafSharding) -> jax.Array:
        """Returns a stage's layers [1, chunks, layers, ...], gathered."""
        return self._gathered(self._stage_shards(w, sharding), sharding)[None]

    def _gather_first_chunk(self, shards: jax.Array, sharding: LeafSharding) -> jax.Array:
        """Returns a stage's layers [1, chunks, layers, ...], of which only those of the first chunk are gathered."""
        first = self._gathered(shards[0, :1], sharding)
        return jnp.concatenate([first, jnp.zeros((shards.shape[1] - 1, *first.shape[1:]), first.dtype)])[None]

    def _gathered(self, shards: jax.Array, sharding: LeafSharding) -> jax.Array:
        parts = sharding.layer_parts(self.axes)
        return gather(shards, replace(parts, dims=((), (), *parts.dims)), self.precision)

    def _reduce_other(self, g: jax.Array, sharding: LeafSharding) -> jax.Array:
        """Reduce-scatters a gradient outside the layers, unless it is scattered already."""
        return g if sharding.scattered else reduce(g[0], sharding.parts(self.axes), self.axes, self.precision)

    def _reduce_layers(self, g: jax.Array, sharding: LeafSharding) -> jax.Array:
        """Reduce-scatters a stage's gradients ``[1, 1, chunks, layers, ...]`` into its part of the stack."""
        first, *others = sharding.parts(self.axes).dims
        over_stages, g = AXIS in sharding.dims[0], g[0, 0]
        if not self.scattered and not first:
            g = reduce(g, Parts(((), (), *others), sharding.kept, sharding.exact), self.axes, self.precision)
        g = self.layers.back(g, split=over_stages)
        if first:
            g = reduce(g, sharding.parts(self.axes), self.axes, self.precision)
        return g if over_stages or self.layers.pieces.stages == 1 else jax.lax.psum(g, AXIS)

    def _columns(self, x: Any, ndim: int, *lead: Any) -> PartitionSpec:
        """Returns the spec of an array that ends in the last dim of ``x``, sharded over the stages if possible."""
        last = AXIS if x.shape[-1] % self.layers.pieces.stages == 0 else None
        return PartitionSpec(*lead, *(None,) * (ndim - len(lead) - 1), last)

    def inside(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Wraps ``f``, a function of each device's arrays, in a ``shard_map`` over the axes of batch and stages."""
        manual = manual_axes(self.layout, (*self.axes, AXIS))
        return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)


def _scatter_inner(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Reduce-scatters a gradient; of three dims, such as [embed, heads, head_dim], the first is moved inwards before.

    XLA:TPU tiles a gradient of heads by its first and last dim, but a scatter of the first dim by the last two. The
    sums of gradients, to which the result is added, would be copied in every tick to change between these tilings.
    """
    if x.ndim != 3 or dim != 0:
        return scatter_local(x, axes=axes, dim=dim)
    return jnp.swapaxes(scatter_local(jnp.swapaxes(x, 0, 1), axes=axes, dim=1), 0, 1)


@dataclass(frozen=True)
class LeafSharding:
    """For each dim of a parameter or its gradient, the batch, sequence and pipeline axes that shard it. A leaf.

    ``kept`` are those that stay sharded in the compute, and ``exact`` is how exactly the parameter is gathered; see
    :class:`jaxpar.parallel.collectives.gather_reduce.Parts`. ``scattered`` is whether a gradient outside the layers
    leaves the ticks already scattered.
    """

    dims: tuple[Axes, ...]
    kept: Axes = ()
    exact: Exact = False
    scattered: bool = False

    def parts(self, axes: Axes) -> Parts:
        """Returns the sharding over these axes only."""
        return Parts(tuple(tuple(axis for axis in dim if axis in axes) for dim in self.dims), self.kept, self.exact)

    def layer_parts(self, axes: Axes) -> Parts:
        """Returns the sharding of one layer over these axes only."""
        return Parts(self.parts(axes).dims[1:], self.kept, self.exact)

    def kept_spec(self, *lead: Any) -> PartitionSpec:
        """Returns the spec of the dims but the first over the axes that stay sharded, after the specs ``lead``."""
        dims = [tuple(axis for axis in dim if axis in self.kept) for dim in self.dims[1:]]
        return PartitionSpec(*lead, *(dim or None for dim in dims)) if self.kept else PartitionSpec(*lead)

    def spec(self, axes: Axes | None = None, *lead: Any) -> PartitionSpec:
        """Returns the spec over ``axes`` (default: all), after leading dims with the specs ``lead``."""
        dims = self.dims if axes is None else self.parts(axes).dims
        return PartitionSpec(*lead, *(dim or None for dim in dims))


def _leaf_shardings(
    layout: Layout, state: TrainState, tree: Any, role: str, axes: Axes, exact: dict[Path, Exact]
) -> Any:
    """Returns the sharding of every parameter, or of its gradient, and how exactly it crosses the mesh.

    ``tree`` holds the parameters, or those of them that have gradients.

    Raises:
      LayoutError: a dim is sharded over ``pipeline`` after another axis.
    """

    def one(keys: Any, resolved: Resolved) -> LeafSharding:
        parts = parts_of(resolved, (*axes, AXIS))
        for dim, names in enumerate(parts.dims):
            if AXIS in names[1:]:
                raise LayoutError(
                    f"{show(('params', *to_path(keys)))}: dim {dim} is sharded over {listing(names)}, but a pipeline's "
                    f"stages must come first. Remedy: use a rule with {AXIS!r} before {names[0]!r}."
                )
        return LeafSharding(parts.dims, parts.kept, exact.get(to_path(keys), False))

    return jax.tree_util.tree_map_with_path(one, resolved_tree(layout, state, tree, role))


def _layers(split: ModelSplit, options: Pipeline | Asynchronous) -> Layers:
    """Returns which piece of the pipeline has which layers of the stack.

    Raises:
      ConfigError: ``layers_per_stage`` does not fit the stack, or is missing where equal pieces do not.
    """
    total, pieces = jax.tree.leaves(split.stack(split.shapes))[0].shape[0], options.schedule.pieces.count
    layers, where = options.layers_per_stage, "/".join(split.path)
    if not layers and total % pieces:
        low, more = divmod(total, pieces)
        balanced = (*(low + 1,) * more, *(low,) * (pieces - more))
        raise ConfigError(
            f"pipeline: the {total} layers of {where} cannot be split into {pieces} equal pieces. Remedy: set "
            f"layers_per_stage={balanced}, one number per piece (YAML: layers_per_stage: {list(balanced)}), or use a "
            f"schedule with a number of stages and chunks that divides {total}."
        )
    if layers and (len(layers) != pieces or sum(layers) != total or min(layers) < 1):
        raise ConfigError(
            f"pipeline: layers_per_stage is {list(layers)}, {sum(layers)} layers in {len(layers)} pieces, but {where} "
            f"has {total} layers and the schedule has {pieces} pieces of at least one layer each. Remedy: give "
            f"{pieces} numbers that sum to {total}."
        )
    return Layers(total, options.schedule.pieces, layers or (total // pieces,) * pieces)


def row_axes(layout: Layout, x: Any) -> tuple[Axes, ...]:
    """Returns the manual axes of an array's first dims, rows and sequence."""
    seq = seq_axes(layout)
    return (batch_axes(layout), seq) if seq and x.ndim > 1 else (batch_axes(layout),)
