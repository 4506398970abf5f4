"""Every option of every optimizer that a run can name has a type and a range, and no text is a mask."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.app.config import DecaySettings, OptimizerConfig
from jaxpar.app.optimizer_config import ONE_BIT, decay_lines, make_optimizer, optax_optimizers
from jaxpar.app.optimizer_options import MASKS, RANGES, SET_BY_KEYS, checked_options, parameters_of
from jaxpar.errors import ConfigError

OPTIMIZERS = {**optax_optimizers(), "muon": optax.contrib.muon, ONE_BIT: jp.one_bit_adam}
OPTIONS = [(name, option) for name, make in OPTIMIZERS.items() for option in parameters_of(make)]
WRONG = (-5, 7e9, math.nan, math.inf, -math.inf, "*norm*", [1], {"a": 1})
CONSTANT = {"schedule": "constant", "warmup": 0}
REQUIRED: dict[str, dict[str, Any]] = {
    "noisy_sgd": {"key": 1},
    ONE_BIT: {"warmup": 2},
}


def make_model(key: jax.Array) -> dict[str, Any]:
    del key
    return {
        "w": jp.tag(jnp.ones((2, 3, 4)), "layers", "embed", "mlp"),
        # One shape for both: outside of jit each operation is compiled for each shape.
        "norm": jp.tag(jnp.ones((2, 3)), "layers", "embed"),
        "head": jp.tag(jnp.ones((2, 3)), "embed", "vocab"),
    }


def optimizer(name: str, **keys: Any) -> optax.GradientTransformation:
    options = REQUIRED.get(name, {}) | keys.pop("options", {})
    return make_optimizer(OptimizerConfig(name, **{**CONSTANT, **keys}, options=options), 6, make_model)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_has_a_type_and_a_range(name: str, option: str) -> None:
    assert (option in RANGES) != (option in SET_BY_KEYS), "a new option of optax: give it a type and a range"
    parameter = parameters_of(OPTIMIZERS[name])[option]
    default = parameter.default
    if option in RANGES and default is not inspect.Parameter.empty and option not in ("dtype_momentum", "ns_coeffs"):
        assert checked_options(name, OPTIMIZERS[name], {option: default}) == {option: default}
    takes_large = option in RANGES and "1e+38" in refusal(name, option, -1)
    for wrong in WRONG:
        if option == "min_bytes" and isinstance(wrong, str) or wrong == 7e9 and takes_large:
            continue
        assert refusal(name, option, wrong).startswith(f"optimizer: options: {option} "), wrong


def refusal(name: str, option: str, value: Any) -> str:
    """The error of a value of an option; empty if it is taken."""
    try:
        checked_options(name, OPTIMIZERS[name], {option: value})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_is_listed_can_be_made_and_descends(name: str) -> None:
    if name == "dpsgd":  # deprecated, and a step refuses it, because it takes the gradient of each example
        return
    tx = optimizer(name)
    if name in (ONE_BIT, "lbfgs", "noisy_sgd"):  # of a layout, of a loss, with noise
        return
    params = jax.tree.map(lambda leaf: leaf.value, make_model(jax.random.key(0)), is_leaf=lambda x: hasattr(x, "value"))
    if name != "muon":  # which takes matrices of several names
        params = {"w": params["w"]}  # outside of jit each operation is compiled for each shape
    state = tx.init(params)
    for _ in range(2):  # rprop starts with the second
        updates, state = tx.update(params, state, params)
    assert float(updates["w"].sum()) < 0


@pytest.mark.parametrize("name", [n for n, make in OPTIMIZERS.items() if {*MASKS} & {*parameters_of(make)}])
def test_every_optimizer_with_weight_decay_leaves_out_what_is_excluded(name: str) -> None:
    option = "weight_decay_rate" if name == "adafactor" else "weight_decay"
    params = jax.tree.map(lambda leaf: leaf.value, make_model(jax.random.key(0)), is_leaf=lambda x: hasattr(x, "value"))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates = {}
    for exclude in (["norm"], ["w"]):
        tx = optimizer(name, options={option: 0.5}, decay=DecaySettings(tuple(exclude)))
        updates[exclude[0]], _ = tx.update(zero, tx.init(params), params)
    moved = {word: {key for key, u in tree.items() if float(jnp.abs(u).max()) > 0} for word, tree in updates.items()}
    others = set() if name == "muon" else {"norm", "head"}  # Adam updates these, without decay
    assert moved == {"norm": {"w", *others} - {"norm"}, "w": others}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"options": {"mask": "*norm*"}},
            "*norm*"
        ),
        (
            {"options": {"b2": 7}},
            "b2"
        ),
        (
            {"name": "sgd", "decay": DecaySettings(("norm",))},
            "optimizer: sgd"
        ),
        (
            {"name": "lamb", "decay": DecaySettings(("norm",))},
            "weight_decay"
        ),
        (
            {"decay": DecaySettings(("bias",))},
            "head"
        ),
        (
            {"name": "rprop", "warmup": 3},
            "optimizer: rprop"
        ),
    ],
)  # fmt: skip
def test_options_without_an_effect_are_errors(keys: dict[str, Any], text: str) -> None:
    with raises(ConfigError, text):
        optimizer(keys.pop("name", "adamw"), **keys)


def test_explain_says_which_parameters_decay() -> None:
    lines = lambda **keys: decay_lines(OptimizerConfig(**keys), make_model)
    assert lines(name="sgd") == []
    assert lines(options={"weight_decay": 0.1}) == [
        "weight decay 0.1: all parameters decay. optimizer.decay: {exclude: [norm, bias, embed]} leaves some out."
    ]
    assert lines(options={"weight_decay": 0.1}, decay=DecaySettings(("norm", "vocab*", "head")[::2])) == [
        "weight decay 0.1: 1 of 3 parameters decay",
        "  head: no decay (head)",
        "  norm: no decay (norm)",
        "  w: decays",
    ]
