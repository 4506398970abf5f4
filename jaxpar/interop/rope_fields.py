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
_ZERO_IS_NONE = ("beta_slow", "beta_fast", "mscale", "mscale_all_dim")
"""Fields of ``yarn`` that transformers takes for absent if they are 0."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(fields: Fields, default_theta: float) -> Fields:
    """Returns ``rope_theta`` and ``rope_scaling`` of our configuration.

    As in transformers, a ``rope_scaling`` replaces all of ``rope_parameters``.

    Raises:
      ConfigError: the scaling is malformed, or not implemented; or ``rope_parameters`` has another ``rope_theta``,
        which would be replaced too.
    """
    scaling, parameters = (_mapping(fields, key) for key in ("rope_scaling", "rope_parameters"))
    rope = scaling or parameters
    theta = number({"rope_theta": default_theta, **fields, **rope}, "rope_theta")
    replaced = parameters.get("rope_theta")
    if replaced not in (None, theta):
        raise ConfigError(
            f"{CONFIG}: rope_parameters has rope_theta {replaced!r:.100}, but transformers replaces it by "
            f"rope_scaling, and rope_theta is then {theta:g}. Remedy: rope_theta in rope_scaling too, or one of both "
            "objects."
        )
    return _rope(rope, theta, fields)


def read_two_ropes(fields: Fields, defaults: tuple[float, float]) -> tuple[Fields, Any]:
    """Returns the same of Gemma 3, and the base of its layers with a sliding window.

    As in transformers, ``rope_scaling`` is for the layers without one, and added to what ``rope_parameters`` has.

    Args:
      fields: of ``config.json``.
      defaults: the bases of layers without and with a sliding window.

    Raises:
      ConfigError: a scaling is malformed, or not implemented; layers with a sliding window have none.
    """
    parts = _mapping(fields, "rope_parameters")
    if unknown := sorted(map(str, set(parts) - {_FULL, _SLIDING})):
        raise ConfigError(
            f"{CONFIG}: rope_parameters must have {_FULL} and {_SLIDING}, got {', '.join(unknown):.100} too."
        )
    full, local = (_mapping(parts, key) for key in (_FULL, _SLIDING))
    full = {**({} if parts else {"rope_type": "default"}), **full, **_mapping(fields, "rope_scaling")}
    if full.get("truncate") is not None and full["truncate"] is not True:
        raise ConfigError(
            f"{CONFIG}: truncate of {_FULL} must be true, which is what transformers computes, got "
            f"{full['truncate']!r:.100}. Remedy: leave it out."
        )
    theta, local_theta = (
        number({"rope_theta": default, **rope}, "rope_theta")
        for rope, default in (
            (full, fields.get("rope_theta", defaults[0])),
            (local, fields.get(LOCAL, defaults[1])),
        )
    )
    if _rope(local, local_theta, fields)["rope_scaling"] is not None:
        raise ConfigError(
            f"{CONFIG}: rope_parameters.{_SLIDING} must be of rope_type 'default', got "
            f"{local.get('rope_type')!r:.100}. Remedy: none; this scaling is not implemented."
        )
    return _rope(full, theta, fields), local_theta


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


def _mapping(fields: Mapping[str, Any], key: str) -> Fields:
    """Returns an object among fields; an absent one, or null, is empty."""
    value = fields.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{CONFIG}: {key} must be an object, got {value!r:.100}.")
    return dict(value or {})


def _rope(rope: Fields, theta: float, fields: Fields) -> Fields:
    """Returns our fields of a base and a scaling, with what of ``config.json`` it may leave out."""
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
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else _scaling(rope, kind, fields)}


def _scaling(rope: Fields, kind: str, fields: Fields) -> Fields:
    known = ROPE_KINDS[kind]
    values = {key: value for key, value in rope.items() if key in known and value is not None}
    if ORIGINAL_SEQ in known:
        values.setdefault(ORIGINAL_SEQ, fields.get("max_position_embeddings"))
    if kind == "yarn":
        values = {**_TURNS, **{key: value for key, value in values.items() if value != 0 or key not in _ZERO_IS_NONE}}
        if "factor" not in values:
            values["factor"] = number(fields, "max_position_embeddings") / (number(values, ORIGINAL_SEQ) or 1)
    required = known.keys() - {"attention_factor", "mscale", "mscale_all_dim"}
    sizes = {known[key]: number(values, key) for key in known if key in required or key in values}
    truncate = {"truncate": bool(rope["truncate"])} if kind == "yarn" and "truncate" in rope else {}
    return {"kind": kind, **sizes, **truncate}
