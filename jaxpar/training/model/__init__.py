"""Takes models apart into arrays to train, arrays to carry, logical names of their dims, and a way back to the model.

``read`` takes anything that ``make_model`` returns (an NNX module, a Linen variable dict, a tagged pytree) and returns
``ModelParts``: plain nested dicts of arrays, so that every optax transform, mask and label function sees ordinary
pytrees. ``build`` first makes the model, with initial parameters that are equal in every layout.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

from jaxpar.errors import JaxparError, ModelError
from jaxpar.parallel.unsharded import unsharded
from jaxpar.training.model import pytree
from jaxpar.training.model.fixed_order import Causes, in_fixed_order
from jaxpar.training.model.lora import AdaptedModel, LoraModel, adapted_parts
from jaxpar.training.model.parts import (
    FoundNames,
    Kind,
    MakeModel,
    ModelParts,
    NamedModel,
    Path,
    Tagged,
    leaves_with_paths,
    map_with_paths,
    part_of,
    show,
    tag,
    to_path,
)
from jaxpar.training.model.quantized import QuantizeAware, RoundedModel, rounded_parts
from jaxpar.training.model.stacked import StackedModel, StackLayers, stack_parts

__all__ = [
    "FoundNames",
    "Kind",
    "MakeModel",
    "ModelParts",
    "NamedModel",
    "Path",
    "Tagged",
    "leaves_with_paths",
    "map_with_paths",
    "part_of",
    "show",
    "tag",
    "to_path",
]


def read(model: Any) -> ModelParts:
    """Takes a model apart.

    Args:
      model: an ``nnx.Module``; a mapping with the key ``params`` (Linen variables: other collections are carried, not
        trained); or any other pytree of arrays, with ``tag`` or Flax's ``nn.Partitioned`` boxes on annotated leaves.

    Returns:
      The arrays, the logical names of their dims, and how to rebuild the model.

    Raises:
      ModelError: no parameters, a Linen module instead of its variables, or the state of a training loop.
      AnnotationError: a malformed annotation.
    """
    if isinstance(model, NamedModel):
        parts = read(model.model)
        return replace(parts, dims=tuple((dict(parts.dims) | dict(model.dims)).items()))
    if isinstance(model, StackedModel):
        return stack_parts(read(model.model), model.path)
    if isinstance(model, AdaptedModel):
        return adapted_parts(model, read(model.model))
    if isinstance(model, RoundedModel):
        return rounded_parts(model, read(model.model))
    if isinstance(model, _modules("nnx")):
        from jaxpar.training.model import nnx_module

        return nnx_module.read(model)
    state = sys.modules.get("flax.training.train_state")
    if state is not None and isinstance(model, state.TrainState):
        raise ModelError(
            "make_model returned a Flax TrainState, which also holds optimizer state. Remedy: return only the "
            "variables, as in make_model = lambda key: module.init(key, example_input), and pass the optax transform "
            "as tx."
        )
    if isinstance(model, optax.LookaheadParams):
        raise ModelError(
            "make_model returned optax.LookaheadParams, but optax.lookahead keeps its slow parameters in the "
            "optimizer's state here, as Lookahead.slow. Remedy: return the fast parameters alone, as in make_model = "
            "lambda key: make_both(key).fast."
        )
    if isinstance(model, _modules("linen")):
        raise ModelError(
            f"make_model returned the Linen module {type(model).__name__}, which holds no arrays. Remedy: return its "
            "variables, as in make_model = lambda key: module.init(key, example_input)."
        )
    return pytree.read(model)


def _modules(*apis: str) -> tuple[type, ...]:
    """Returns the module classes of Flax's ``nnx`` or ``linen``, which are not imported for other models."""
    loaded = (sys.modules.get(f"flax.{api}") for api in apis)  # None also where a program forbids the import
    return tuple(flax.Module for flax in loaded if flax is not None)


def build(make_model: MakeModel, key: jax.Array) -> tuple[ModelParts, dict[str, Causes]]:
    """Returns the model's parts, and the order-dependent primitives of each parameter that has any, by path.

    Args:
      make_model: returns the model.
      key: the PRNG key that ``make_model`` receives.

    Raises:
      ModelError: ``make_model`` is not a function, or the model has a parameter that has no gradient.
    """
    static: list[tuple[Any, Any]] = []

    def arrays(key: jax.Array) -> tuple[Any, Any]:
        parts = read(_call(make_model, key))
        _check_trainable(parts.params)
        static.append((parts.dims, parts.kind))
        return parts.params, parts.variables

    (params, variables), found = in_fixed_order(arrays, key)
    paths = [show(("params", *path)) for path, _ in leaves_with_paths(params)]
    causes = {path: names for path, names in zip(paths, found, strict=True) if names}
    return ModelParts(params, variables, *static[0]), causes


def build_with_or_without_mesh(make_model: MakeModel, key: jax.Array) -> tuple[ModelParts, dict[str, Causes]]:
    """Returns :func:`build` without a mesh, or on the ambient mesh if the model requires one.

    Flax would take the names in its metadata for mesh axes (Linen when it sees a mesh, NNX always); the enclosing jit
    places the outputs instead. A Linen init runs the model on an example, whose batch (often 1) may not fit. But a
    model that calls ``with_sharding_constraint`` with a PartitionSpec of its own requires a mesh.
    """
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return build(make_model, key)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, JaxparError):
            raise
        try:
            return build(make_model, key)
        except Exception as second:
            raise error from second


def build_shapes(make_model: MakeModel) -> ModelParts:
    """Returns the model's parts with shapes in place of arrays; nothing is computed. Raises as :func:`build`."""
    found: list[ModelParts] = []

    def arrays(key: jax.Array) -> Any:
        parts, _ = build(make_model, key)
        found.append(parts)
        return parts.params, parts.variables

    with unsharded():  # Linen runs the model to make its variables, with its constraints
        params, variables = jax.eval_shape(arrays, jax.eval_shape(lambda: jax.random.key(0)))
    return ModelParts(params, variables, found[0].dims, found[0].kind)


def _takes_key(kind: Any) -> bool:
    """Whether a class can be called with a PRNG key: no Linen module, nor an NNX module whose argument is ``rngs``."""
    if not issubclass(kind, _modules("nnx")):
        return not issubclass(kind, _modules("linen"))
    own = list(inspect.signature(kind.__init__).parameters.values())[1:]
    needed = [p for p in own if p.default is p.empty]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY and needed[0].name != "rngs"


def _call(make_model: MakeModel, key: jax.Array) -> Any:
    if isinstance(make_model, StackLayers):
        return StackedModel(_call(make_model.make_model, key), make_model.path)
    if isinstance(make_model, QuantizeAware):
        return RoundedModel(_call(make_model.make_model, key), make_model.config)
    if isinstance(make_model, LoraModel):
        return AdaptedModel(_call(make_model.make_model, key), make_model.config, key)
    if isinstance(make_model, type) and not _takes_key(make_model):
        name = make_model.__name__
        is_nnx = issubclass(make_model, _modules("nnx"))
        made = f"{name}(rngs=nnx.Rngs(key))" if is_nnx else f"{name}().init(key, example_input)"
        raise ModelError(
            f"make_model is the class {name}, but it must be a function of a PRNG key, so that the model can be built "
            f"in place. Remedy: make_model = lambda key: {made}."
        )
    if not callable(make_model) or isinstance(make_model, _modules("nnx", "linen")):
        raise ModelError(
            "make_model must be a function of a PRNG key, so that the model can be built in place, got "
            f"{type(make_model).__name__}. Remedy: make_model = lambda key: Model(rngs=nnx.Rngs(key))."
        )
    try:
        inspect.signature(make_model).bind(None)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that has no signature
        if isinstance(error, TypeError):
            raise ModelError(
                f"make_model must be a function of a PRNG key, but it cannot be called with one argument: {error}. "
                "Remedy: make_model = lambda key: Model(rngs=nnx.Rngs(key))."
            ) from None
    return make_model(key)


def _check_trainable(params: Any) -> None:
    for keys, leaf in leaves_with_paths({"params": params}):
        path = show(keys)
        try:
            dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        except TypeError:
            raise ModelError(f"{path} must be an array, got {type(leaf).__name__}.") from None
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ModelError(
                f"{path} has dtype {dtype}, which has no gradient. Remedy: keep it out of the parameters (another "
                f"nnx.Variable type, another Linen collection, or a closure)."
            )
