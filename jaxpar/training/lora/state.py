"""States of adapted models: their frozen weights apart, put back, given, and merged with the adapters."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import ModelError, StateError
from jaxpar.parallel.offload.placement import DEVICE, on_host
from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import MakeModel, leaves_with_paths, show
from jaxpar.training.model.lora import LoraKind
from jaxpar.training.model.parts import FROZEN
from jaxpar.training.state import TrainState, _build, abstract_state


def is_adapted(state: TrainState) -> bool:
    """Whether a state is that of a model with adapters."""
    return isinstance(state.metadata.kind, LoraKind)


def frozen_params(state: TrainState) -> Any:
    """Returns the frozen weights of an adapted model, which has the structure of the model's own parameters.

    Raises:
      ModelError: the model has no adapters.
    """
    _kind(state, "frozen_params")
    return state.variables[FROZEN]


def without_frozen(state: TrainState) -> TrainState:
    """Returns a state without its frozen weights, to save the adapters alone; any other state as it is.

    >>> import jax, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", "mlp")}
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data", mlp=None))
    >>> state = jp.init(layout, jp.lora.adapt(make_model, jp.lora.LoraConfig(rank=2)), optax.sgd(0.1))
    >>> saved = without_frozen(state)
    >>> sorted(saved.variables), with_frozen(saved, frozen_params(state)).model["w"].shape
    (['carried'], (16, 4))
    """
    if not is_adapted(state) or FROZEN not in state.variables:
        return state
    rest = {name: value for name, value in state.variables.items() if name != FROZEN}
    return dataclasses.replace(state, variables=rest)


def with_frozen(state: TrainState, params: Any) -> TrainState:
    """Returns a state of an adapted model with these frozen weights.

    Args:
      state: as :func:`without_frozen` returned it, or restored from such a checkpoint.
      params: the weights, as :func:`frozen_params` returns them.

    Raises:
      ModelError: the model has no adapters.
      StateError: a step took over the memory of ``params``.
    """
    _kind(state, "with_frozen")
    _check_alive("with_frozen", params)
    return dataclasses.replace(state, variables={**state.variables, FROZEN: params})


def init_from(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    params: Any,
    *,
    seed: int = 0,
    precision: PrecisionLike = None,
) -> TrainState:
    """Returns the state at step 0 of an adapted model with given frozen weights; no others are made.

    Args:
      layout, tx, seed, precision: as for :func:`jaxpar.init`.
      make_model: as :func:`adapt` returned it.
      params: the weights of the model, sharded as ``frozen_params(jp.abstract_state(layout, make_model, tx))``. They
        are not copied: they become part of the state, and the first step takes over their memory. For another use of
        them, pass ``jax.tree.map(jnp.copy, params)``, which keeps a second copy in memory; or use
        ``train_step(donate=False)``; or take them from a later state: ``frozen_params(state)``.

    Raises:
      ModelError: the model has no adapters, or ``params`` are not its weights.
      StateError: a step took over the memory of ``params``.
      LayoutError, AnnotationError, ConfigError: as :func:`jaxpar.init`.
    """
    abstract = abstract_state(layout, make_model, tx, precision)
    own = frozen_params(abstract)
    shapes = lambda tree: [(path, tuple(x.shape)) for path, x in leaves_with_paths(tree)]
    if shapes(own) != shapes(params):
        raise ModelError(
            "init_from(): params are not the weights of the model: their paths or shapes differ. Remedy: params like "
            "frozen_params(jp.abstract_state(layout, make_model, tx))."
        )
    _check_alive("init_from", params)

    def build(key: jax.Array) -> TrainState:
        made = without_frozen(_build(layout, make_model, tx, Precision.of(precision), key))
        return dataclasses.replace(made, metadata=abstract.metadata)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, without_frozen(abstract))
    # As in jaxpar.init, only unoptimized code makes initial values bitwise equal in every layout.
    on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    made = jax.jit(build, out_shardings=shardings, compiler_options=options)(jax.random.key(seed))
    return with_frozen(made, params)


def merge(state: TrainState) -> Any:
    """Returns the weights of an adapted model with its adapters added: parameters of the model without adapters.

    Args:
      state: of a model with adapters.

    Returns:
      Arrays like :func:`frozen_params`, in the same dtypes and shardings. The sum is in fp32 or wider.

    Raises:
      ModelError: the model has no adapters.
    """
    kind, frozen = _kind(state, "merge"), frozen_params(state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, frozen)
    run = lambda params, frozen: kind.merged(params, {FROZEN: jax.tree.map(_on_device, frozen)})
    return jax.jit(run, out_shardings=shardings)(state.params, frozen)


def digest_of(params: Any) -> str:
    """Returns a digest of weights, equal in every layout: 12 hexadecimal digits.

    Each number's bits are multiplied by an odd number that depends on its position, and summed as integers, so that
    neither the order of the sum nor the sharding matters.
    """
    sums = jax.jit(lambda tree: [_bits(x) for x in jax.tree.leaves(tree)])(params)
    text = [
        (show(path), tuple(x.shape), str(x.dtype), int(total))
        for (path, x), total in zip(leaves_with_paths(params), sums, strict=True)
    ]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:12]


def _bits(x: jax.Array) -> jax.Array:
    """Returns the weighted sum of an array's bits, modulo 2**32."""
    x = _on_device(x)
    size = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}.get(x.dtype.itemsize, jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, size).astype(jnp.uint32)  # of 8 bytes: two words
    weight, stride = jnp.ones(words.shape, jnp.uint32), 2
    for dim in reversed(range(words.ndim)):
        weight += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return (words * weight).sum(dtype=jnp.uint32)


def _on_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, DEVICE) if on_host(x) else x


def _check_alive(name: str, params: Any) -> None:
    """Raise a ``StateError`` if a step took over the memory of some of these weights."""
    leaves = leaves_with_paths(params)
    gone = [show(path) for path, x in leaves if isinstance(x, jax.Array) and x.is_deleted()]
    if gone:
        raise StateError(
            f"{name}(): {len(gone)} of {len(leaves)} weights, such as {gone[0]}, are deleted, because a step took over "
            "their memory. Remedy: take them from the state that the last step returned, jp.lora.frozen_params(state); "
            "or, before the first step, pass a copy, jax.tree.map(jnp.copy, params)."
        )


def _kind(state: TrainState, name: str) -> LoraKind:
    kind = state.metadata.kind
    if not isinstance(kind, LoraKind):
        raise ModelError(
            f"{name}(): the model has no adapters. Remedy: make_model = jp.lora.adapt(make_model, "
            "jp.lora.LoraConfig())."
        )
    return kind
