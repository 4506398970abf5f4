"""Rotary positions in ``config.json``: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.interop.fields import CONFIG, ORIGINAL_SEQ, ROPE_KINDS, Fields, number
from jaxpar.models.llama.config import LlamaConfig
from jaxpar.models.llama.rope import RopeScaling

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
LOCAL = "rope_local_base_freq"
"""The base of the layers with a sliding window, in Gemma 3."""
_TURNS = {"beta_slow": 1.0, "beta_fast": 32.0}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(fields: Fields, default_theta: float) -> Fields:
    """Returns ``rope_theta`` and ``rope_scaling`` of our configuration.

    Raises:
      ConfigError: the scaling is malformed, or not implemented.
    """
    given = _mapping(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = number({"rope_theta": default_theta, **fields, **given}, "rope_theta")
    return {"rope_theta": theta, "rope_scaling": _scaling(given, fields)}


def read_two_ropes(fields: Fields, defaults: tuple[float, float]) -> tuple[Fields, Any]:
    """Returns the same of Gemma 3, and the base of its layers with a sliding window.

    Args:
      fields: of ``config.json``.
      defaults: the bases of layers without and with a sliding window.

    Raises:
      ConfigError: a scaling is malformed, or not implemented; layers with a sliding window have none.
    """
    parts = _mapping(fields.get("rope_parameters") or {})
    if unknown := sorted(map(str, set(parts) - {_FULL, _SLIDING})):
        raise ConfigError(
            f"{CONFIG}: rope_parameters must have {_FULL} and {_SLIDING}, got {', '.join(unknown):.100} too."
        )
    old = {key: value for key, value in fields.items() if key not in ROPE_FIELDS or not parts}
    full = read_rope({**old, "rope_parameters": parts.get(_FULL)}, defaults[0])
    own = _mapping(parts.get(_SLIDING) or {"rope_theta": fields.get(LOCAL) or defaults[1]})
    local = read_rope({"rope_parameters": own}, defaults[1])
    if local["rope_scaling"] is not None:
        raise ConfigError(
            f"{CONFIG}: rope_parameters.{_SLIDING} must be of rope_type 'default', got {own.get('rope_type')!r:.100}. "
            "Remedy: none; this scaling is not implemented."
        )
    return full, local["rope_theta"]


def write_rope(config: LlamaConfig) -> Fields:
    """Returns ``rope_theta`` and ``rope_scaling``, which all versions of transformers read."""
    scaling = scaling_fields(config.rope_scaling)
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def scaling_fields(scaling: RopeScaling | None) -> Fields | None:
    """Returns ``rope_scaling`` of ``config.json``; ``None`` for no scaling.

    >>> scaling_fields(RopeScaling("linear", factor=8.0))
    {'rope_type': 'linear', 'factor': 8.0}
    """
    if scaling is None:
        return None
    values = {theirs: getattr(scaling, ours) for theirs, ours in ROPE_KINDS[scaling.kind].items()}
    more = {} if scaling.truncate or scaling.kind != "yarn" else {"truncate": False}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}, **more}


def _mapping(value: Any) -> Fields:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{CONFIG}: rope_scaling must be an object, got {value!r:.100}.")
    return dict(value)


def _scaling(rope: Fields, fields: Fields) -> Fields | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in [*ROPE_KINDS]:
        raise ConfigError(
            f"{CONFIG}: rope_scaling must be of rope_type {', '.join(ROPE_KINDS)}, got rope_type {kind!r:.100}. "
            "Remedy: none; this scaling is not implemented."
        )
    known = ROPE_KINDS[kind]
    neutral = {"partial_rotary_factor": 1.0}
    ignored = ("rope_theta", "rope_type", "type", *(("truncate",) if kind == "yarn" else ()))
    problems = [
        f"{key} is {value!r:.100}"
        for key, value in rope.items()
        if key not in known and key not in ignored and value is not None and value != neutral.get(key)
    ]
    if problems:
        raise ConfigError(
            f"{CONFIG}: these fields of rope_scaling ({kind}) are not implemented: {'; '.join(problems)}. Remedy: "
            "another model."
        )
    if kind == "default":
        return None
    values = {key: value for key, value in rope.items() if key in known and value is not None}
    if kind == "yarn":
        values = {**_TURNS, **{key: value for key, value in values.items() if value != 0}}
        values.setdefault(ORIGINAL_SEQ, fields.get("max_position_embeddings"))
        if "factor" not in values:
            values["factor"] = number(fields, "max_position_embeddings") / (number(values, ORIGINAL_SEQ) or 1)
    required = known.keys() - {"attention_factor", "mscale", "mscale_all_dim"}
    found = {known[key]: number(values, key) for key in known if key in required or key in values}
    truncate = {"truncate": rope["truncate"]} if isinstance(rope.get("truncate"), bool) else {}
    return {"kind": kind, **found, **truncate}
