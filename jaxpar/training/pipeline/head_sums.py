"""``HeadSums``: sums of what the head returns, whose gradients are reduce-scattered for every microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.collectives.gather_reduce import Parts, reduce
from jaxpar.parallel.pipeline.executor import layer_slice
from jaxpar.parallel.pipeline.executor.program import TickSums
from jaxpar.training.pipeline.transfer import LeafSharding, StageTransfer
from jaxpar.utils.arrays import accumulator


@dataclass(frozen=True)
class HeadSums(TickSums):
    """The sums, with the gradients sharded as they leave the pipeline.

    Gradients that are sharded over no axis of the batch take as much memory in either way, and stay as they are; so do
    those of parameters that no part of the ticks reads, which are 0.

    Attributes:
      transfer: the shardings of the gradients.
    """

    transfer: StageTransfer

    def empty(self, found: Any) -> Any:
        """Returns zeros for the sums; see :meth:`TickSums.empty`."""
        *others, grads = found
        shape = lambda g, sharding: g.shape[1:] if sharding.scattered else g.shape
        zeros = lambda g, sharding: jnp.zeros(shape(g, sharding), accumulator(g))
        return *super().empty(tuple(others)), jax.tree.map(zeros, grads, self.transfer.other_grads)

    def add(self, sums: Any, found: Any) -> Any:
        """Adds what the head returned; see :meth:`TickSums.add`."""
        *others, grads = sums
        *more, new = found
        return *super().add(tuple(others), tuple(more)), self._added(grads, new)

    def add_grads(self, sums: Any, grads: Any) -> Any:
        """Adds other gradients; see :meth:`TickSums.add_grads`."""
        *others, have = sums
        return *others, self._added(have, grads)

    def _added(self, sums: Any, grads: Any) -> Any:
        transfer, shardings = self.transfer, self.transfer.other_grads

        def one(total: jax.Array, grad: jax.Array, sharding: LeafSharding) -> jax.Array:
            if not sharding.scattered:
                return total + grad
            return self._scattered(total, grad[0], sharding.parts(transfer.axes))

        local = lambda sums, grads: jax.tree.map(one, sums, grads, shardings)
        given = jax.tree.map(transfer.own_spec, shardings)
        kept = jax.tree.map(transfer.sum_spec, shardings)
        return transfer.inside(local, (kept, given), kept)(sums, grads)

    def _scattered(self, total: jax.Array, grad: jax.Array, parts: Parts) -> jax.Array:
        """Adds a gradient's reduce-scattered part to its sum."""
        transfer = self.transfer
        for dim, start, size in layer_slice.blocks_of(
            grad.shape, [dim for dim, _ in parts.crossed], layer_slice.BLOCK_BYTES
        ):
            part = jax.lax.slice_in_dim(grad, start, start + size, axis=dim)
            part = reduce(part, parts, transfer.axes, transfer.precision)
            part = part + jax.lax.slice_in_dim(total, start, start + size, axis=dim)
            total = jax.lax.dynamic_update_slice_in_dim(total, part, start, dim)
            # The next block is read once this one is added.
            total, grad = jax.lax.optimization_barrier((total, grad))
        return total
