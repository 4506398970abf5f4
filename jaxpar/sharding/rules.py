"""``Rules``: a frozen table from logical dims to mesh axes, per role, and its plain form for YAML.

A table is *closed* (a dim that it does not list is an error), *unordered* (no rule shadows another) and *strict* (a dim
is left unsharded only by ``None``, ``first_of`` or ``indivisible``, which the table shows). This module does not import
jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import RulesError, did_you_mean, unknown
from jaxpar.sharding import messages
from jaxpar.utils.yaml_config import merge

ROLES = ("activations", "params", "gradients", "optimizer")
"""Roles of a tensor. ``gradients`` and ``optimizer`` inherit from ``params``, and every role from the base table."""

_CHAIN = {role: (role,) if role in ("activations", "params") else ("params", role) for role in ROLES}

Axes = tuple[str, ...]
Sizes = Mapping[str, int]


@dataclass(frozen=True, repr=False)
class FirstOf:
    """Alternative axes for one dim, tried in order; see :func:`first_of`."""

    options: tuple[Axes, ...]

    def __repr__(self) -> str:
        return f"first_of({', '.join(messages.written(option) for option in self.options)})"


@dataclass(frozen=True, repr=False)
class Over:
    """Axes that shard every tensor of a role; see :func:`over`."""

    axes: Axes
    min_bytes: int

    def __repr__(self) -> str:
        return f"over({messages.written(self.axes)}, min_bytes={self.min_bytes})"


Rule = Axes | FirstOf


def first_of(*options: str | Sequence[str] | None) -> FirstOf:
    """Returns a rule that takes the first option that fits.

    An option fits if its axes divide the dim and no other dim of the tensor claims them, and if one of them is larger
    than 1. ``None`` as the last option leaves the dim unsharded where no other fits; without it, that is an error.

    Args:
      *options: each an axis, a tuple of axes (major to minor) or, as the last, ``None``.

    Raises:
      RulesError: no options, ``None`` before the last one, or an option that is not an axis or a tuple of distinct
        axes.

    >>> str(Rules(kv_heads=first_of("model", None)).table["kv_heads"])
    'first_of(model, None)'
    """
    if not options or not all(options[:-1]):
        raise RulesError(f"first_of{options}: at least one option is required, and None may only be the last one.")
    return FirstOf(tuple(_axes(option, "an option of first_of") for option in options))


def over(axis: str | Sequence[str], min_bytes: int | str = 64 * 1024) -> Over:
    """Returns an overlay that shards every tensor of a role over ``axis``, along a dim that the axis divides.

    ``optimizer=over("data")`` is ZeRO stage 1. A tensor without such a dim stays as the table says, and ``explain``
    reports it.

    Args:
      axis: a mesh axis, or several.
      min_bytes: smaller tensors stay as the table says; bytes as a number, or a text such as ``"64KiB"``.

    Raises:
      RulesError: no axis, an axis twice, or a size that cannot be read.

    >>> over("data", min_bytes="64KiB").min_bytes
    65536
    """
    found = re.fullmatch(r"(\d+) *(|B|KiB|MiB|GiB)", str(min_bytes))
    if found is None or not axis:
        raise RulesError(f"over({axis!r}, {min_bytes!r}) requires an axis and a size, such as over('data', '64KiB').")
    unit = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(found[2], 1)
    return Over(_axes(axis, "the axis of over"), int(found[1]) * unit)


@dataclass(frozen=True, init=False)
class Rules:
    """Partition rules: which mesh axes shard each logical dim, per role.

    Each keyword argument is a logical dim. Its value is an axis, a tuple of axes (major to minor), ``None``
    (deliberately not sharded) or ``first_of(...)``. A table may have rules for dims that a model lacks, such as those
    of another model: :func:`jaxpar.explain` lists them, and :func:`jaxpar.check` refuses those that name axes.

    Four names are roles: ``activations``, ``params``, ``gradients`` and ``optimizer``. The value of a role overlays the
    base table: a dict of dims to rules, or ``over(axis)``.

    Args:
      indivisible: dims that are replicated if the axes do not divide their size, as ``{"vocab": "replicate"}``.
      unannotated: ``"replicate"`` allows parameters without logical dims; ``"error"``, the default, does not.

    Raises:
      RulesError: a value that is not a rule, an axis twice in one rule, or an overlay for a dim that the base table
        lacks, or another value of ``indivisible`` or ``unannotated``.

    >>> from jaxpar.sharding.resolve import resolve
    >>> rules = Rules(batch="data", embed=None, mlp="model", params={"embed": "data"})
    >>> rules == Rules(params=dict(embed="data"), mlp="model", embed=None, batch="data")
    True
    >>> resolve(rules, {"data": 4, "model": 2}, ("embed", "mlp"), (8, 6), role="params").axes
    (('data',), ('model',))
    """

    base: tuple[tuple[str, Rule], ...]
    overlays: tuple[tuple[str, tuple[tuple[str, Rule], ...] | Over], ...]
    indivisible: tuple[str, ...]
    unannotated: str

    def __init__(self, /, **rules: Any):
        roles = {role: rules.pop(role) for role in ROLES if role in rules}
        indivisible = rules.pop("indivisible", None) or {}
        unannotated = rules.pop("unannotated", "error")
        base = {dim: _rule(value, dim) for dim, value in rules.items()}
        if unannotated not in ("error", "replicate"):
            raise RulesError(f"unannotated must be 'error' (the default) or 'replicate', got {unannotated!r}.")
        if not isinstance(indivisible, Mapping) or any(how != "replicate" for how in indivisible.values()):
            raise RulesError(f"indivisible must be a mapping such as {{'vocab': 'replicate'}}, got {indivisible!r}.")
        _known(indivisible, base, "indivisible")
        overlays = {role: _overlay(role, value, base) for role, value in roles.items()}
        vars(self).update(base=tuple(sorted(base.items())), overlays=tuple(sorted(overlays.items())))
        vars(self).update(indivisible=tuple(sorted(indivisible)), unannotated=unannotated)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Rules:
        """Returns rules from plain data as YAML gives it.

        The two kinds of rule are written as ``{first_of: [a, null]}`` and ``{over: data, min_bytes: 65536}``.

        Raises:
          RulesError: a value of another form.
        """
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
            raise RulesError(f"rules must be a mapping of names to axes such as {{batch: data}}, got {table!r}.")
        return cls(**{name: _read(value, name) for name, value in table.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data from which :meth:`from_dict` builds an equal table."""
        return _plain(self._arguments())

    def replace(self, **changes: Any) -> Rules:
        """Returns the same table with some entries changed; the dict of a role is merged rule by rule.

        Raises:
          RulesError: as :class:`Rules`.

        >>> Rules(embed=None, mlp="model").replace(params={"embed": "data"}).to_dict()
        {'embed': None, 'mlp': 'model', 'params': {'embed': 'data'}}
        """
        return Rules(**merge(self._arguments(), changes))

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments that build an equal table, without defaults."""
        table: dict[str, Any] = dict(self.base)
        table |= {role: own if isinstance(own, Over) else dict(own) for role, own in self.overlays}
        if self.indivisible:
            table["indivisible"] = dict.fromkeys(self.indivisible, "replicate")
        if self.unannotated != "error":
            table["unannotated"] = self.unannotated
        return table

    @property
    def table(self) -> dict[str, Rule]:
        """The base table."""
        return dict(self.base)

    def for_role(self, role: str) -> tuple[dict[str, tuple[str, Rule]], Over | None]:
        """Returns dim → (source, rule) and the ``over`` of a role; the source is a role, or "" for the base table.

        Raises:
          RulesError: an unknown role.
        """
        if role not in ROLES:
            raise RulesError(unknown("role", role, ROLES))
        table: dict[str, tuple[str, Rule]] = {dim: ("", value) for dim, value in self.base}
        spread = None
        for name in _CHAIN[role]:
            overlay = dict(self.overlays).get(name, ())
            if isinstance(overlay, Over):
                spread = overlay
            else:
                table |= {dim: (name, value) for dim, value in overlay}
        return table, spread

    def axes(self) -> Iterator[tuple[str, str]]:
        """Returns an iterator over a (place in the table, axis) pair for every axis that the table names."""
        for role, own in (("", self.base), *self.overlays):
            for dim, rule in (("over", own.axes),) if isinstance(own, Over) else own:
                for option in options(rule):
                    yield from ((messages.entry(role, dim), axis) for axis in option)


def options(rule: Rule) -> tuple[Axes, ...]:
    """Returns the options of a rule, in the order in which they are tried."""
    return rule.options if isinstance(rule, FirstOf) else (rule,)


def _known(dims: Iterable[str], base: Mapping[str, Any], where: str) -> None:
    for dim in dims:
        if dim not in base:
            raise RulesError(
                f"{where} names {dim!r}, which is not in the base table.{did_you_mean(dim, base)} Remedy: correct the "
                f"name, or add it to the base table."
            )


def _axes(value: Any, where: str) -> Axes:
    axes = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        meant = did_you_mean(where, (*ROLES, "indivisible", "unannotated")) if isinstance(value, Mapping | Over) else ""
        raise RulesError(f"{where} must be an axis, a tuple of axes (major to minor) or None, got {value!r}.{meant}")
    if len(set(axes)) < len(axes):
        raise RulesError(f"{where} = {value!r} names an axis twice. Remedy: name each axis once.")
    return tuple(axes)


def _rule(value: Any, where: str) -> Rule:
    return value if isinstance(value, FirstOf) else _axes(value, where)


def _overlay(role: str, value: Any, base: Mapping[str, Any]) -> tuple[tuple[str, Rule], ...] | Over:
    if isinstance(value, Over):
        return value
    if not isinstance(value, Mapping):
        raise RulesError(f"{role} must be a mapping of dims to rules, or over(axis), got {value!r}.")
    _known(value, base, role)
    return tuple(sorted((dim, _rule(rule, f"{role}: {dim}")) for dim, rule in value.items()))


def _read(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "first_of" in value:
        if len(value) > 1 or not isinstance(value["first_of"], list):
            raise RulesError(f"{name} must be written as {{first_of: [axis, ..., null]}}, got {value!r}.")
        return first_of(*value["first_of"])
    if name in ROLES and "over" in value:
        if set(value) - {"over", "min_bytes"}:
            raise RulesError(f"{name} must be written as {{over: axis, min_bytes: 64KiB}}, got {value!r}.")
        return over(value["over"], value.get("min_bytes", 64 * 1024))
    return {key: _read(item, f"{name}: {key}") for key, item in value.items()}


def _plain(value: Any) -> Any:
    """Returns the plain data of an argument of ``Rules``, or of a mapping of them."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, FirstOf):
        return {"first_of": [_plain(option) for option in value.options]}
    if isinstance(value, Over):
        return {"over": _plain(value.axes), "min_bytes": value.min_bytes}
    if isinstance(value, tuple):
        return None if not value else value[0] if len(value) == 1 else list(value)
    return value
