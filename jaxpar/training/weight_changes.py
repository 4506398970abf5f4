"""Counts the weights of 16 bits that a step changes: updates below half of their spacing round away.

A weight of 0.02 in bf16 has neighbors 1.2e-4 away, so adding 1e-5 to it changes nothing, step after step. The count
tells such a run from one that trains. A step in device memory writes new weights over the old ones; a comparison of
all of them would keep a copy of the old ones, so it compares a sample, of at most 16 indices of each dim of a shard and
128 of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.parallel.offload.placement import on_host
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.training.state import TrainState, place

WEIGHTS_CHANGED = "weights_changed"
"""The metric: the share of the weights of 16 bits or fewer that the step changed."""
_BITS: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16}
_INDICES, _LAST = 16, 128


def is_narrow(x: Any) -> bool:
    """Whether an array holds floating numbers of 16 bits or fewer."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and jnp.dtype(x.dtype).itemsize in _BITS


def changed(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns how many elements of two arrays of 16 bits or fewer differ, as fp32.

    >>> w = jnp.full(2, 0.02, jnp.bfloat16)
    >>> float(changed(w, w + jnp.array([1e-5, 1e-3], jnp.bfloat16)))
    1.0
    """
    # As bits: a compiler that is allowed excess precision could compare sums before they are rounded.
    a, b = (jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]) for x in (old, new))
    return jnp.sum(a != b, dtype=jnp.float32)


def share_changed(old: Any, new: Any) -> dict[str, jax.Array]:
    """Returns the metric ``weights_changed`` from all weights; none without weights of 16 bits or fewer.

    Args:
      old, new: the parameters before and after a step, as pytrees.
    """
    pairs = [(a, b) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True) if is_narrow(a)]
    return share(sum(changed(a, b) for a, b in pairs), sum(a.size for a, _ in pairs))


def share_changed_on_host(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns :func:`share_changed` of arrays on the host, by path, without a program on the devices."""
    bits = lambda x: x.view(np.dtype(_BITS[x.dtype.itemsize]))
    pairs = [(x, new[path]) for path, x in old.items() if is_narrow(x)]
    count = sum(np.count_nonzero(bits(a) != bits(b)) for a, b in pairs)
    return {WEIGHTS_CHANGED: count / sum(a.size for a, _ in pairs)} if pairs else {}


def share(count: jax.Array | float, total: float) -> dict[str, jax.Array]:
    """Returns the metric ``weights_changed``, ``count`` / ``total``; an empty dict if ``total`` is 0."""
    return {WEIGHTS_CHANGED: count / jnp.float32(total)} if total else {}


@dataclass(frozen=True)
class WeightSample:
    """Some elements of each parameter of 16 bits or fewer, before a step.

    Attributes:
      layout: of the parameters.
      specs: of all of them.
      values: the elements, for the parameters of 16 bits or fewer in device memory.
    """

    layout: Layout
    specs: Sequence[PartitionSpec]
    values: Sequence[jax.Array]

    def metric(self, new: Any, hosted: jax.Array | float = 0.0) -> dict[str, jax.Array]:
        """Returns the metric ``weights_changed``, estimated from the sample; none without weights of 16 bits or fewer.

        Args:
          new: the parameters after the step.
          hosted: how many elements of parameters in host memory changed.
        """
        leaves = jax.tree.leaves(new)
        samples = zip(self.values, _sample(self.layout, leaves, self.specs), strict=True)
        sizes = [x.size for x in leaves if _is_sampled(x)]
        counts = [changed(a, b) * (size / a.size) for size, (a, b) in zip(sizes, samples, strict=True)]
        return share(sum(counts, hosted), sum(x.size for x in leaves if is_narrow(x)))


def sampled(layout: Layout, state: TrainState) -> tuple[TrainState, WeightSample]:
    """Returns the state for an update, and a sample of its weights.

    Args:
      layout: the ambient layout.
      state: the state that the step received.
    """
    specs = [to_spec(tensor.resolved) for tensor in place(layout, state) if tensor.role == "params"]
    leaves, structure = jax.tree.flatten(state.params)
    leaves, sample = sampled_arrays(layout, leaves, specs)
    return replace(state, params=jax.tree.unflatten(structure, leaves)), sample


def sampled_arrays(
    layout: Layout, leaves: Sequence[jax.Array], specs: Sequence[PartitionSpec]
) -> tuple[list[jax.Array], WeightSample]:
    """Returns the weights for an update, and a sample of them; ``specs`` shard them."""
    leaves, values = list(leaves), _sample(layout, leaves, specs)
    if values:
        # The update waits for the sample. Otherwise the compiler reads it afterwards, from a copy of all old weights.
        values, narrow = jax.lax.optimization_barrier((values, [x for x in leaves if _is_sampled(x)]))
        waiting = iter(narrow)
        leaves = [next(waiting) if _is_sampled(x) else x for x in leaves]
    return leaves, WeightSample(layout, specs, values)


def _sample(layout: Layout, params: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> list[jax.Array]:
    """Returns the samples: each device takes some elements of its own shards."""
    pairs = [(x, spec) for x, spec in zip(params, specs, strict=True) if _is_sampled(x)]
    if not pairs:
        return []
    leaves, chosen = ([*some] for some in zip(*pairs, strict=True))
    run = jax.shard_map(
        lambda shards: [_part(x) for x in shards],
        mesh=layout.mesh if isinstance(layout.mesh, Mesh) else None,
        in_specs=(chosen,),
        out_specs=chosen,
    )
    return run(leaves)


def _is_sampled(x: jax.Array) -> bool:
    return is_narrow(x) and not on_host(x)


def _part(x: jax.Array) -> jax.Array:
    """Evenly spaced indices of each dim, and the first ones of the last dim, whose elements are beside each other."""
    strides = [max(size // _INDICES, 1) for size in x.shape[:-1]] + [1] * (x.ndim > 0)
    most = [_INDICES] * (x.ndim - 1) + [_LAST] * (x.ndim > 0)
    ends = [min(size, stride * n) for size, stride, n in zip(x.shape, strides, most, strict=True)]
    return jax.lax.slice(x, [0] * x.ndim, ends, strides) if x.ndim else x
