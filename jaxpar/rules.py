"""``Rules``: logical dim → mesh axes, per role, as one frozen value; and the one resolver that reads it.

Nothing here imports jax. A table is *closed* (a name it does not hold is an error), *unordered* (no rule shadows
another) and *strict* (a dim degrades only by ``first_of`` or ``indivisible``, both written in the table).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar import texts
from jaxpar.config import merge
from jaxpar.errors import RulesError, did_you_mean, listing

ROLES = ("activations", "params", "gradients", "optimizer")
"""Where a rule applies. ``gradients`` and ``optimizer`` start from ``params``, and every role from the base table."""

_CHAIN = {role: (role,) if role in ("activations", "params") else ("params", role) for role in ROLES}
_RESERVED = (*ROLES, "indivisible", "unannotated")

Axes = tuple[str, ...]
Sizes = Mapping[str, int]


@dataclass(frozen=True, repr=False)
class FirstOf:
    """Alternatives for one dim, tried in order; see :func:`first_of`."""

    options: tuple[Axes, ...]

    def __repr__(self) -> str:
        return f"first_of({', '.join(texts.written(option) for option in self.options)})"


@dataclass(frozen=True, repr=False)
class Over:
    """Shard whole tensors of a role over an axis; see :func:`over`."""

    axes: Axes
    min_bytes: int

    def __repr__(self) -> str:
        return f"over({texts.written(self.axes)}, min_bytes={self.min_bytes})"


Rule = Axes | FirstOf


def first_of(*options: str | Sequence[str] | None) -> FirstOf:
    """The first option with an axis larger than 1 whose axes divide the dim and are free in that tensor.

    ``None`` as the last option leaves the dim whole where no other fits; without it that is an error.

    >>> str(Rules(kv_heads=first_of("model", None)).table["kv_heads"])
    'first_of(model, None)'
    """
    if not options or not all(options[:-1]):
        raise RulesError(f"first_of{options}: one option or more is wanted, and None only as the last one.")
    return FirstOf(tuple(_axes(option, "an option of first_of") for option in options))


def over(axis: str | Sequence[str], min_bytes: int | str = 64 * 1024) -> Over:
    """Shard every tensor of a role over ``axis``, along whichever dim divides; tensors below ``min_bytes`` stay whole.

    ``optimizer=over("data")`` is ZeRO stage 1. A tensor with no dim that divides stays as it is; ``explain`` says so.

    >>> over("data", min_bytes="64KiB").min_bytes
    65536
    """
    found = re.fullmatch(r"(\d+) *(|B|KiB|MiB|GiB)", str(min_bytes))
    if found is None or not axis:
        raise RulesError(f"over({axis!r}, {min_bytes!r}): an axis and a size are wanted, as over('data', '64KiB').")
    unit = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(found[2], 1)
    return Over(_axes(axis, "the axis of over"), int(found[1]) * unit)


@dataclass(frozen=True, init=False)
class Rules:
    """One table of partition rules.

    Keyword arguments are logical dims, each with an axis, a tuple of axes (major to minor), ``None`` (deliberately not
    sharded) or ``first_of(...)``. A role (``activations``, ``params``, ``gradients``, ``optimizer``) overlays the base
    table with a dict of the same, or with ``over(axis)``. ``indivisible`` lists the dims that may stay whole when their
    size does not divide. ``unannotated="replicate"`` allows parameters that carry no logical dims.

    Raises:
      RulesError: a value that is no rule, an axis twice in one rule, an overlay of a dim that the base table lacks.

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
            raise RulesError(f"unannotated={unannotated!r}: it is 'error' (the default) or 'replicate'.")
        if not isinstance(indivisible, Mapping) or any(how != "replicate" for how in indivisible.values()):
            raise RulesError(f"indivisible={indivisible!r}: it is written as {{'vocab': 'replicate'}}.")
        _known(indivisible, base, "indivisible")
        overlays = {role: _overlay(role, value, base) for role, value in roles.items()}
        object.__setattr__(self, "base", tuple(sorted(base.items())))
        object.__setattr__(self, "overlays", tuple(sorted(overlays.items())))
        object.__setattr__(self, "indivisible", tuple(sorted(indivisible)))
        object.__setattr__(self, "unannotated", unannotated)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, Any]]) -> Rules:
        """Rules from (dim, rule) pairs, as Flax writes them; a dim listed twice is an error, not a fall-through."""
        table: dict[str, Any] = {}
        for dim, value in pairs:
            if dim in table:
                raise RulesError(texts.two_rules(dim, table[dim], value))
            table[dim] = value
        return cls(**table)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Rules:
        """Rules from plain data, as YAML gives it: ``{first_of: [a, null]}`` and ``{over: data, min_bytes: 65536}``."""
        from jaxpar import plain

        return cls(**plain.read_table(table))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back to an equal table."""
        from jaxpar import plain

        return plain.write(self._arguments())

    def replace(self, **changes: Any) -> Rules:
        """The same table with some entries changed; a role's dict is changed rule by rule.

        >>> Rules(embed=None, mlp="model").replace(params={"embed": "data"}).to_dict()
        {'embed': None, 'mlp': 'model', 'params': {'embed': 'data'}}
        """
        return Rules(**merge(self._arguments(), changes))

    def _arguments(self) -> dict[str, Any]:
        """What ``Rules`` is called with for an equal table; defaults are left out."""
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
        """For each dim the table its rule comes from (a role, or ``""``) and the rule; and the role's ``over``."""
        if role not in ROLES:
            raise RulesError(f"unknown role {role!r}.{did_you_mean(role, ROLES)} The roles are: {', '.join(ROLES)}.")
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
        """Every (where, axis) pair that the table names."""
        for role, own in (("", self.base), *self.overlays):
            for dim, rule in (("over", own.axes),) if isinstance(own, Over) else own:
                for option in options(rule):
                    yield from ((texts.entry(role, dim), axis) for axis in option)


@dataclass(frozen=True)
class Dim:
    """How one dim of a tensor is laid out: its axes (major to minor), the rule that said so, and why not more."""

    name: str | None
    size: int | None
    axes: Axes = ()
    rule: str = ""
    why: str = ""


@dataclass(frozen=True)
class Resolved:
    """A resolved tensor: one ``Dim`` each, what is wrong, and which (role, dim) rules were used."""

    dims: tuple[Dim, ...]
    problems: tuple[str, ...] = ()
    used: frozenset[tuple[str, str]] = frozenset()
    note: str = ""

    @property
    def axes(self) -> tuple[Axes, ...]:
        return tuple(dim.axes for dim in self.dims)


def resolve(
    rules: Rules,
    axis_sizes: Sizes,
    names: Sequence[str | None],
    shape: Sequence[int] | None = None,
    *,
    role: str = "activations",
    itemsize: int = 4,
    path: str = "tensor",
) -> Resolved:
    """The layout of one tensor, with a reason per dim and a list of problems (texts) instead of an exception.

    Args:
      rules: the table. A mesh axis that ``axis_sizes`` lacks counts as size 1; size-1 axes vanish.
      axis_sizes: mesh axis → size.
      names: one logical dim (or ``None``) per dim of the tensor.
      shape: its sizes; without them divisibility is not checked and ``over`` does not apply.
      role: which overlay applies.
      itemsize: bytes an element, for ``over``'s ``min_bytes``.
      path: the tensor's name in problem texts.
    """
    where = texts.tensor(path, names, shape)
    sizes: Sequence[int | None] = [None] * len(names) if shape is None else shape
    if len(sizes) != len(names):
        text = texts.wrong_rank(len(sizes), len(names), stackable=role != "activations")
        dims = [Dim(None, size, why="the names do not match the dims") for size in sizes]
        return Resolved(tuple(dims), (f"{where}: {text}",))
    table, spread = rules.for_role(role)
    live = {axis: size for axis, size in axis_sizes.items() if size > 1}
    dims = [Dim(None, size, why="the dim has no name") for size in sizes]
    problems: list[str] = []
    claimed: dict[str, str] = {}
    named = [(i, name) for i, name in enumerate(names) if name is not None]
    choosing = {name for name, (_, rule) in table.items() if isinstance(rule, FirstOf)}
    # Plain rules claim their axes before any first_of chooses, so that a first_of gives way wherever it stands.
    for i, name in sorted(named, key=lambda item: item[1] in choosing):
        if name not in table:
            problems.append(f"{where}: {texts.unknown_dim(name, table)}")
            dims[i] = Dim(name, sizes[i], why="no rule")
            continue
        source, rule = table[name]
        shown = f"{texts.entry(source, name)} = {texts.written(rule)}"
        axes, why, remedy = _place(name, sizes[i], rule, live, claimed, name in rules.indivisible)
        if remedy:
            problems.append(f"{where}: {why} (rule {shown}). Remedy: {remedy}.")
        dims[i] = Dim(name, sizes[i], axes, shown, why)
        claimed |= dict.fromkeys(axes, name)
    used = {(table[name][0], name) for _, name in named if name in table}
    note = ""
    if spread is not None and shape is not None:
        used.add((role if dict(rules.overlays).get(role) is spread else "params", "over"))
        note = _spread(dims, spread, live, claimed, math.prod(shape) * itemsize)
    return Resolved(tuple(dims), tuple(problems), frozenset(used), note)


def _place(
    name: str, size: int | None, rule: Rule, live: Sizes, claimed: Mapping[str, str], may_stay_whole: bool
) -> tuple[Axes, str, str]:
    """The axes of one named dim under its rule, why not more, and what to do where that is a problem (else "")."""
    misfits: list[str] = []
    rivals: list[str] = []
    for option in options(rule):
        axes = tuple(axis for axis in option if axis in live)
        taken = next((axis for axis in axes if axis in claimed), None)
        if taken is not None:
            rivals.append(claimed[taken])
            misfits.append(texts.claimed_axis(taken, claimed[taken], name))
        elif size is not None and size % _ways(axes, live):
            misfits.append(texts.no_multiple(name, size, {axis: live[axis] for axis in axes}))
        elif axes:
            return axes, "; ".join(misfits), ""
        elif not option:
            return (), "; ".join([*misfits, "the rule says None"]), ""
    why = "; ".join(misfits)
    if not misfits:
        return (), "the axes of the rule have size 1", ""
    if may_stay_whole and not rivals:
        return (), f"{why}: indivisible says replicate", ""
    return (), why, texts.remedy(name, rivals, chooses=isinstance(rule, FirstOf))


def _spread(dims: list[Dim], spread: Over, live: Sizes, claimed: Mapping[str, str], nbytes: int) -> str:
    """``over``: the largest free dim that divides takes the axes (a sharded one comes last), else why not.

    The last dim stands back where another one is left 8 or more to a device: a TPU keeps tiles of 8 rows by 128 columns.
    """
    asked = [axis for axis in spread.axes if axis in live]
    axes = tuple(axis for axis in asked if axis not in claimed)
    shard = [(dim.size or 0) // _ways(dim.axes, live) for dim in dims]
    fits = [i for i, size in enumerate(shard) if size and size % _ways(axes, live) == 0]
    if not axes:
        note = f"the tensor already uses {listing(asked)}" if asked else "its axes have size 1"
    elif nbytes < spread.min_bytes:
        note = f"the tensor has {nbytes} bytes"
    elif not fits:
        note = f"no dim of a shard is a multiple of {_ways(axes, live)}"
    else:
        rows = {i for i in fits if i < len(dims) - 1 and shard[i] >= 8 * _ways(axes, live)}
        best = max(fits, key=lambda i: (not dims[i].axes, i in rows, shard[i], -i))
        old = dims[best]
        rule = f"{old.rule} + {spread}" if old.axes else str(spread)
        dims[best] = Dim(old.name, old.size, (*old.axes, *axes), rule)
        return ""
    return f"{spread} does not apply: {note}"


def options(rule: Rule) -> tuple[Axes, ...]:
    """What a rule offers, in the order in which it is tried."""
    return rule.options if isinstance(rule, FirstOf) else (rule,)


def _ways(axes: Axes, sizes: Sizes) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _known(dims: Iterable[str], base: Mapping[str, Any], where: str) -> None:
    for dim in dims:
        if dim not in base:
            raise RulesError(texts.not_in_base(where, dim, base))


def _axes(value: Any, where: str) -> Axes:
    axes = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise RulesError(texts.not_axes(where, value, _RESERVED if isinstance(value, Mapping | Over) else ()))
    if len(set(axes)) < len(axes):
        raise RulesError(f"{where} = {value!r} names an axis twice. Remedy: name each axis once.")
    return tuple(axes)


def _rule(value: Any, where: str) -> Rule:
    return value if isinstance(value, FirstOf) else _axes(value, where)


def _overlay(role: str, value: Any, base: Mapping[str, Any]) -> tuple[tuple[str, Rule], ...] | Over:
    if isinstance(value, Over):
        return value
    if not isinstance(value, Mapping):
        raise RulesError(f"{role} = {value!r}: a role takes a mapping of dims to rules, or over(axis).")
    _known(value, base, role)
    return tuple(sorted((dim, _rule(rule, f"{role}: {dim}")) for dim, rule in value.items()))
