"""What a layer has beside what goes from layer to layer: the ``side`` of its microbatch, keys to draw from, losses of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.parallel.pipeline.staged_loss import of_layer

type LayerScalars = dict[str, jax.Array]
"""Scalars of a layer; ``loss`` is added to the loss, and all are metrics."""


class LayerInputs(NamedTuple):
    """Of a microbatch.

    Attributes:
      given: the model's own ``side``.
      keys: of its rows, for all layers or for one; ``None`` where nothing is drawn.
      weight: what a layer's own loss counts in what is differentiated. Backwards alone read it.
      numbers: the places of its rows in the whole batch, int32 [rows]; ``None`` where nobody wants them.
    """

    given: Any
    keys: Any
    weight: jax.Array
    numbers: Any = None


def of_number(side: Any, number: Any) -> Any:
    """``side`` as the layer of this number in the model sees it."""
    return side._replace(keys=of_layer(side.keys, number)) if isinstance(side, LayerInputs) else side


def weighed(side: Any, loss: jax.Array | None) -> jax.Array | None:
    """The cotangent of a layer's own loss, if it has one."""
    return None if loss is None else jnp.asarray(side.weight, loss.dtype)


def bits(x: jax.Array) -> jax.Array:
    """``x``, or the numbers of keys, which a buffer can hold."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def keys_again(x: jax.Array, like: Any) -> jax.Array:
    """What :func:`bits` was given, of the dtype of ``like``."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return x
    kinds: list[Any] = []  # of what keys these are, only a key can be asked
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), like.dtype))
    return jax.random.wrap_key_data(x, impl=kinds[0])
