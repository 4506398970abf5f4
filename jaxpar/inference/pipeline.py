"""Pipelined decoding: each stage keeps the weights and the cache of its own layers, and only activations move.

Requests form as many groups as there are stages. In every tick each stage runs another group through its layers and
sends the result to the next stage. The group that leaves the last stage gets its next tokens, with which it enters the
first stage in the next tick. The pipeline therefore never drains between steps. A decode step has as many ticks as
there are stages: every group generates one token per step, and no stage idles.

In the first step after a prefill only the first group leaves the last stage; the other groups are still between stages.
Row ``i`` of the batch belongs to group ``i % stages``, so that each device holds rows of all groups.

Shape suffixes: P stages (and groups), B batch, R rows of a group, S sequence, E any further dims of a layer's input, L
layers, K heads, T slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.errors import ConfigError
from jaxpar.inference.cached_model import DecoderFns, Stack
from jaxpar.parallel.pipeline.executor.layer_placement import AXIS
from jaxpar.parallel.pipeline.executor.primitives import from_neighbour, over_stages
from jaxpar.parallel.pipeline.staged_loss import stacked_part
from jaxpar.sharding.layout import Layout, current_layout, manual_axes, with_sharding
from jaxpar.training.model import Tagged

LAYERS = "layers"


def stages_of(layout: Layout, cached: DecoderFns) -> int:
    """Returns the number of pipeline stages that shard the model's layers.

    It is 1 without an axis ``pipeline`` for the layers, and for a model without
    :class:`jaxpar.inference.cached_model.Stack`.
    """
    if cached.stack is None or LAYERS not in layout.rules.table:
        return 1
    return layout.sizes[AXIS] if layout.resolve((LAYERS,), role="params").axes[0] == (AXIS,) else 1


@dataclass(frozen=True)
class PipelinedDecoder:
    """Decodes groups of requests that rotate through the pipeline stages.

    Attributes:
      stack: the model's forward passes layer by layer.
      stages: number of stages, which is also the number of groups.
      rows: rows per group.
    """

    stack: Stack
    stages: int
    rows: int

    @classmethod
    def of(cls, cached: DecoderFns, stages: int, batch: int) -> PipelinedDecoder | None:
        """Returns the decoder for ``batch`` rows, or ``None`` if there is only one stage.

        Raises:
          ConfigError: ``stages`` does not divide ``batch``.
        """
        if stages == 1 or cached.stack is None:
            return None
        if batch % stages:
            raise ConfigError(
                f"Generator: batch must be a multiple of {AXIS}={stages}, because the stages run {stages} "
                f"groups of requests concurrently; got {batch}. Remedy: set batch={batch + -batch % stages}, "
                f"or remove the {AXIS} axis."
            )
        return cls(cached.stack, stages, batch // stages)

    def dims(self, tagged: Tagged) -> Tagged:
        """Returns an array of the cache with its layers sharded over stages."""
        return Tagged(tagged.value, (LAYERS, *tagged.dims[1:]))

    def take(self, x_B: jax.Array, group: Any) -> jax.Array:
        """Returns the rows of one group, [rows, ...], out of ``x_B`` [batch, ...]."""
        return jax.lax.dynamic_index_in_dim(x_B.reshape(self.rows, self.stages, *x_B.shape[1:]), group, 1, False)

    def put(self, x_B: jax.Array, x_R: jax.Array, group: Any) -> jax.Array:
        """Returns ``x_B`` [batch, ...] with the rows of one group replaced by ``x_R`` [rows, ...]."""
        x_RP = x_B.reshape(self.rows, self.stages, *x_B.shape[1:])
        return jax.lax.dynamic_update_index_in_dim(x_RP, x_R.astype(x_B.dtype), group, 1).reshape(x_B.shape)

    def initial_activations(self, model: Any) -> Any:
        """Returns the activations between stages after a prefill: zeros, and a tick count ``ticks`` of 0."""
        one = jax.eval_shape(lambda: self.stack.before(model, jnp.zeros((self.rows, 1), jnp.int32)))
        return {"x": self._shard(jnp.zeros((self.stages, *one.shape), one.dtype)), "ticks": jnp.int32(0)}

    def spec(self, layout: Layout) -> PartitionSpec:
        """Returns the partition spec of the activations between stages, [stages, rows, ...]."""
        return PartitionSpec(AXIS, layout.resolve(("batch",), (self.rows,)).axes[0] or None)

    def _shard(self, x_PRSE: jax.Array) -> jax.Array:
        layout = current_layout()
        return with_sharding(layout.mesh, x_PRSE, self.spec(layout))

    def prefill(
        self, model: Any, tokens_BS: jax.Array, lengths_B: jax.Array, cache: Any, slots: int
    ) -> tuple[jax.Array, Any]:
        """Run full prompts through all stages.

        Args:
          model: the model.
          tokens_BS: padded prompts [batch, seq] int.
          lengths_B: number of tokens of each prompt [batch] int.
          cache: an empty cache, its layers sharded over stages.
          slots: cache slots per row.

        Returns:
          The output of the last layer for each row's last token [batch, ...], and the filled cache.
        """
        leaves, make = stacked_part(model, self.stack.path)
        last = self.stages - 1

        def all_ticks(leaves: Any, x_BSE: jax.Array, lengths_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            stage = jax.lax.axis_index(AXIS)

            def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
                received, cache, ends_B = carry
                group = jnp.clip(t - stage, 0, last)
                active = (t >= stage) & (t - stage <= last)
                x_RSE = jnp.where(stage == 0, self.take(x_BSE, jnp.clip(t, 0, last)), received)
                y_RSE, kept = self.stack.prompts((leaves, make), x_RSE, slots)
                cache = jax.tree.map(lambda old, new: self._put_layers(old, new, group, active), cache, kept)
                end_R = jnp.where(active, last_of(y_RSE, self.take(lengths_B, group)), self.take(ends_B, group))
                return (from_neighbour(y_RSE, "down"), cache, self.put(ends_B, end_R, group)), None

            received = jnp.zeros((self.rows, *x_BSE.shape[1:]), x_BSE.dtype)
            ends_B = jnp.zeros((x_BSE.shape[0], *x_BSE.shape[2:]), x_BSE.dtype)
            ticks = jnp.arange(2 * self.stages - 1, dtype=jnp.int32)
            (_, cache, ends_B), _ = jax.lax.scan(tick, (received, cache, ends_B), ticks)
            return over_stages(jnp.where(stage == last, ends_B, 0)), cache

        own, replicated = PartitionSpec(AXIS), PartitionSpec()
        run = self._inside(all_ticks, (own, replicated, replicated, own), (replicated, own))
        return run(leaves, self.stack.before(model, tokens_BS), lengths_B, cache)

    def _put_layers(self, old_LBKT: jax.Array, new_LRKT: jax.Array, group: Any, active: Any) -> jax.Array:
        """Write the cache of one group's prompts into a stage's cache if the stage holds that group in this tick."""
        x_LRPKT = old_LBKT.reshape(old_LBKT.shape[0], self.rows, self.stages, *old_LBKT.shape[2:])
        old_LRKT = jax.lax.dynamic_index_in_dim(x_LRPKT, group, 2, False)
        new = jnp.where(active, new_LRKT.astype(old_LBKT.dtype), old_LRKT)
        return jax.lax.dynamic_update_index_in_dim(x_LRPKT, new, group, 2).reshape(old_LBKT.shape)

    def tick(self, model: Any, tokens_R: jax.Array, t: jax.Array, at_B: jax.Array, x: Any, cache: Any) -> Any:
        """Run one tick on all stages.

        Args:
          model: the model.
          tokens_R: last tokens [rows] of the group that enters the first stage.
          t: the tick, which is also the number of that group.
          at_B: position of each row's last token [batch] int32.
          x: activations between stages [stages, rows, ...].
          cache: the cache, its layers sharded over stages.

        Returns:
          The last layer's output [rows, ...] for the group that leaves, and the new ``x`` and ``cache``.
        """
        leaves, make = stacked_part(model, self.stack.path)
        last = self.stages - 1

        def one(leaves: Any, first_RSE: jax.Array, x_1RSE: jax.Array, at_B: jax.Array, cache: Any, t: Any) -> Any:
            stage = jax.lax.axis_index(AXIS)
            group = (t - stage) % self.stages
            x_RSE = jnp.where(stage == 0, first_RSE, x_1RSE[0])
            y_RSE, cache = self.stack.token((leaves, make), x_RSE, self.take(at_B, group), cache, (group, self.stages))
            left_RSE = over_stages(jnp.where(stage == last, y_RSE, 0))
            return left_RSE[:, 0], from_neighbour(y_RSE, "down")[None], cache

        own, replicated = PartitionSpec(AXIS), PartitionSpec()
        run = self._inside(one, (own, replicated, own, replicated, own, replicated), (replicated, own, own))
        left, x, cache = run(leaves, self.stack.before(model, tokens_R[:, None]), x, at_B, cache, t)
        return left, self._shard(x), cache

    def _inside(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        manual = manual_axes(current_layout(), (AXIS,))
        return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)


def last_of(x_BSE: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns the activations of each row's last token, [batch, ...].

    It is a masked sum and not an index, because the sequence may be sharded.
    """
    last_BS = jax.lax.broadcasted_iota(jnp.int32, x_BSE.shape[:2], 1) == lengths_B[:, None] - 1
    return jnp.sum(jnp.where(jnp.expand_dims(last_BS, tuple(range(2, x_BSE.ndim))), x_BSE, 0), 1)
