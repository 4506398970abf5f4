"""Fields of a ``config.json``: names that several modules share, and reading a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import ConfigError

type Fields = dict[str, Any]

CONFIG = "config.json"
ORIGINAL_SEQ = "original_max_position_embeddings"
FURTHER = "num_nextn_predict_layers"
"""The number of layers that predict further tokens."""
STRETCHED = {"factor": "factor", ORIGINAL_SEQ: "original_seq"}
_OF_YARN = {name: name for name in ("attention_factor", "mscale", "mscale_all_dim")}
ROPE_KINDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {"low_freq_factor": "slow_turns", "high_freq_factor": "fast_turns", **STRETCHED},
    "yarn": {"beta_slow": "slow_turns", "beta_fast": "fast_turns", **_OF_YARN, **STRETCHED},
}
"""For each ``rope_type``: its fields → fields of :class:`jaxpar.models.llama.rope.RopeScaling`."""


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a field's value is one of some values; a flag is no number.

    >>> is_one_of(0, (0.0, None)), is_one_of(False, (0.0, None))
    (True, False)
    """
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in values)


def number(fields: Mapping[str, Any], key: str) -> Any:
    """Returns a number, or the flag ``norm_topk_prob``.

    Raises:
      ConfigError: the field is missing or of another type.
    """
    value, is_flag = fields.get(key), key == "norm_topk_prob"
    if not isinstance(value, int | float) or isinstance(value, bool) is not is_flag:
        raise ConfigError(f"{CONFIG}: {key} must be {'true or false' if is_flag else 'a number'}, got {value!r:.100}.")
    return value
