"""What all parts of a tick share: the program, its arrays, and small helpers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.per_device import per_device
from jaxpar.parallel.pipeline.executor.program import PipelineProgram, global_field
from jaxpar.parallel.pipeline.executor.sequence_chunks import Carried
from jaxpar.parallel.pipeline.executor.stage import Chunk
from jaxpar.sharding.layout import hint
from jaxpar.utils.scope_facts import trip_count_scope


@dataclass(frozen=True)
class TickContext:
    """The program and the arrays that no tick changes.

    In the functions that receive it, a function named ``local`` is per-device: its arrays lack the leading dims that
    :class:`jaxpar.parallel.pipeline.executor.per_device.Split` names.

    Attributes:
      program: the schedule's table and the functions to call.
      sharded_input: the last dim of the first layer's input is sharded over the stages.
      weights: of the layers, [stages, chunks, layers, ...].
      non_layer_weights: the other weights, which the head and the embedding receive.
      batch: [devices, microbatches, rows, ...].
      side_weights: the weights that ``program.side`` receives.
    """

    program: PipelineProgram
    sharded_input: bool
    weights: Any
    non_layer_weights: Any
    batch: Any
    side_weights: Any = ()

    @classmethod
    def of(cls, program: PipelineProgram, x: jax.Array | None, *arrays: Any) -> TickContext:
        """Returns the context with the fields ``arrays`` for an input ``x`` of the first layer, if there is one."""
        return cls(program, x is not None and x.shape[-1] % program.schedule.stages == 0, *arrays)

    def per_device(self, f: Callable[..., Any], ins: Any, outs: Any, *, stages: bool = True) -> Callable[..., Any]:
        return per_device(self.program.axes, f, ins, outs, stages=stages, columns=self.sharded_input)

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
          name: a field of ``GLOBAL_FIELDS``, or ``recompute``.
        """
        count, ticks = self.program.recomputed_layers() if name == "recompute" else self.program.active_ticks(name)
        layers = jax.tree.leaves(self.weights)[0].shape[2]
        count *= layers if name in ("forward", "backward", "weights", "buckets") else 1
        own_layers = "own_layers/" if name in ("forward", "backward", "weights", "recompute") else ""
        return jax.named_scope(own_layers + trip_count_scope(count, ticks))
