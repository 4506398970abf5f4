"""Sliding windows in ``config.json``: which layers have one, by ``layer_types`` or by each family's older fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.interop.fields import CONFIG, Fields, number
from jaxpar.models.llama.config import LlamaConfig

type WindowRule = Callable[[Fields, int], list[bool]]
"""``rule(fields, layers)``: for each layer, whether it has the window, if the file has no ``layer_types``."""

PATTERN, USED = "sliding_window_pattern", "use_sliding_window"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 2**14


def all_layers(fields: Fields, layers: int) -> list[bool]:
    """The rule of Mistral and Mixtral."""
    return [True] * layers


def all_if_used(fields: Fields, layers: int) -> list[bool]:
    """The rule of Qwen3-MoE."""
    return [bool(fields.get(USED))] * layers


def after_first(fields: Fields, layers: int) -> list[bool]:
    """The rule of Qwen2 and Qwen3: all but the first ``max_window_layers``."""
    used = bool(fields.get(USED))
    return [used and i >= number(fields, "max_window_layers") for i in range(layers)]


def all_but_every(fields: Fields, layers: int) -> list[bool]:
    """The rule of Gemma 2 and 3: every n-th layer has no window, where n is ``sliding_window_pattern``."""
    period = number(fields, PATTERN)
    if not isinstance(period, int) or period < 1:
        raise ConfigError(f"{CONFIG}: {PATTERN} must be a number of layers >= 1, got {period!r:.100}.")
    return [(i + 1) % period != 0 for i in range(layers)]


def read_windows(fields: Fields, rule: WindowRule | None, *, per_layer: bool) -> Fields:
    """Returns ``sliding_window`` and ``window_pattern`` of our configuration.

    Args:
      fields: of ``config.json``, with the family's defaults.
      rule: of the family; ``None`` for a family without windows.
      per_layer: whether the family reads ``layer_types``. For others it must say what ``rule`` says.

    Raises:
      ConfigError: ``layer_types`` is malformed, or names other layers than the family's rule.
    """
    window, layers = fields.get("sliding_window"), number(fields, "num_hidden_layers")
    if not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
        return {}  # the configuration reports it
    local = [False] * layers if rule is None or window is None else rule(fields, layers)
    if given := _types(fields.get("layer_types"), layers):
        allowed = window is not None and (rule is not after_first or bool(fields.get(USED)))
        given = [x and allowed for x in given] if per_layer else given
        if not per_layer and given != local:
            raise ConfigError(
                f"{CONFIG}: layer_types has {sum(given)} times {_SLIDING}, but {sum(local)} of {layers} layers of a "
                f"{fields.get('model_type')} have a sliding window. Remedy: none; such models cannot be imported."
            )
        local = given
    return {"sliding_window": window, "window_pattern": shortest_pattern(local)} if any(local) else {}


def _types(types: Any, layers: int) -> list[bool]:
    if types is None or types == []:
        return []
    if not isinstance(types, list) or len(types) != layers or any(x not in (_SLIDING, _FULL) for x in types):
        raise ConfigError(
            f"{CONFIG}: layer_types must be a list of {layers} names, each {_SLIDING} or {_FULL}, got {types!r:.100}."
        )
    return [kind == _SLIDING for kind in types]


def shortest_pattern(local: list[bool]) -> list[bool]:
    """Returns the shortest pattern whose repetition starts with ``local``.

    >>> shortest_pattern([True, False, True, False, True])
    [True, False]
    """
    repeats = lambda size: all(x is local[i % size] for i, x in enumerate(local))
    return local[: next(size for size in range(1, len(local) + 1) if repeats(size))]


def write_windows(config: LlamaConfig, rule: WindowRule | None, *, per_layer: bool) -> Fields:
    """Returns the fields of ``config.json`` about windows, in older and newer versions of transformers."""
    if rule is None:
        return {}
    local = config.local_layers
    written: Fields = {"sliding_window": config.sliding_window if any(local) else None}
    if per_layer:
        written["layer_types"] = [_SLIDING if x else _FULL for x in local]
    if rule in (after_first, all_if_used):
        written[USED] = any(local)
        written["max_window_layers"] = next((i for i, x in enumerate(local) if x), len(local))
    return written


def write_pattern(config: LlamaConfig) -> Fields:
    """Returns the older field of Gemma 3 about windows, if it can say which layers have one."""
    pattern = shortest_pattern(list(config.local_layers))
    return {PATTERN: len(pattern)} if pattern == [True] * (len(pattern) - 1) + [False] else {}
