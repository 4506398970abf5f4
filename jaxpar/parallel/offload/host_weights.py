"""``to_device``: a layer's weights brought from the host's memory when the layer runs, and their gradient left on the device.

After ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857). A weight that waits is two arrays that go through the model together: what lies
in the host's memory, and on the device a ghost of its shape, of which nothing but the gradient is ever made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ConfigError
from jaxpar.parallel.offload.placement import DEVICE, on_host
from jaxpar.sharding.layout import Layout, current_layout, lay_out, to_spec
from jaxpar.sharding.names import Names


@functools.partial(jax.tree_util.register_dataclass, data_fields=["host", "ghost"], meta_fields=["names"])
@dataclass(frozen=True, eq=False)
class HostWeight:
    """A weight in the host's memory, as a model sees it: :func:`to_device` brings it, and so does what jax computes with it.

    A scan over layers hands its body a layer of it, and so does an index.

    Attributes:
      host: the weight, in the host's memory.
      ghost: zeros of its shape on the device, in the dtype that the weight is used in: what is differentiated in its place.
      names: its logical dims, with those that have been taken away before the others.
    """

    host: Any
    ghost: Any
    names: Names

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ghost.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.ghost.dtype

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis:
            return self
        if isinstance(key, int) or (isinstance(key, jax.Array) and not key.ndim):
            one = lambda x: jax.lax.dynamic_index_in_dim(x, key, 0, keepdims=False)
            return HostWeight(one(self.host), one(self.ghost), self.names)
        return to_device(self)[key]

    def __jax_array__(self) -> jax.Array:
        return to_device(self)

    def __matmul__(self, other: Any) -> Any:
        return to_device(self) @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ to_device(self)

    def astype(self, dtype: Any) -> jax.Array:
        return to_device(self).astype(dtype)


def is_waiting(x: Any) -> bool:
    """Whether a leaf of a model's parameters is a weight that waits."""
    return isinstance(x, HostWeight)


def to_device(w: Any) -> Any:
    """A weight on the device: one that waits in the host's memory is brought, any other is handed back as it is.

    For the body of a scan over layers, inside of what it checkpoints (``jax.checkpoint``, ``nn.remat``): kept for the backward pass, the
    weights of all layers would be on the device at once. :func:`jaxpar.gather_weight` and :func:`jaxpar.sharded_dot` begin with it.

    Its gradient stays on the device, laid out by the rules of the role ``gradients``.

    >>> import jax.numpy as jnp
    >>> to_device(jnp.ones(3)).shape
    (3,)
    """
    return _fetch(w.names[len(w.names) - w.ndim :], w.host, w.ghost) if isinstance(w, HostWeight) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(names: Names, host: Any, ghost: Any) -> jax.Array:
    # Pinned to where it lies, or the compiler would move another layout's exchange to the host.
    return _lie(names, jax.device_put(host, DEVICE), "params").astype(ghost.dtype)


def _forward(names: Names, host: Any, ghost: Any) -> tuple[jax.Array, None]:
    return _fetch(names, host, ghost), None


def _backward(names: Names, _: None, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, _lie(names, grad, "gradients")


_fetch.defvjp(_forward, _backward)


def _lie(names: Names, x: jax.Array, role: str) -> jax.Array:
    if jax.sharding.get_abstract_mesh().manual_axes:
        return x  # a shard: it lies as somebody has said already
    layout = current_layout()
    return lay_out(layout.mesh, x, to_spec(layout.resolve(names, x.shape, role=role, dtype=x.dtype)))


def waiting(dims: Mapping[tuple[str, ...], Names], params: Any, layout: Layout | None = None) -> Any:
    """``params`` with those in the host's memory as :class:`HostWeight`; what is so already, stays as it is.

    Args:
      dims: ("params", *path) → logical dims.
      layout: lays out the ghosts; without, nobody differentiates them.
    """

    def one(keys: Any, w: Any) -> Any:
        if is_waiting(w) or not on_host(w):
            return w
        names = dims[("params", *(jax.tree_util.keystr((key,), simple=True) for key in keys))]
        ghost = jnp.zeros(w.shape, w.dtype)
        if layout is not None:
            ghost = lay_out(layout.mesh, ghost, to_spec(layout.resolve(names, w.shape, role="params", dtype=w.dtype)))
        return HostWeight(w, ghost, names)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_waiting)


def split(params: Any) -> tuple[Any, Callable[[Any], Any]]:
    """What of parameters is differentiated, ghosts in the place of those that wait; and the way back."""
    trained = jax.tree.map(lambda w: w.ghost if is_waiting(w) else w, params, is_leaf=is_waiting)
    back = lambda w, x: HostWeight(w.host, x, w.names) if is_waiting(w) else x
    return trained, lambda xs: jax.tree.map(back, params, xs, is_leaf=is_waiting)


def cut(x: Any, first: int, last: int) -> Any:
    """Some layers of a stack.

    Raises:
      ConfigError: they lie in the host's memory.
    """
    if on_host(x):
        raise ConfigError(
            f"offload: layers {first} to {last - 1} are taken out of a stack in the host's memory, which the host would copy. Remedy: leave "
            f"remat.layers out, or keep parameters on the device."
        )
    return x[first:last]
