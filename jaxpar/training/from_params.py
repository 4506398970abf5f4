"""The training state of given parameters, such as those of a checkpoint of another library."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import MakeModel
from jaxpar.training.state import TrainState, _build, abstract_state


def state_from_params(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    params: Any,
    *,
    seed: int = 0,
    precision: PrecisionLike = None,
) -> TrainState:
    """Returns the state at step 0 of given parameters; :func:`jaxpar.init` returns that of random ones.

    Args:
      layout, make_model, tx, seed, precision: as for :func:`jaxpar.init`.
      params: arrays like those of ``jp.abstract_state(layout, make_model, tx).params``, which become part of the state.

    Raises:
      LayoutError, ModelError, AnnotationError, ConfigError: as :func:`jaxpar.init`.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16,)), "embed")}
    >>> params = {"w": jax.device_put(jax.numpy.ones(16), layout.sharding(("embed",)))}
    >>> float(state_from_params(layout, make_model, optax.sgd(0.1), params).params["w"].sum())
    16.0
    """
    abstract = abstract_state(layout, make_model, tx, precision)

    def build(params: Any, key: jax.Array) -> TrainState:
        made = _build(layout, make_model, tx, Precision.of(precision), key, params=params)
        return dataclasses.replace(made, params=None, metadata=abstract.metadata)

    without = dataclasses.replace(abstract, params=None)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, without)
    made: TrainState = jax.jit(build, out_shardings=shardings)(params, jax.random.key(seed))
    return dataclasses.replace(made, params=params)
