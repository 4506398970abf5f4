"""Models that a configuration names: ``model: {factory: "my_module:make_model", loss: "my_module:loss", args: {...}}``.

A configuration runs no code that it does not name (:mod:`jaxpar.app.user_code`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

import jaxpar as jp
from jaxpar.app.lora import LoraSettings
from jaxpar.app.quantize_config import QuantizeSettings
from jaxpar.app.user_code import failing_as, load_function
from jaxpar.errors import ConfigError, listing
from jaxpar.inference.cached_model import DecoderFns
from jaxpar.parallel.attention.context import Context
from jaxpar.sharding.names import Names
from jaxpar.training.batch import tag_batch
from jaxpar.training.loss import LossFn
from jaxpar.training.model import MakeModel, build_shapes, leaves_with_paths, part_of, show


@dataclass(frozen=True)
class FactoryConfig:
    """The keys of ``model`` for a model of the user's own. Each names ``module:function``.

    Attributes:
      factory: called as ``function(key, **args)``, it returns what ``make_model`` returns.
      loss: a function of the model and a batch, and optionally ``key``; see :func:`jaxpar.train_step`.
      eval_loss: the loss on held-out data, such as one without dropout; by default ``loss``.
      decoder: called as ``function(**args)``, it returns a :class:`jaxpar.inference.DecoderFns`, for ``generate``.
      args: keyword arguments of ``factory`` and ``decoder``.
      lora: adapters that are trained instead of the model's weights.
      quantize: which weights are rounded to integers while the model trains.
    """

    factory: str
    loss: str
    eval_loss: str | None = None
    decoder: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    lora: LoraSettings | None = None
    quantize: QuantizeSettings | None = None


@dataclass(frozen=True)
class FactoryModel:
    """A model of the user's own, with what the commands ask of a built-in model's configuration.

    Attributes:
      config: the keys of ``model``.
      make_model, loss_fn, eval_loss_fn: as :func:`jaxpar.init` and :func:`jaxpar.train_step` take them.
      params: the number of its parameters.
      dtype: the dtypes of its parameters.
      batch_dims: the logical dims of the batch's arrays, by path.
      found: the names that were found for its dims, if it names none itself.
      vocab: its vocabulary, which is not known.
      remat: how its repeated layers are recomputed; by default as the model itself decides.
      context: the default, because the model itself decides.
    """

    config: FactoryConfig
    make_model: MakeModel
    loss_fn: LossFn
    eval_loss_fn: LossFn
    params: int
    dtype: str
    batch_dims: Mapping[str, Names]
    found: tuple[str, ...] = ()
    vocab: int | None = None
    remat: str | jp.RematPolicy = "none"
    context: Context = field(default_factory=Context)

    @property
    def name(self) -> str:
        """``module:function`` of its factory."""
        return self.config.factory

    @property
    def matmul_params(self) -> int:
        """An estimate: all parameters."""
        return self.params

    def flops_per_token(self, seq: int) -> float:
        """Returns an estimate: 6 FLOPs for each parameter and token, without those of attention."""
        return 6.0 * self.params

    def check_rules(self, rules: Collection[str]) -> None:
        """Raise a ConfigError if names that were found have no rule, one error for all of them."""
        missing = [name for name in self.found if name not in rules]
        if missing:
            table = ", ".join(f"{name}: null" for name in missing)
            raise ConfigError(
                f"model: {self.name} names no dims, and of the names found for them {listing(missing)} "
                f"{'has' if len(missing) == 1 else 'have'} no rule. Remedy: rules: {{{table}}}, which replicates; or a "
                "mesh axis instead of null, such as model."
            )

    def decoder(self) -> DecoderFns:
        """Returns the forward passes of generation.

        Raises:
          ConfigError: the configuration names none, or its function fails or returns something else.
        """
        if self.config.decoder is None:
            raise ConfigError(
                f"generate: {self.name} is a model of your own, whose cache is not known. Remedy: model: {{decoder: "
                '"my_module:decoder"}, a function that returns a jaxpar.inference.DecoderFns.'
            )
        make, args = load_function(self.config.decoder, "model.decoder"), self.config.args
        with failing_as(f"model.decoder: {self.config.decoder} fails with args {args}", "function(**args)"):
            found = make(**args)
        if not isinstance(found, DecoderFns):
            raise ConfigError(
                f"model.decoder: {self.config.decoder} must return a jaxpar.inference.DecoderFns, got "
                f"{type(found).__name__}. Remedy: its fields are documented there."
            )
        return found


def factory_model(
    config: FactoryConfig, batch: Any, batch_dims: Mapping[str, Names], known: Collection[str]
) -> FactoryModel:
    """Returns the model that a configuration names. If it names none of its dims, they are found.

    Args:
      config: the keys of ``model``.
      batch: the shapes of a batch, from which :func:`jaxpar.annotate` finds names.
      batch_dims: the names of its arrays that are given, by path.
      known: the logical dims that have rules. Of the batch, other names that are found are dropped, unless there are
        no rules yet.

    Raises:
      ConfigError: there is no such module or function, the module cannot be imported, or ``args`` do not fit.
      ModelError: the factory returns no model.
    """
    factory, loss_fn = load_function(config.factory, "model.factory"), load_function(config.loss, "model.loss")
    eval_loss = loss_fn if config.eval_loss is None else load_function(config.eval_loss, "model.eval_loss")
    make_model: MakeModel = functools.partial(factory, **config.args)
    failing = f"model: {config.factory} fails with args {config.args}"
    with failing_as(failing, "function(key, **args)"):
        parts = build_shapes(make_model)
    paths = [show(path) for path, _ in leaves_with_paths(batch)]
    named, names = any(path[0] == "params" for path, _ in parts.dims), set[str]()
    if not named or len(batch_dims) < len(paths):
        found = jp.annotate(make_model, loss_fn, tag_batch(batch, batch_dims))
        dims = {path: _of_batch(names, known) for path, names in found.batch_dims.items()}
        batch_dims = {path: batch_dims.get(path, dims[path]) for path in paths}
        if not named:
            if eval_loss is not loss_fn:
                eval_loss = jp.annotate(found.make_model, eval_loss, tag_batch(batch, batch_dims)).loss_fn
            else:
                eval_loss = found.loss_fn
            make_model, loss_fn = found.make_model, found.loss_fn
            names = {name for array in found.arrays if part_of(array.path) != "batch" for name in array.names if name}
    leaves = jax.tree.leaves(parts.params)
    dtype = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    count = sum(leaf.size for leaf in leaves)
    return FactoryModel(config, make_model, loss_fn, eval_loss, count, dtype, dict(batch_dims), tuple(sorted(names)))


def _of_batch(names: Names, known: Collection[str]) -> Names:
    """The names of an array of the batch: rows first, and of the others those that have rules."""
    return tuple("batch" if i == 0 else name if name in known or not known else None for i, name in enumerate(names))
