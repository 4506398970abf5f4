"""How MindFormers stretches rotary positions: ``extend_method`` and ``scaling_factor``, or ``rope_scaling``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.interop.configurations.keys import ConfigKeys
from jaxpar.interop.fields import ORIGINAL_SEQ, ROPE_KINDS, STRETCHED

_TARGET = "model.rope_scaling"
_FIELDS = {
    "LINEAR": ROPE_KINDS["linear"],
    "LLAMA3": {**STRETCHED, "original_max_position_embedding": "original_seq", **ROPE_KINDS["llama3"]},
    "YARN": {theirs: ours for theirs, ours in (STRETCHED | ROPE_KINDS["yarn"]).items() if theirs != "attention_factor"},
}
"""The kinds of scaling that are built, and our names of their fields."""
_DEFAULTS: dict[str, dict[str, float]] = {
    "LINEAR": {},
    "LLAMA3": {"factor": 8.0, "original_seq": 8192, "slow_turns": 1.0, "fast_turns": 4.0},
    "YARN": {"slow_turns": 1.0, "fast_turns": 32.0},
}


def read_rope_scaling(keys: ConfigKeys, prefix: str) -> dict[str, Any]:
    """Returns ``rope_scaling`` of our model, or nothing if positions are not stretched.

    Raises:
      ConfigError: a field is missing, is no number, or is out of MindFormers' range.
    """
    method, where = f"{prefix}extend_method", f"{prefix}scaling_factor"
    kind, values, of_hugging_face = keys.get(method, "text", "None").upper(), keys.raw(where), False
    keys.translate(method, _TARGET)
    if keys.has(f"{prefix}rope_scaling"):
        where, of_hugging_face = f"{prefix}rope_scaling", True
        values = keys.get(where, "mapping", {})
        kind = str(values.get("rope_type", values.get("type", "none"))).upper()
    if kind in ("NONE", "DEFAULT") and (values in (None, 1) or isinstance(values, dict)):
        keys.ignore_each((method, where), "off")
        return {}
    if kind not in _FIELDS or not isinstance(values, dict):
        keys.refuse(where if keys.has(where) else method, f"rotary positions scaled by {kind} are not built")
        return {}
    unknown = sorted(set(map(str, values)) - set(_FIELDS[kind]) - {"rope_type", "type", "rope_theta"})
    if unknown:
        keys.refuse(where, f"{', '.join(unknown)} of {kind} {'is' if len(unknown) == 1 else 'are'} not built")
        return {}
    required = [*_FIELDS["YARN"]] if kind == "YARN" and not of_hugging_face else ["factor"] if kind == "LINEAR" else []
    missing = [name for name in required if name not in values]
    if missing:
        raise keys.error(where, f"must have {', '.join(missing)} for the method {kind}")
    keys.translate(where, _TARGET)
    return {"rope_scaling": {"kind": kind.lower(), **_read(keys, prefix, where, kind, values)}}


def _read(keys: ConfigKeys, prefix: str, where: str, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of our scaling."""
    found: dict[str, Any] = dict(_DEFAULTS[kind])
    for theirs, ours in _FIELDS[kind].items():
        if values.get(theirs) is not None:
            count = ours == "original_seq"
            found[ours] = keys.get(f"{where}.{theirs}", "count" if count else "number", None)
            found[ours] = found[ours] if count else float(found[ours])
    if found.get("factor", 1.0) < 1:
        raise keys.error(f"{where}.factor", f"must be at least 1, got {found['factor']:g}")
    if found.get("fast_turns", 1.0) <= found.get("slow_turns", 0.0):
        raise keys.error(where, f"must blend from fewer to more turns, got {found['slow_turns']:g} and "
                         f"{found['fast_turns']:g}")  # fmt: skip
    if kind == "YARN":
        _check_length(keys, prefix, where, found)
    # A scale of 0 is a factor of 1, as if it were not given.
    return {name: value for name, value in found.items() if value or not name.startswith("mscale")}


def _check_length(keys: ConfigKeys, prefix: str, where: str, found: dict[str, Any]) -> None:
    """YaRN stretches positions beyond the original length, which is therefore below the longest one."""
    longest = keys.first([f"{prefix}max_position_embedding", f"{prefix}max_position_embeddings"])
    length = max(keys.get(longest, "count", 0), keys.get(f"{prefix}seq_length", "count", 0))
    if "original_seq" not in found:
        if not length:
            raise keys.error(where, f"must have {ORIGINAL_SEQ} for the method YARN")
        found["original_seq"] = length
    elif length and keys.has(longest) and found["original_seq"] >= length:
        raise keys.error(
            f"{where}.{ORIGINAL_SEQ}", f"must be less than {longest.removeprefix(prefix)}={length}, got "
            f"{found['original_seq']}"
        )  # fmt: skip
    if "factor" not in found:
        raise keys.error(where, "must have factor for the method YARN")
