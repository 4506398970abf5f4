"""The optimizer of a run, from its configuration."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.app.config import OptimizerConfig, PruneSettings
from jaxpar.compression import PruneConfig, prune
from jaxpar.errors import ConfigError, JaxparError, did_you_mean, prefixed
from jaxpar.training.one_bit_adam import NAME as ONE_BIT


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns the named optax optimizer, or ``one_bit_adam``, with its schedule over ``steps``.

    Raises:
      ConfigError: there is no such optimizer, it lacks one of ``options``, fails with them, or ``one_bit_adam`` lacks
        ``warmup``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `optax.__all__` includes deprecated names
        named = [name for name in optax.__all__ if "learning_rate" in _parameters(getattr(optax, name))]
    known = sorted([*named, ONE_BIT])
    if config.name not in known:
        raise ConfigError(
            f"optimizer: unknown name {config.name!r}.{did_you_mean(config.name, known)} Supported optimizers (any "
            f"optax optimizer with a learning rate): {', '.join(known)}."
        )
    make: Any = jp.one_bit_adam if config.name == ONE_BIT else getattr(optax, config.name)
    options = [name for name in _parameters(make) if name != "learning_rate"]
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
        tx = make(learning_rate=learning_rate(config, steps), **config.options)
        if config.name != ONE_BIT:  # it requires a layout
            jax.eval_shape(functools.partial(_one_update, tx), {"w": jnp.zeros((2, 2))})
    except JaxparError:
        raise
    except Exception as error:  # optax checks no types, so a wrong option fails anywhere
        raise ConfigError(
            f"optimizer: {config.name} fails with the options {config.options}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. Remedy: correct or leave out the options, or use another optimizer."
        ) from error
    return tx if config.prune is None else _pruning(tx, config.name, config.prune)


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
