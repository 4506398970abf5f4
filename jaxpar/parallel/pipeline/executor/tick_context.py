"""What all parts of a tick share: the program, its arrays, and functions of per-device arrays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.program import PipelineProgram, global_field
from jaxpar.parallel.pipeline.executor.sequence_chunks import Carried
from jaxpar.parallel.pipeline.executor.stage import Chunk
from jaxpar.sharding.layout import current_layout, hint, manual_axes
from jaxpar.sharding.rules import Axes
from jaxpar.utils.scope_facts import trip_count_scope


class Split(Enum):
    """How a global array is split over the devices. A value names the leading dims, which per-device arrays lack."""

    STAGE = ("stages",)
    DEVICE = ("devices",)
    STAGE_DEVICE = ("stages", "devices")
    DEVICE_COLUMNS = ("devices", ...)
    """As ``DEVICE``; the last dim is also split over the stages, if they divide it."""
    REPLICATED = ()

    @property
    def leading(self) -> int:
        """The number of leading dims, of size 1 on each device."""
        return len([name for name in self.value if name is not ...])

    def spec(self, axes: Axes, ndim: int, *, columns: bool) -> PartitionSpec:
        """Returns the spec of an array of ``ndim`` dims; ``axes`` are the mesh axes of the dim ``devices``.

        >>> Split.DEVICE_COLUMNS.spec(("data",), 4, columns=True)
        P('data', None, None, 'pipeline')
        """
        over = {"stages": AXIS, "devices": axes or None}
        leading = [over[name] for name in self.value if name is not ...]
        if self is not Split.DEVICE_COLUMNS:
            return PartitionSpec(*leading)
        return PartitionSpec(*leading, *(None,) * (ndim - 2), AXIS if columns else None)


@dataclass(frozen=True)
class WeightSplit:
    """How a weight of the layers is split: as ``Split.STAGE``, and its experts over the devices that share them."""

    sharded: PartitionSpec
    leading: ClassVar[int] = 1

    def spec(self, axes: Axes, ndim: int, *, columns: bool) -> PartitionSpec:
        """Returns the spec; see :meth:`Split.spec`."""
        return self.sharded


_STAGE_LOOPS = ("forward", "backward", "backward_alone", "weights")
"""Loops over a stage's own layers, which contain no collective of the pipeline."""


@dataclass(frozen=True)
class TickContext:
    """The program and the arrays that no tick changes.

    In the functions that receive it, a function named ``local`` is per-device: its arrays lack the leading dims that
    :class:`Split` names.

    Attributes:
      program: the schedule's table and the functions to call.
      sharded_input: the last dim of the first layer's input is sharded over the stages.
      weights: of the layers, [stages, chunks, layers, ...].
      non_layer_weights: the other weights, which the head and the embedding receive.
      batch: [devices, microbatches, rows, ...].
      side_weights: the weights that ``program.side`` receives.
      weight_shards: the shards of ``weights``, if the first ticks gather them.
    """

    program: PipelineProgram
    sharded_input: bool
    weights: Any
    non_layer_weights: Any
    batch: Any
    side_weights: Any = ()
    weight_shards: Any = None

    @classmethod
    def of(cls, program: PipelineProgram, x: jax.Array | None, *arrays: Any) -> TickContext:
        """Returns the context with the fields ``arrays`` for an input ``x`` of the first layer, if there is one."""
        return cls(program, x is not None and x.shape[-1] % program.schedule.stages == 0, *arrays)

    @property
    def weight_split(self) -> Any:
        """How the layers' weights are split: one split for all, or a tree of one for each."""
        specs = self.program.weight_specs
        return Split.STAGE if specs is None else jax.tree.map(WeightSplit, specs)

    @property
    def shard_split(self) -> Any:
        """How the shards of the layers' weights are split, a tree."""
        return jax.tree.map(WeightSplit, self.program.shard_specs)

    def of_ticks(self, first: int, end: int | None) -> TickContext:
        """Returns the context of a scan over the ticks from ``first`` to before ``end``."""
        return replace(self, program=replace(self.program, ticks=(first, end)))

    def per_device(self, f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True) -> Callable[..., Any]:
        """Wraps ``f``, a function of per-device arrays, in a ``shard_map`` over the program's axes.

        Args:
          f: the function.
          ins, outs: the :class:`Split` of each argument and result; trees of them are prefixes of an argument's tree.
          stages: also make the axis of the stages manual.
        """
        axes = self.program.axes

        def local(*args: Any) -> Any:
            inner = _each(lambda split, x: x.reshape(x.shape[split.leading :]), ins, args)
            return _each(lambda split, x: x.reshape((1,) * split.leading + x.shape), outs, f(*inner))

        def run(*args: Any) -> Any:
            manual = manual_axes(current_layout(), (*axes, *((AXIS,) if stages else ())), but=(AXIS,))
            spec = lambda split, ndim: split.spec(axes, ndim, columns=self.sharded_input)
            in_specs = _each(lambda split, x: spec(split, x.ndim), ins, args)
            # A result that is DEVICE_COLUMNS has as many dims as the argument that is.
            ndims: list[int] = []
            _each(lambda split, x: ndims.append(x.ndim) if split is Split.DEVICE_COLUMNS else None, ins, args)
            out_specs = jax.tree.map(lambda split: spec(split, next(iter(ndims), 0)), outs)
            mapped = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)
            return mapped(*args)

        return run

    def constrained(self, x: jax.Array) -> jax.Array:
        """Constrains activations [..., rows, ...] to the rules of their logical dims."""
        dims = self.program.dims
        return x if dims is None else hint(x, *(None,) * (x.ndim - len(dims)), *dims)

    def chunk(self, weights: Any, number: jax.Array, on: jax.Array) -> Chunk:
        """Returns the chunk of index ``number``, whose loops run if ``on`` is 1."""
        of_stage = lambda table: None if table is None else jnp.asarray(table)[jax.lax.axis_index(AXIS), number]
        layers, carry = jax.tree.leaves(weights)[0].shape[1], self.program.carry
        count, start = of_stage(self.program.counts), of_stage(self.program.starts)
        if carry is not None:
            like = carry.shapes(self.batch)
            return Carried(self.program.layer, weights, number, on * layers, count, start, carry=carry, like=like)
        return Chunk(self.program.layer, weights, number, on * layers, count, start)

    def is_on(self, name: str, field: Callable[[str], jax.Array], global_row: jax.Array) -> jax.Array:
        """Whether loops over layers run in this tick: on this stage if independent, else on all stages.

        Args:
          name: ``forward``, ``backward`` or ``weights``.
          field: reads a field of the stage's row.
          global_row: the row of all stages.
        """
        return field(f"{name[0]}_on") if self.program.independent else global_field(global_row, name)

    def loop_scope(self, name: str) -> AbstractContextManager[None]:
        """Returns a named scope for a loop that some ticks skip; it states the loop's total iterations and the ticks.

        Args:
          name: a field of ``GLOBAL_FIELDS``, ``recompute``, ``backward_alone`` or ``bucket_ends``.
        """
        count, ticks = self.program.recomputed_layers() if name == "recompute" else self.program.active_ticks(name)
        layers = jax.tree.leaves(self.weights)[0].shape[2]
        count *= layers if name in (*_STAGE_LOOPS, "buckets", "buckets_beside") else 1
        own_layers = "own_layers/" if name in (*_STAGE_LOOPS, "recompute") else ""
        return jax.named_scope(own_layers + trip_count_scope(count, ticks))


def _each(f: Callable[[Any, jax.Array], Any], splits: Any, tree: Any) -> Any:
    """Returns ``f(split, array)`` for every array; ``splits`` is a prefix of the tree."""
    return jax.tree.map(lambda split, part: jax.tree.map(lambda x: f(split, x), part), splits, tree)
