"""The plain-data form of rules, which YAML holds: ``{first_of: [a, null]}``, ``{over: data, min_bytes: 65536}``, lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpar.errors import RulesError
from jaxpar.rules import ROLES, FirstOf, Over, first_of, over


def read_table(table: Any) -> dict[str, Any]:
    """The arguments of ``Rules`` that a plain mapping stands for.

    Raises:
      RulesError: no mapping of names, or a ``first_of`` or ``over`` in another form.
    """
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise RulesError(f"rules are written as a mapping of names to axes, as {{batch: data}}, not as {table!r}.")
    return {name: _read(value, name) for name, value in table.items()}


def _read(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "first_of" in value:
        if len(value) > 1 or not isinstance(value["first_of"], list):
            raise RulesError(f"{name} = {value!r}: it is written as {{first_of: [axis, ..., null]}}.")
        return first_of(*value["first_of"])
    if name in ROLES and "over" in value:
        if set(value) - {"over", "min_bytes"}:
            raise RulesError(f"{name} = {value!r}: it is written as {{over: axis, min_bytes: 64KiB}}.")
        return over(value["over"], value.get("min_bytes", 64 * 1024))
    return {key: _read(item, f"{name}: {key}") for key, item in value.items()}


def write(value: Any) -> Any:
    """The plain data of an argument of ``Rules``, or of a mapping of them."""
    if isinstance(value, Mapping):
        return {name: write(item) for name, item in value.items()}
    if isinstance(value, FirstOf):
        return {"first_of": [write(option) for option in value.options]}
    if isinstance(value, Over):
        return {"over": write(value.axes), "min_bytes": value.min_bytes}
    if isinstance(value, tuple):
        return None if not value else value[0] if len(value) == 1 else list(value)
    return value
