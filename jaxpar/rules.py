"""``Rules``: logical dim → mesh axes, per role, as one frozen value; and the one resolver that reads it.

Nothing here imports jax. A table is *closed* (a name it does not hold is an error), *unordered* (no rule shadows
another) and *strict* (a dim degrades only by ``first_of`` or ``indivisible``, both written in the table).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import RulesError, did_you_mean, listing

ROLES = ("activations", "params", "gradients", "optimizer")
"""Where a rule applies. ``gradients`` and ``optimizer`` start from ``params``, and every role from the base table."""

_CHAIN = {role: (role,) if role in ("activations", "params") else ("params", role) for role in ROLES}
_RESERVED = (*ROLES, "indivisible", "unannotated")

Axes = tuple[str, ...]


@dataclass(frozen=True)
class FirstOf:
    """Alternatives for one dim, tried in order; see :func:`first_of`."""

    options: tuple[Axes, ...]

    def __str__(self) -> str:
        return f"first_of({', '.join(_show(option) for option in self.options)})"


@dataclass(frozen=True)
class Over:
    """Shard whole tensors of a role over an axis; see :func:`over`."""

    axes: Axes
    min_bytes: int

    def __str__(self) -> str:
        return f"over({_show(self.axes)}, min_bytes={self.min_bytes})"


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
    if isinstance(min_bytes, bool) or found is None:
        raise RulesError(
            f"over({axis!r}, min_bytes={min_bytes!r}): min_bytes is a number of bytes, as 65536 or '64KiB'."
        )
    if not axis:
        raise RulesError("over() needs an axis, as over('data').")
    return Over(
        _axes(axis, "the axis of over"), int(found[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(found[2], 1)
    )


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

    base: tuple[tuple[str, Axes | FirstOf], ...]
    overlays: tuple[tuple[str, tuple[tuple[str, Axes | FirstOf], ...] | Over], ...]
    indivisible: tuple[str, ...]
    unannotated: str

    def __init__(self, /, **rules: Any):
        roles = {role: rules.pop(role) for role in ROLES if role in rules}
        indivisible = rules.pop("indivisible", None) or {}
        unannotated = rules.pop("unannotated", "error")
        base = {dim: _value(value, dim) for dim, value in rules.items()}
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
                raise RulesError(
                    f"two rules for {dim!r}: {_show(table[dim])} and {_show(value)}. Remedy: keep one; where the "
                    f"second was a fallback, write {dim}=first_of(...)."
                )
            table[dim] = value
        return cls(**table)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Rules:
        """Rules from plain data, as YAML gives it: ``{first_of: [a, null]}`` and ``{over: data, min_bytes: 65536}``."""
        if not isinstance(table, Mapping):
            raise RulesError(
                f"rules are written as a mapping of logical dims to axes, as {{batch: data}}, not as {table!r}."
            )
        for name in table:
            if not isinstance(name, str):
                raise RulesError(f"a rule is named {name!r}, but a logical dim is a string.")
        return cls(**{name: _from_data(value, name) for name, value in table.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back to an equal table."""
        table: dict[str, Any] = {dim: _to_data(value) for dim, value in self.base}
        for role, overlay in self.overlays:
            table[role] = (
                _to_data(overlay) if isinstance(overlay, Over) else {dim: _to_data(value) for dim, value in overlay}
            )
        if self.indivisible:
            table["indivisible"] = dict.fromkeys(self.indivisible, "replicate")
        if self.unannotated != "error":
            table["unannotated"] = self.unannotated
        return table

    @property
    def table(self) -> dict[str, Axes | FirstOf]:
        """The base table."""
        return dict(self.base)

    def for_role(self, role: str) -> tuple[dict[str, tuple[str, Axes | FirstOf]], Over | None]:
        """For each dim the table its rule comes from (a role, or ``""``) and the rule; and the role's ``over``."""
        if role not in ROLES:
            raise RulesError(f"unknown role {role!r}.{did_you_mean(role, ROLES)} The roles are: {', '.join(ROLES)}.")
        table: dict[str, tuple[str, Axes | FirstOf]] = {dim: ("", value) for dim, value in self.base}
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
        sources = [("", self.base), *self.overlays]
        for role, entries in sources:
            pairs = (("over", entries),) if isinstance(entries, Over) else entries
            for dim, value in pairs:
                for option in value.options if isinstance(value, FirstOf) else (_plain(value),):
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
    used: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    note: str = ""

    @property
    def axes(self) -> tuple[Axes, ...]:
        return tuple(dim.axes for dim in self.dims)


def resolve(
    rules: Rules,
    axis_sizes: Mapping[str, int],
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
        stacked = "; a dim added by stacking layers is named by jaxpar.nnx.stacked() or, in Linen, by nn.PARTITION_NAME"
        text = (
            f"{where}: the rank is {len(sizes)}, but the names are for rank {len(names)}. Remedy: give each dim a name "
            f"or None{'' if role == 'activations' else stacked}."
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
        dims[i], problem = _place(name, sizes[i], value, source, axis_sizes, claimed, rules.indivisible)
        problems += [f"{where}: {problem}"] if problem else []
        claimed |= dict.fromkeys(dims[i].axes, name)
    note = ""
    if spread is not None and shape is not None:
        used.add((role if dict(rules.overlays).get(role) == spread else "params", "over"))
        dims, note = _spread(dims, spread, axis_sizes, claimed, math.prod(shape) * itemsize)
    return Resolved(tuple(dims), tuple(problems), frozenset(used), note)


def _place(
    name: str,
    size: int | None,
    value: Axes | FirstOf,
    source: str,
    axis_sizes: Mapping[str, int],
    claimed: Mapping[str, str],
    indivisible: Sequence[str],
) -> tuple[Dim, str]:
    """One named dim under its rule: where it goes, and what is wrong with that (an empty text when nothing is)."""
    rule = f"{source + ': ' if source else ''}{name} = {_show(value)}"
    misfits: list[str] = []
    rivals: list[str] = []
    for option in value.options if isinstance(value, FirstOf) else (value,):
        if not option:
            return Dim(name, size, (), rule, "; ".join([*misfits, "the rule says None"])), ""
        axes = tuple(axis for axis in option if axis_sizes.get(axis, 1) > 1)
        ways = math.prod(axis_sizes[axis] for axis in axes)
        taken = [axis for axis in axes if axis in claimed]
        if taken:
            rivals.append(claimed[taken[0]])
            both = f"two dims named {name!r}" if rivals[-1] == name else f"{rivals[-1]!r} and by {name!r}"
            misfits.append(f"the axis {taken[0]!r} is claimed twice, by {both}")
        elif size is not None and size % ways:
            product = " × ".join(f"{axis}={axis_sizes[axis]}" for axis in axes)
            total = f" = {ways}" if len(axes) > 1 else ""
            misfits.append(f"the dim {name!r} has size {size}, which is no multiple of {product}{total}")
        elif axes:
            return Dim(name, size, axes, rule, "; ".join(misfits)), ""
    why = "; ".join(misfits)
    if not misfits:
        return Dim(name, size, (), rule, "the axes of the rule have size 1"), ""
    if name in indivisible and not rivals:
        return Dim(name, size, (), rule, f"{why}: indivisible says replicate"), ""
    if isinstance(value, FirstOf):
        problem = (
            f"no option of the rule {rule} fits: {why}. Remedy: add None as the last option, to leave the dim whole."
        )
    elif name in rivals:
        problem = f"{why} (rule {rule}). Remedy: give one of the two another name, with a rule of its own."
    elif rivals:
        problem = (
            f"{why} (rule {rule}). Remedy: give one of the two another axis, or None; a role (activations, params, "
            f"...) can have a rule of its own."
        )
    else:
        problem = (
            f"{why} (rule {rule}). Remedy: change the size, the rule or the mesh, or let the dim stay whole with "
            f"indivisible={{{name!r}: 'replicate'}} in the rules."
        )
    return Dim(name, size, (), rule, why), problem


def _spread(
    dims: list[Dim], spread: Over, axis_sizes: Mapping[str, int], claimed: Mapping[str, str], nbytes: int
) -> tuple[list[Dim], str]:
    """``over``: the largest free dim that divides takes the axes; a dim already sharded is the last choice."""
    live = [axis for axis in spread.axes if axis_sizes.get(axis, 1) > 1]
    axes = tuple(axis for axis in live if axis not in claimed)
    ways = math.prod(axis_sizes[axis] for axis in axes)
    local = [(dim.size or 0) // math.prod(axis_sizes[axis] for axis in dim.axes) for dim in dims]
    fits = [i for i, size in enumerate(local) if size and size % ways == 0]
    if not live:
        note = "its axes have size 1"
    elif not axes:
        note = f"the tensor already uses {listing(live)}"
    elif nbytes < spread.min_bytes:
        note = f"the tensor has {nbytes} bytes"
    elif not fits:
        note = f"no dim of a shard is a multiple of {ways}"
    else:
        best = max(fits, key=lambda i: (not dims[i].axes, local[i], -i))
        old = dims[best]
        rule = f"{old.rule} + {spread}" if old.axes else str(spread)
        return [*dims[:best], Dim(old.name, old.size, (*old.axes, *axes), rule), *dims[best + 1 :]], ""
    return dims, f"{spread} does not apply: {note}"


def _unknown(name: str, table: Mapping[str, Any]) -> str:
    if not table:
        return f"the dim is named {name!r}, but the rules table is empty. Remedy: give Rules a rule for {name!r}."
    return (
        f"unknown logical dim {name!r}.{did_you_mean(name, table)} The rules know {listing(sorted(table))}. Remedy: "
        f"correct the annotation, or add {name!r} to the rules (None where it is not to be sharded)."
    )


def _known(dims: Iterable[str], base: Mapping[str, Any], where: str) -> None:
    for dim in dims:
        if dim not in base:
            raise RulesError(
                f"{where} names {dim!r}, which the base table does not hold.{did_you_mean(dim, base)} Remedy: correct "
                f"the name, or add {dim!r} to the base table (None where it is not to be sharded)."
            )


def _axes(value: Any, where: str, hint: str = "") -> Axes:
    axes = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(axes, list | tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise RulesError(
            f"{where} = {value!r} is not a rule.{hint} Remedy: name an axis, or a tuple of axes (major to minor), or "
            f"write None."
        )
    if len(set(axes)) < len(axes):
        raise RulesError(f"{where} = {value!r} names an axis twice. Remedy: name each axis once.")
    return tuple(axes)


def _value(value: Any, dim: str) -> Axes | FirstOf:
    hint = did_you_mean(dim, _RESERVED) if isinstance(value, Mapping | Over) else ""
    if isinstance(value, Over):
        raise RulesError(f"{dim} = {value}: over() is for a role ({', '.join(ROLES)}), not for a dim.{hint}")
    return value if isinstance(value, FirstOf) else _axes(value, dim, hint)


def _overlay(role: str, value: Any, base: Mapping[str, Any]) -> tuple[tuple[str, Axes | FirstOf], ...] | Over:
    if isinstance(value, Over):
        return value
    if not isinstance(value, Mapping):
        raise RulesError(f"{role} = {value!r}: a role takes a mapping of dims to rules, or over(axis).")
    _known(value, base, role)
    return _frozen({dim: _value(rule, f"{role}: {dim}") for dim, rule in value.items()})


def _frozen(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(table.items(), key=lambda item: item[0]))


def _from_data(value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "first_of" in value:
        if set(value) != {"first_of"} or not isinstance(value["first_of"], list):
            raise RulesError(f"{name} = {value!r}: write {{first_of: [axis, ..., null]}}.")
        return first_of(*value["first_of"])
    if name in ROLES and "over" in value:
        extra = set(value) - {"over", "min_bytes"}
        if extra:
            raise RulesError(f"{name}: over takes min_bytes beside it, not {listing(sorted(extra))}.")
        return over(value["over"], **({"min_bytes": value["min_bytes"]} if "min_bytes" in value else {}))
    return {key: _from_data(item, f"{name}: {key}") for key, item in value.items()}


def _to_data(value: Axes | FirstOf | Over) -> Any:
    if isinstance(value, FirstOf):
        return {"first_of": [_to_data(option) for option in value.options]}
    if isinstance(value, Over):
        return {"over": _to_data(value.axes), "min_bytes": value.min_bytes}
    return None if not value else value[0] if len(value) == 1 else list(value)


def _plain(value: Axes | Over) -> Axes:
    return value.axes if isinstance(value, Over) else value


def _show(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "None" if not value else str(value[0]) if len(value) == 1 else f"({', '.join(value)})"
    return str(value)
