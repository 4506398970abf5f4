"""``to_device``: brings a layer's weights from host memory when the layer runs; their gradients stay on the device.

After ZeRO-Infinity (Rajbhandari et al. 2021, arXiv:2104.07857). A host-resident weight is passed through the model as
two arrays: the weight itself, in host memory, and a zero placeholder of the same shape on the device. Only the
placeholder is differentiated, so the gradient is created on the device; XLA eliminates the zeros.
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
from jaxpar.sharding.layout import Layout, current_layout, to_spec, with_sharding
from jaxpar.sharding.names import Names


@functools.partial(jax.tree_util.register_dataclass, data_fields=["host", "placeholder"], meta_fields=["names"])
@dataclass(frozen=True, eq=False)
class HostWeight:
    """A weight in host memory, as the model sees it.

    :func:`to_device`, ``@``, ``astype`` and the functions of jax bring it to the device. A scan over stacked layers, or
    an integer index, yields the ``HostWeight`` of one layer.

    Attributes:
      host: the weight, in host memory.
      placeholder: zeros of its shape on the device, in the dtype of the compute; they are differentiated instead of
        ``host``.
      names: its logical dims, preceded by the dims that scans or indices have removed.
    """

    host: Any
    placeholder: Any
    names: Names

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.placeholder.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.placeholder.dtype

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis:
            return self
        if isinstance(key, int) or (isinstance(key, jax.Array) and not key.ndim):
            one = lambda x: jax.lax.dynamic_index_in_dim(x, key, 0, keepdims=False)
            return HostWeight(one(self.host), one(self.placeholder), self.names)
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
    """Returns whether a leaf of a model's parameters is a :class:`HostWeight`."""
    return isinstance(x, HostWeight)


def to_device(w: Any) -> Any:
    """Returns a weight on the device: a :class:`HostWeight` is fetched, any other value is returned as it is.

    Call it in the body of a scan over layers, inside the function that is checkpointed (``jax.checkpoint``,
    ``nn.remat``). Otherwise the fetched weights of all layers are saved for the backward pass, and are on the device at
    the same time. :func:`jaxpar.gather_weight` and :func:`jaxpar.sharded_dot` call it first.

    The gradient stays on the device, sharded by the rules of the role ``gradients``.

    Args:
      w: a weight of any shape, as the model finds it in its parameters.

    Raises:
      NoLayoutError: a :class:`HostWeight` is fetched outside a ``shard_map``, and no layout is ambient.

    >>> import jax.numpy as jnp
    >>> to_device(jnp.ones(3)).shape
    (3,)
    """
    return _fetch(w.names[len(w.names) - w.ndim :], w.host, w.placeholder) if isinstance(w, HostWeight) else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(names: Names, host: Any, placeholder: Any) -> jax.Array:
    # The sharding is fixed, or the compiler would move the collective of another layout to the host.
    return _constrain(names, jax.device_put(host, DEVICE), "params").astype(placeholder.dtype)


def _backward(names: Names, _: None, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, _constrain(names, grad, "gradients")


_fetch.defvjp(lambda names, host, placeholder: (_fetch(names, host, placeholder), None), _backward)


def _constrain(names: Names, x: jax.Array, role: str) -> jax.Array:
    if jax.sharding.get_abstract_mesh().manual_axes:
        return x  # inside a shard_map, x is a shard that already has its sharding
    return _sharded(current_layout(), names, x, role)


def _sharded(layout: Layout, names: Names, x: jax.Array, role: str) -> Any:
    return with_sharding(layout.mesh, x, to_spec(layout.resolve(names, x.shape, role=role, dtype=x.dtype)))


def waiting(dims: Mapping[tuple[str, ...], Names], params: Any, layout: Layout | None = None) -> Any:
    """Returns ``params`` with each weight that is in host memory as a :class:`HostWeight`.

    Args:
      dims: ("params", *path) → logical dims.
      params: the model's parameters; a leaf that is a ``HostWeight`` already is not changed.
      layout: shards the placeholders. It may be ``None`` where nothing is differentiated.
    """

    def one(keys: Any, w: Any) -> Any:
        if is_waiting(w) or not on_host(w):
            return w
        names = dims[("params", *(jax.tree_util.keystr((key,), simple=True) for key in keys))]
        placeholder = jnp.zeros(w.shape, w.dtype)
        return HostWeight(w, placeholder if layout is None else _sharded(layout, names, placeholder, "params"), names)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_waiting)


def split(params: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the parameters to differentiate, placeholders for host weights, and a function that puts them back."""
    trained = jax.tree.map(lambda w: w.placeholder if is_waiting(w) else w, params, is_leaf=is_waiting)
    back = lambda w, x: HostWeight(w.host, x, w.names) if is_waiting(w) else x
    return trained, lambda xs: jax.tree.map(back, params, xs, is_leaf=is_waiting)


def cut(x: Any, first: int, last: int) -> Any:
    """Returns layers ``first`` to ``last - 1`` of a stack.

    Raises:
      ConfigError: the stack is in host memory.
    """
    if on_host(x):
        raise ConfigError(
            f"offload: layers {first} to {last - 1} are sliced from a stack in host memory, which would make a copy on "
            f"the host. Remedy: leave remat.layers out, or keep parameters on the device."
        )
    return x[first:last]
