"""The optimizer of a run, from its configuration."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpar as jp
from jaxpar.app.config import DecaySettings, MuonSettings, OptimizerConfig, PruneSettings
from jaxpar.app.optimizer_options import MASKS, checked_options, parameters_of
from jaxpar.compression import PruneConfig, prune
from jaxpar.errors import ConfigError, JaxparError, did_you_mean, prefixed
from jaxpar.training.decay import DecayMask, decay_mask
from jaxpar.training.model import MakeModel, build_shapes, show
from jaxpar.training.muon import MuonConfig, muon
from jaxpar.training.one_bit_adam import NAME as ONE_BIT

MUON = "muon"


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
    known = sorted([*optax_optimizers(), MUON, ONE_BIT])
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
    options = checked_options(config.name, make, config.options)
    if config.decay is not None:
        options |= _decay(config, config.decay, make, make_model)
    if config.name == ONE_BIT and "warmup" not in config.options:
        raise ConfigError(
            f"optimizer: {ONE_BIT} requires options.warmup, the number of steps of ordinary Adam at the start. Remedy: "
            f"options: {{warmup: {max(steps // 5, 1)}}}, a fifth of train.steps."
        )
    try:
        tx = make(**_rates(config, steps, make), **options)
        if config.name != ONE_BIT:  # it requires a layout
            jax.eval_shape(functools.partial(_one_update, tx), _example(config, make_model))
    except JaxparError:
        raise
    except Exception as error:  # optax checks no types, so a wrong option fails anywhere
        raise ConfigError(
            f"optimizer: {config.name} fails with the options {config.options}: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}. Remedy: correct or leave out the options, or use another optimizer."
        ) from error
    if config.name == MUON:
        tx = _muon(config, options, steps, make_model)
    return tx if config.prune is None else _pruning(tx, config.name, config.prune)


def optax_optimizers() -> dict[str, Any]:
    """Returns the functions of optax that make an optimizer with a learning rate, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `optax.__all__` includes deprecated names
        named = {name: getattr(optax, name) for name in optax.__all__}
    parts = lambda name: name.startswith("scale_by_")  # their updates have no sign, so they would climb
    return {name: make for name, make in named.items() if "learning_rate" in parameters_of(make) and not parts(name)}


def _decay(config: OptimizerConfig, decay: DecaySettings, make: Any, make_model: MakeModel) -> dict[str, DecayMask]:
    """Returns the argument that says which parameters decay."""
    argument = next((name for name in MASKS if name in parameters_of(make)), None)
    if argument is None:
        names = [name for name, other in optax_optimizers().items() if {*MASKS} & {*parameters_of(other)}]
        raise ConfigError(
            f"optimizer: {config.name} does not support decay, because it has no weight decay of single parameters. "
            f"Remedy: leave decay out, or one of {', '.join([*names, MUON])}."
        )
    name, rate = _decay_rate(config)
    if not rate:
        raise ConfigError(
            f"optimizer.decay says which parameters decay, but {name} of {config.name} is {rate}, so none does. "
            f"Remedy: options: {{{name}: 0.1}}, or leave decay out."
        )
    if config.options.get("adam_weight_decay"):
        raise ConfigError(
            "optimizer.decay is about the matrices that muon updates, but options.adam_weight_decay shrinks all other "
            "parameters. Remedy: leave adam_weight_decay out."
        )
    with prefixed("optimizer."):
        return {argument: decay_mask(make_model, decay.exclude)}


def _decay_rate(config: OptimizerConfig) -> tuple[str, float | None]:
    """Returns the option of an optimizer that is its weight decay, and its value; ``None`` without weight decay."""
    known = parameters_of(_constructor(config.name))
    name = next((name for name in ("weight_decay", "weight_decay_rate") if name in known), "weight_decay")
    rate: Any = config.options.get(name, known[name].default if name in known else None)
    return name, rate


def decay_lines(config: OptimizerConfig, make_model: MakeModel) -> list[str]:
    """Returns lines that say which parameters of a model decay; none without weight decay.

    Args:
      config: of the optimizer.
      make_model: as for :func:`make_optimizer`.
    """
    _, rate = _decay_rate(config)
    if not rate:
        return []
    if config.decay is None:
        scope = "the matrices that muon updates decay" if config.name == MUON else "all parameters decay"
        return [f"weight decay {rate:g}: {scope}. optimizer.decay: {{exclude: [norm, bias, embed]}} leaves some out."]
    rows = [(show(path), word) for path, word in decay_mask(make_model, config.decay.exclude).excluded]
    count = sum(word is None for _, word in rows)
    lines = [f"weight decay {rate:g}: {count} of {len(rows)} parameters decay"]
    return [*lines, *(f"  {path}: {'decays' if word is None else f'no decay ({word})'}" for path, word in rows)]


def _constructor(name: str) -> Any:
    """The function that makes an optimizer of this name, which is known."""
    if name == MUON:
        return optax.contrib.muon
    return jp.one_bit_adam if name == ONE_BIT else getattr(optax, name)


def _rates(config: OptimizerConfig, steps: int, make: Any) -> dict[str, Any]:
    """The optimizer's learning rates, by argument."""
    if config.name in (*optax_optimizers(),) and "Callable" not in str(parameters_of(make)["learning_rate"].annotation):
        if config.schedule != "constant" or config.warmup:
            raise ConfigError(
                f"optimizer: {config.name} takes no schedule of its learning rate, but schedule is {config.schedule} "
                f"and warmup is {config.warmup}. Remedy: schedule: constant, warmup: 0."
            )
        return {"learning_rate": config.learning_rate}
    rates = {"learning_rate": learning_rate(config, steps)}
    if config.name == MUON:
        adam = None if config.muon is None else config.muon.adam_learning_rate
        peak = config.learning_rate if adam is None else adam
        rates["adam_learning_rate"] = learning_rate(replace(config, learning_rate=peak), steps)
    return rates


def _muon(
    config: OptimizerConfig, options: dict[str, Any], steps: int, make_model: MakeModel
) -> optax.GradientTransformation:
    """Muon for the matrices of a model."""
    settings = {
        name: value for name, value in vars(config.muon or MuonSettings()).items() if name != "adam_learning_rate"
    }
    with prefixed("optimizer."):
        return muon(make_model, **_rates(config, steps, muon), config=MuonConfig(**settings), **options)


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


def _example(config: OptimizerConfig, make_model: MakeModel) -> Any:
    """The parameters for which an optimizer is tried: those of the model, if its mask has their paths."""
    return {"w": jnp.zeros((2, 2))} if config.decay is None else build_shapes(make_model).params


def _one_update(tx: optax.GradientTransformation, params: Any) -> Any:
    extra = {"value": 0.0, "grad": params, "value_fn": optax.tree.sum}  # as a step passes them
    return optax.with_extra_args_support(tx).update(params, tx.init(params), params, **extra)
