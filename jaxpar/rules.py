"""``Rules``: logical dim → mesh axes, per role, as one frozen value; and the one resolver that reads it.

Nothing here imports jax. A table is *closed* (a name it does not hold is an error), *unordered* (no rule shadows
another) and *strict* (a dim degrades only by ``first_of`` or ``indivisible``, both written in the table).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        return f"first_of({', '.join(_show(option) for option in self.options)})"


@dataclass(frozen=True, repr=False)
class Over:
    """Shard whole tensors of a role over an axis; see :func:`over`."""

    axes: Axes
    min_bytes: int

    def __repr__(self) -> str:
        return f"over({_show(self.axes)}, min_bytes={self.min_bytes})"


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
        object.__setattr__(self, "base", _frozen(base))
        object.__setattr__(self, "overlays", _frozen(overlays))
        object.__setattr__(self, "indivisible", tuple(sorted(indivisible)))
        object.__setattr__(self, "unannotated", unannotated)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, Any]]) -> Rules:
        """Rules from (dim, rule) pairs, as Flax writes them; a dim listed twice is an error, not a fall-through."""
        table: dict[str, Any] = {}
        for dim, value in pairs:
            if dim in table:
                two = f"two rules for {dim!r}: {_show(table[dim])} and {_show(value)}"
                raise RulesError(f"{two}. Remedy: keep one, or write a fallback as {dim}=first_of(...).")
            table[dim] = value
        return cls(**table)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Rules:
        """Rules from plain data, as YAML gives it: ``{first_of: [a, null]}`` and ``{over: data, min_bytes: 65536}``."""
        if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
            raise RulesError(f"rules are written as a mapping of names to axes, as {{batch: data}}, not as {table!r}.")
        return cls(**{name: _from_data(value, name) for name, value in table.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back to an equal table."""
        table: dict[str, Any] = {dim: _to_data(value) for dim, value in self.base}
        for role, own in self.overlays:
            table[role] = _to_data(own) if isinstance(own, Over) else {dim: _to_data(value) for dim, value in own}
        if self.indivisible:
            table["indivisible"] = dict.fromkeys(self.indivisible, "replicate")
        if self.unannotated != "error":
            table["unannotated"] = self.unannotated
        return table

    def replace(self, **changes: Any) -> Rules:
        """The same table with some entries changed; a role's dict is changed rule by rule.

        >>> Rules(embed=None, mlp="model").replace(params={"embed": "data"}).to_dict()
        {'embed': None, 'mlp': 'model', 'params': {'embed': 'data'}}
        """
        old = self.to_dict()
        both = {
            k: {**old[k], **v}
            for k, v in changes.items()
            if isinstance(v, Mapping) and "over" not in old.get(k, "over")
        }
        return Rules(**{**{name: _from_data(value, name) for name, value in old.items()}, **changes, **both})

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
            for dim, value in (("over", own.axes),) if isinstance(own, Over) else own:
                for option in value.options if isinstance(value, FirstOf) else (value,):
                    yield from ((f"{role}: {dim}" if role else dim, axis) for axis in option)


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
    sizes: Sequence[int | None] = [None] * len(names) if shape is None else shape
    where = f"{path}{'' if shape is None else f' {list(shape)}'} ({', '.join(map(str, names))})"
    if len(sizes) != len(names):
        hint = (
            " Stacked layers: see jaxpar.nnx.stacked() or, in Linen, nn.PARTITION_NAME."
            if role != "activations"
            else ""
        )
        text = (
            f"{where}: rank {len(sizes)}, but names for rank {len(names)}. Remedy: give each dim a name or None.{hint}"
        )
        return Resolved(tuple(Dim(None, size, why="the names do not match the dims") for size in sizes), (text,))
    table, spread = rules.for_role(role)
    problems: list[str] = []
    used: set[tuple[str, str]] = set()
    dims = [Dim(None, size, why="the dim has no name") for size in sizes]
    claimed: dict[str, str] = {}
    named = [(i, name) for i, name in enumerate(names) if name is not None]
    # Plain rules claim their axes before any first_of chooses, so that a first_of gives way wherever it stands.
    for i, name in sorted(named, key=lambda item: isinstance(table.get(item[1], ("", ()))[1], FirstOf)):
        if name not in table:
            problems.append(f"{where}: {_unknown(name, table)}")
            dims[i] = Dim(name, sizes[i], why="no rule")
            continue
        source, value = table[name]
        used.add((source, name))
        dim = Dim(name, sizes[i], rule=f"{source + ': ' if source else ''}{name} = {_show(value)}")
        dims[i], remedy = _place(dim, name, value, axis_sizes, claimed, name in rules.indivisible)
        problems += [f"{where}: {dims[i].why} (rule {dim.rule}). Remedy: {remedy}."] if remedy else []
        claimed |= dict.fromkeys(dims[i].axes, name)
    note = ""
    if spread is not None and shape is not None:
        used.add((role if dict(rules.overlays).get(role) == spread else "params", "over"))
        note = _spread(dims, spread, axis_sizes, claimed, math.prod(shape) * itemsize)
    return Resolved(tuple(dims), tuple(problems), frozenset(used), note)


def _place(dim: Dim, name: str, rule: Rule, sizes: Sizes, claimed: Mapping[str, str], whole: bool) -> tuple[Dim, str]:
    """One named dim under its rule, and what to do about it where it does not fit (else an empty text)."""
    misfits: list[str] = []
    rivals: list[str] = []
    for option in rule.options if isinstance(rule, FirstOf) else (rule,):
        axes = tuple(axis for axis in option if sizes.get(axis, 1) > 1)
        ways = math.prod(sizes[axis] for axis in axes)
        taken = [axis for axis in axes if axis in claimed]
        if taken:
            rivals.append(claimed[taken[0]])
            misfits.append(f"the axis {taken[0]!r} is claimed by the dims {rivals[-1]!r} and {name!r}")
        elif dim.size is not None and dim.size % ways:
            product = " × ".join(f"{axis}={sizes[axis]}" for axis in axes) + (f" = {ways}" if len(axes) > 1 else "")
            misfits.append(f"the dim {name!r} has size {dim.size}, which is no multiple of {product}")
        elif axes or not option:
            return replace(dim, axes=axes, why="; ".join([*misfits, *([] if option else ["the rule says None"])])), ""
    why = "; ".join(misfits)
    if not misfits:
        return replace(dim, why="the axes of the rule have size 1"), ""
    if whole and not rivals:
        return replace(dim, why=f"{why}: indivisible says replicate"), ""
    if isinstance(rule, FirstOf):
        remedy = "add None as the last option, to leave the dim whole"
    elif name in rivals:
        remedy = "give one of the two another name, with a rule of its own"
    elif rivals:
        remedy = "give one of the two another axis or None, if need be in one role only (activations, params, ...)"
    else:
        remedy = (
            f"change the size, the rule or the mesh, or leave such dims whole: indivisible={{{name!r}: 'replicate'}}"
        )
    return replace(dim, why=why), remedy


def _spread(dims: list[Dim], spread: Over, sizes: Sizes, claimed: Mapping[str, str], nbytes: int) -> str:
    """``over``: the largest free dim that divides takes the axes (a sharded one comes last), else why not."""
    live = [axis for axis in spread.axes if sizes.get(axis, 1) > 1]
    axes = tuple(axis for axis in live if axis not in claimed)
    ways = math.prod(sizes[axis] for axis in axes)
    local = [(dim.size or 0) // math.prod(sizes[axis] for axis in dim.axes) for dim in dims]
    fits = [i for i, size in enumerate(local) if size and size % ways == 0]
    if not axes:
        note = f"the tensor already uses {listing(live)}" if live else "its axes have size 1"
    elif nbytes < spread.min_bytes:
        note = f"the tensor has {nbytes} bytes"
    elif not fits:
        note = f"no dim of a shard is a multiple of {ways}"
    else:
        best = max(fits, key=lambda i: (not dims[i].axes, local[i], -i))
        old = dims[best]
        rule = f"{old.rule} + {spread}" if old.axes else str(spread)
        dims[best] = Dim(old.name, old.size, (*old.axes, *axes), rule)
        return ""
    return f"{spread} does not apply: {note}"


def _unknown(name: str, table: Mapping[str, Any]) -> str:
    if not table:
        return f"the dim is named {name!r}, but the rules table is empty. Remedy: give Rules a rule for {name!r}."
    known = f"unknown logical dim {name!r}.{did_you_mean(name, table)} The rules know {listing(sorted(table))}."
    return f"{known} Remedy: correct the annotation, or add {name!r} to the rules (as None, if not to be sharded)."


def _known(dims: Iterable[str], base: Mapping[str, Any], where: str) -> None:
    for dim in dims:
        if dim not in base:
            hint = f"{did_you_mean(dim, base)} Remedy: correct the name, or add it to the base table."
            raise RulesError(f"{where} names {dim!r}, which the base table does not hold.{hint}")


def _axes(value: Any, where: str) -> Axes:
    axes = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        hint = did_you_mean(where, _RESERVED) if isinstance(value, Mapping | Over) else ""
        kinds = "an axis, a tuple of axes (major to minor) or None"
        raise RulesError(f"{where} = {value!r}, but {kinds} is wanted.{hint}")
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
    return _frozen({dim: _rule(rule, f"{role}: {dim}") for dim, rule in value.items()})


def _frozen(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(table.items(), key=lambda item: item[0]))


def _from_data(value: Any, name: str) -> Any:
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
    return {key: _from_data(item, f"{name}: {key}") for key, item in value.items()}


def _to_data(value: Rule | Over) -> Any:
    if isinstance(value, FirstOf):
        return {"first_of": [_to_data(option) for option in value.options]}
    if isinstance(value, Over):
        return {"over": _to_data(value.axes), "min_bytes": value.min_bytes}
    return None if not value else value[0] if len(value) == 1 else list(value)


def _show(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "None" if not value else str(value[0]) if len(value) == 1 else f"({', '.join(value)})"
    return str(value)
