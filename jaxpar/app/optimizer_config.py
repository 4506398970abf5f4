"""The optimizer of a run, from its configuration."""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.app.config import MuonSettings, OptimizerConfig, PruneSettings
from jaxpar.compression import PruneConfig, prune
from jaxpar.errors import ConfigError, JaxparError, did_you_mean, prefixed
from jaxpar.training.model import MakeModel
from jaxpar.training.muon import MuonConfig, muon
from jaxpar.training.one_bit_adam import NAME as ONE_BIT

MUON = "muon"
_NO_OPTIONS = ("learning_rate", "adam_learning_rate", "muon_weight_dimension_numbers", "weight_decay_mask")
"""Arguments of optimizers that other keys set, or that no text can be."""


def make_optimizer(config: OptimizerConfig, steps: int, make_model: MakeModel) -> optax.GradientTransformation:
    """Returns the named optax optimizer, ``muon`` or ``one_bit_adam``, with its schedule over ``steps``.

    Args:
      config: its configuration.
      steps: of the run.
      make_model: of the model that is trained. ``muon`` reads the logical dims of its parameters.

    Raises:
      ConfigError: there is no such optimizer, it lacks one of ``options``, fails with them, ``one_bit_adam`` lacks
        ``warmup``, or ``muon`` finds no matrix.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `optax.__all__` includes deprecated names
        named = [name for name in optax.__all__ if "learning_rate" in _parameters(getattr(optax, name))]
    known = sorted([*named, MUON, ONE_BIT])
    if config.name not in known:
        raise ConfigError(
            f"optimizer: unknown name {config.name!r}.{did_you_mean(config.name, known)} Supported optimizers (any "
            f"optax optimizer with a learning rate): {', '.join(known)}."
        )
    if config.muon is not None and config.name != MUON:
        raise ConfigError(
            f"optimizer.muon is for name: muon, but optimizer.name is {config.name!r}. Remedy: leave one of them out."
        )
    make = _constructor(config.name)
    options = [name for name in _parameters(make) if name not in _NO_OPTIONS]
    for option in config.options:
        if option not in options:
            raise ConfigError(
                f"optimizer: {config.name} has no option {option!r}.{did_you_mean(option, options)} Options: "
                f"{', '.join(options)}."
            )
    if config.name == ONE_BIT and "warmup" not in config.options:
        raise ConfigError(
            f"optimizer: {ONE_BIT} requires options.warmup, the number of steps of ordinary Adam at the start. Remedy: "
            f"options: {{warmup: {max(steps // 5, 1)}}}, a fifth of train.steps."
        )
    try:
        tx = make(**_rates(config, steps), **config.options)
        if config.name != ONE_BIT:  # it requires a layout
            jax.eval_shape(functools.partial(_one_update, tx), {"w": jnp.zeros((2, 2))})
    except JaxparError:
        raise
    except Exception as error:  # optax checks no types, so a wrong option fails anywhere
        raise ConfigError(
            f"optimizer: {config.name} fails with the options {config.options}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. Remedy: correct or leave out the options, or use another optimizer."
        ) from error
    if config.name == MUON:
        tx = _muon(config, steps, make_model)
    return tx if config.prune is None else _pruning(tx, config.name, config.prune)


def _constructor(name: str) -> Any:
    """The function that makes an optimizer of this name, which is known."""
    if name == MUON:
        return optax.contrib.muon
    return jp.one_bit_adam if name == ONE_BIT else getattr(optax, name)


def _rates(config: OptimizerConfig, steps: int) -> dict[str, optax.Schedule]:
    """The optimizer's learning rates, by argument."""
    rates = {"learning_rate": learning_rate(config, steps)}
    if config.name == MUON:
        adam = None if config.muon is None else config.muon.adam_learning_rate
        peak = config.learning_rate if adam is None else adam
        rates["adam_learning_rate"] = learning_rate(replace(config, learning_rate=peak), steps)
    return rates


def _muon(config: OptimizerConfig, steps: int, make_model: MakeModel) -> optax.GradientTransformation:
    """Muon for the matrices of a model."""
    settings = {
        name: value for name, value in vars(config.muon or MuonSettings()).items() if name != "adam_learning_rate"
    }
    with prefixed("optimizer."):
        return muon(make_model, **_rates(config, steps), config=MuonConfig(**settings), **config.options)


def _pruning(tx: Any, name: str, settings: PruneSettings) -> Any:
    """The optimizer, which also prunes."""
    if name == ONE_BIT:
        raise ConfigError(f"optimizer: {ONE_BIT} does not support prune. Remedy: another optimizer.")
    with prefixed("optimizer."):
        return prune(tx, PruneConfig(**vars(settings)))


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate at each of ``steps`` steps: linear growth from 0, then the configured decay."""
    steps = config.decay_steps or steps
    warmup = min(config.warmup, max(steps - 1, 0))
    first, peak, last = 0.0 if warmup else config.learning_rate, config.learning_rate, max(steps, warmup + 1)
    final = peak * config.final_lr_ratio
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, last, final)
    growth = optax.linear_schedule(first, peak, warmup)
    decay = optax.linear_schedule(peak, peak if config.schedule == "constant" else final, last - warmup)
    return optax.join_schedules([growth, decay], [warmup])


def _one_update(tx: optax.GradientTransformation, params: Any) -> Any:
    extra = {"value": 0.0, "grad": params, "value_fn": lambda params: jnp.sum(params["w"])}  # as a step passes them
    return optax.with_extra_args_support(tx).update(params, tx.init(params), params, **extra)


def _parameters(f: Any) -> list[str]:
    return list(inspect.signature(f).parameters) if inspect.isfunction(f) else []
