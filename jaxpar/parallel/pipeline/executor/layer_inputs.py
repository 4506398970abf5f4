"""The inputs of a layer besides ``x``: the ``side`` of its microbatch, PRNG keys, and the weight of its own loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.staged_loss import of_layer

type LayerScalars = dict[str, jax.Array]
"""The scalars of a layer; ``loss`` is added to the loss, and all are metrics."""


class LayerInputs(NamedTuple):
    """The layers' further inputs for one microbatch.

    Attributes:
      given: the arrays that ``PipelineLoss.layer_inputs`` returned.
      keys: the keys of the rows, for all layers or for one; ``None`` if layers draw no random numbers.
      weight: the weight of a layer's own loss in the differentiated loss. Only backwards read it.
      numbers: the indices of the rows in the full batch, int32 [rows]; ``None`` if they are not needed.
      layer: the index of the layer in the model, int32; any number for all layers, and ``None`` if it is not needed.
    """

    given: Any
    keys: Any
    weight: jax.Array
    numbers: Any = None
    layer: Any = None


def of_number(side: Any, number: Any) -> Any:
    """Returns ``side`` for the layer of this index in the model, with the keys of that layer."""
    if not isinstance(side, LayerInputs):
        return side
    layer = None if side.layer is None else jnp.asarray(number, jnp.int32)
    return side._replace(keys=of_layer(side.keys, number), layer=layer)


def bits(x: jax.Array) -> jax.Array:
    """Returns ``x``, or the data of PRNG keys, which a buffer can store."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def keys_again(x: jax.Array, like: Any) -> jax.Array:
    """Inverts :func:`bits` for an array of the dtype of ``like``."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return x
    kinds: list[Any] = []  # only a key array provides its implementation
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), like.dtype))
    return jax.random.wrap_key_data(x, impl=kinds[0])
