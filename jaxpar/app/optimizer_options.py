"""The types and ranges of every option of every optimizer, in one table.

optax checks neither: a text is a truthy mask, and ``b2: 7`` gives numbers that are not finite some steps later.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxpar.app.config_ranges import Count, Natural, NonNegative, Positive
from jaxpar.errors import ConfigError, did_you_mean
from jaxpar.utils.checks import INT32, Range
from jaxpar.utils.yaml_config import convert

SET_BY_KEYS: Mapping[str, str] = {
    "learning_rate": "optimizer.learning_rate",
    "adam_learning_rate": "optimizer.muon.adam_learning_rate",
    "muon_weight_dimension_numbers": "optimizer.muon.inputs",
    "mask": "optimizer.decay: {exclude: [norm, bias, embed]}",
    "weight_decay_mask": "optimizer.decay: {exclude: [norm, bias, embed]}",
    "linesearch": "linesearch: null, which takes steps of the learning rate, or leave it out",
}
"""Arguments that are functions or trees in Python, and the keys of a run that set them."""
MASKS = ("mask", "weight_decay_mask")
"""Arguments that say which parameters decay."""

_Share = Annotated[float, Range(0, 1.0, below=True)]
_Ratio = Annotated[float, Range(0, 1.0, above=True)]
_AtLeastOne = Annotated[float, Range(1, 1e38)]
_Dtype = Literal["float32", "bfloat16", "float16", "float64"] | None

RANGES: Mapping[str, Any] = {
    **dict.fromkeys(("b1", "b2", "b3", "beta", "rho", "decay", "adam_b1", "adam_b2"), _Share),
    "momentum": _Share | None,
    **dict.fromkeys(("decay_rate", "eta_minus"), _Ratio),
    "eta_plus": _AtLeastOne,
    **dict.fromkeys(("eps", "eps_root", "adam_eps_root", "min_norm"), NonNegative),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), NonNegative),
    "weight_decay_rate": NonNegative | None,
    **dict.fromkeys(("initial_accumulator_value", "initial_scale", "noise_multiplier"), NonNegative),
    **dict.fromkeys(("eta", "gamma", "threshold"), NonNegative),
    **dict.fromkeys(("l2_norm_clip", "trust_coefficient", "min_step_size", "max_step_size"), Positive),
    **dict.fromkeys(("clipping_threshold", "consistent_rms"), Positive | None),
    **dict.fromkeys(("min_dim_size_to_factor", "memory_size", "block"), Count),
    **dict.fromkeys(("decay_offset", "warmup"), Natural),
    "ns_steps": Annotated[int, Range(1, 100)],
    "ns_coeffs": Literal["standard", "dion"],
    "seed": Annotated[int, Range(0, INT32)] | None,
    "key": Annotated[int, Range(0, INT32)] | None,
    "preconditioning": Literal["frobenius", "spectral", "aol", "schatten"],
    **dict.fromkeys(("mu_dtype", "dtype_momentum", "accumulator_dtype"), _Dtype),
    **dict.fromkeys(("nesterov", "adaptive", "factored", "multiply_by_parameter_scale", "centered"), bool),
    **dict.fromkeys(("bias_correction", "bias_correction_mu", "bias_correction_nu", "eps_in_sqrt"), bool),
    **dict.fromkeys(("scale_init_precond", "trust_ratio_mask"), bool),
    "min_bytes": Annotated[int, Range(0, 2**62)] | str,
}
"""The type of each option, as a field of a configuration has it."""


def parameters_of(make: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the arguments of the function that makes an optimizer, by name."""
    return inspect.signature(make).parameters if inspect.isfunction(make) else {}


def checked_options(name: str, make: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an optimizer, with each in its type.

    Args:
      name: of the optimizer.
      make: the function that makes it.
      options: ``optimizer.options`` of a run.

    Raises:
      ConfigError: there is no such option, it has another type or is out of range, or another key sets it.
    """
    known = parameters_of(make)
    settable = [option for option in known if option not in SET_BY_KEYS]
    for option in options:
        is_default = options[option] is None and option in (*MASKS, "linesearch")
        if option in known and option in SET_BY_KEYS and not is_default:
            raise ConfigError(
                f"optimizer: options: {option} of {name} is a function or a tree in Python, which no YAML value is, "
                f"got {options[option]!r:.80}. Remedy: {SET_BY_KEYS[option]}."
            )
        if option not in known:
            raise ConfigError(
                f"optimizer: {name} has no option {option!r}.{did_you_mean(option, settable)} Options: "
                f"{', '.join(settable)}."
            )
    return {option: _value(option, known[option], value) for option, value in options.items()}


def _value(option: str, parameter: inspect.Parameter, value: Any) -> Any:
    if value is None and option in SET_BY_KEYS:
        return None
    if option in RANGES:
        return convert(RANGES[option], value, f"optimizer: options: {option}")
    # An option of a newer optax: a number or a bool, as its default is.
    kind = bool if isinstance(parameter.default, bool) else float
    return value if value is None is parameter.default else convert(kind, value, f"optimizer: options: {option}")
