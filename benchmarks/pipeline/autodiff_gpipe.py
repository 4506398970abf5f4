"""A naive pipeline for comparison: a scan over ticks that jax differentiates.

``benchmarks/pipeline/memory_tpu.py`` prints its memory next to that of jaxpar's schedules. In each of
``microbatches + stages - 1`` ticks every stage runs its layers on what the previous stage sent; jax derives the
backward scan. The backward pass needs the residuals of every tick, so this is GPipe, and its memory grows with the
number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpar as jp
from jaxpar.parallel.pipeline.staged_loss import stacked_part

AXIS = "pipeline"


def autodiff_gpipe(staged: jp.pipeline.PipelineLoss, microbatches: int) -> Callable[[Any, Any], jax.Array]:
    """Return the loss of a :class:`jaxpar.pipeline.PipelineLoss` with its layers sharded over the axis ``pipeline``.

    It is for ``jp.train_step`` without ``pipeline=``. ``layer_inputs`` must be equal for all rows, as positions are.
    """

    def loss(model: Any, batch: Any) -> jax.Array:
        batch = staged.prepare(model, batch)
        leaves, block = stacked_part(model, staged.path)
        x = staged.embed(model, batch)
        # Interleaved rows, so that each microbatch has rows of every device.
        pieces = x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1)
        pieces = jp.hint(pieces, None, *staged.dims) if staged.dims else pieces
        side = staged.layer_inputs(model, jax.tree.map(lambda x: x[: pieces.shape[1]], batch))

        def local(leaves: Any, pieces: jax.Array, side: Any) -> jax.Array:
            stages, me = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)

            def tick(came: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
                fed = jax.lax.dynamic_index_in_dim(pieces, jnp.minimum(t, microbatches - 1), 0, keepdims=False)
                one = lambda x, leaves: (staged.layer(block(leaves), x, side), None)
                y, _ = jax.lax.scan(one, jnp.where(me == 0, fed, came), leaves)
                return jax.lax.ppermute(y, AXIS, [(i, (i + 1) % stages) for i in range(stages)]), y

            ticks = jnp.arange(microbatches + stages - 1)
            _, ys = jax.lax.scan(tick, jnp.zeros_like(pieces[0]), ticks)
            return ys[stages - 1 :][None]

        own = PartitionSpec(AXIS)
        run = jax.shard_map(
            local, in_specs=(own, PartitionSpec(), PartitionSpec()), out_specs=own, axis_names={AXIS}, check_vma=False
        )
        ys = run(leaves, pieces, side)[-1]
        return staged.head(model, ys.swapaxes(0, 1).reshape(x.shape), batch)

    return loss
