"""Fields of a ``config.json``: names that several modules share, and reading a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import ConfigError

type Fields = dict[str, Any]

CONFIG = "config.json"


def number(fields: Mapping[str, Any], key: str) -> Any:
    """Returns a number, or the flag ``norm_topk_prob``.

    Raises:
      ConfigError: the field is missing or of another type.
    """
    value, is_flag = fields.get(key), key == "norm_topk_prob"
    if not isinstance(value, int | float) or isinstance(value, bool) is not is_flag:
        raise ConfigError(f"{CONFIG}: {key} must be {'true or false' if is_flag else 'a number'}, got {value!r:.100}.")
    return value
