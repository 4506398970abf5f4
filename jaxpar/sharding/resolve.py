"""The resolver: which axes shard each dim of a tensor under the rules, and why. This module does not import jax."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpar.errors import allow_replication, did_you_mean, listing
from jaxpar.sharding import messages
from jaxpar.sharding.rules import Axes, FirstOf, Over, Rule, Rules, Sizes, options


@dataclass(frozen=True)
class ResolvedDim:
    """The sharding of one dim of a tensor.

    Attributes:
      name: the logical dim, or ``None``.
      size: its size, or ``None`` where no shape was given.
      axes: the mesh axes that shard it, major to minor.
      rule: the rule that applied, as a text.
      why: why the dim is not sharded, or why earlier options of its rule did not fit.
    """

    name: str | None
    size: int | None
    axes: Axes = ()
    rule: str = ""
    why: str = ""


@dataclass(frozen=True)
class Resolved:
    """The sharding of one tensor.

    Attributes:
      dims: one :class:`ResolvedDim` per dim.
      problems: what the rules do not allow, one text each; empty if all is well.
      used: the (role, dim) pairs of the rules that applied.
      note: why ``over`` did not apply, or an empty text.
    """

    dims: tuple[ResolvedDim, ...]
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
    """Returns the sharding of one tensor, with a reason per dim and a list of problems instead of an exception.

    Args:
      rules: the rules. A mesh axis that ``axis_sizes`` lacks counts as size 1; axes of size 1 are dropped.
      axis_sizes: the size of each mesh axis.
      names: one logical dim (or ``None``) per dim of the tensor.
      shape: the tensor's shape. Without it divisibility is not checked and ``over`` does not apply.
      role: the role whose overlay applies.
      itemsize: bytes per element; ``over`` compares the tensor's bytes with ``min_bytes``.
      path: the tensor's name in problem texts.

    Raises:
      RulesError: an unknown role.
    """
    where = messages.tensor(path, names, shape)
    sizes: Sequence[int | None] = [None] * len(names) if shape is None else shape
    if len(sizes) != len(names):
        stacks = " For stacked layers, see jaxpar.nnx.stacked() or, in Linen, nn.PARTITION_NAME."
        dims = [ResolvedDim(None, size, why="the names do not match the dims") for size in sizes]
        text = (
            f"{where}: the tensor has rank {len(sizes)}, but {len(names)} dim names. Remedy: give each dim a name or "
            f"None.{stacks if role != 'activations' else ''}"
        )
        return Resolved(tuple(dims), (text,))
    table, spread = rules.for_role(role)
    live = {axis: size for axis, size in axis_sizes.items() if size > 1}
    dims = [ResolvedDim(None, size, why="the dim has no name") for size in sizes]
    problems: list[str] = []
    claimed: dict[str, str] = {}
    named = [(i, name) for i, name in enumerate(names) if name is not None]
    choosing = {name for name, (_, rule) in table.items() if isinstance(rule, FirstOf)}
    # Plain rules claim their axes before any first_of, so a first_of gives way whatever the order of the dims.
    for i, name in sorted(named, key=lambda item: item[1] in choosing):
        if name not in table:
            problems.append(f"{where}: {_unknown_dim(name, table)}")
            dims[i] = ResolvedDim(name, sizes[i], why="no rule")
            continue
        source, rule = table[name]
        shown = f"{messages.entry(source, name)} = {messages.written(rule)}"
        axes, why, remedy = _place(name, sizes[i], rule, live, claimed, name in rules.indivisible)
        if remedy:
            problems.append(f"{where}: {why} (rule {shown}). Remedy: {remedy}.")
        dims[i] = ResolvedDim(name, sizes[i], axes, shown, why)
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
    """Returns the axes of one named dim, why it has no more, and the remedy where that is a problem (else "")."""
    misfits: list[str] = []
    rivals: list[str] = []
    for option in options(rule):
        axes = tuple(axis for axis in option if axis in live)
        taken = next((axis for axis in axes if axis in claimed), None)
        if taken is not None:
            rivals.append(claimed[taken])
            misfits.append(f"the axis {taken!r} is claimed by the dims {claimed[taken]!r} and {name!r}")
        elif size is not None and size % num_shards_over(axes, live):
            misfits.append(messages.no_multiple(name, size, {axis: live[axis] for axis in axes}))
        elif axes:
            return axes, "; ".join(misfits), ""
        elif not option:
            return (), "; ".join([*misfits, "the rule says None"]), ""
    why = "; ".join(misfits)
    if not misfits:
        return (), "the axes of the rule have size 1", ""
    if may_stay_whole and not rivals:
        return (), f"{why}; indivisible allows replication", ""
    return (), why, _remedy(name, rivals, chooses=isinstance(rule, FirstOf))


def _spread(dims: list[ResolvedDim], spread: Over, live: Sizes, claimed: Mapping[str, str], nbytes: int) -> str:
    """Applies ``over`` to one dim of ``dims`` in place; returns "" or why no dim can take the axes.

    The largest dim of a shard that the axes divide takes them; dims that are not sharded yet come first. Among these, a
    dim other than the last is preferred where each device keeps 8 or more of it: a TPU stores tiles of 8 rows by 128
    columns.
    """
    large = [axis for axis in spread.axes if axis in live]
    axes = tuple(axis for axis in large if axis not in claimed)
    shard = [(dim.size or 0) // num_shards_over(dim.axes, live) for dim in dims]
    fits = [i for i, size in enumerate(shard) if size and size % num_shards_over(axes, live) == 0]
    if not axes:
        note = f"the tensor is already sharded over {listing(large)}" if large else "its axes have size 1"
    elif nbytes < spread.min_bytes:
        note = f"the tensor has {nbytes} bytes"
    elif not fits:
        note = f"no dim of a shard is a multiple of {num_shards_over(axes, live)}"
    else:
        rows = {i for i in fits if i < len(dims) - 1 and shard[i] >= 8 * num_shards_over(axes, live)}
        best = max(fits, key=lambda i: (not dims[i].axes, i in rows, shard[i], -i))
        old = dims[best]
        rule = f"{old.rule} + {spread}" if old.axes else str(spread)
        dims[best] = ResolvedDim(old.name, old.size, (*old.axes, *axes), rule)
        return ""
    return f"{spread} does not apply: {note}"


def num_shards_over(axes: Iterable[str], sizes: Sizes) -> int:
    """Returns the number of shards of a dim that is sharded over these mesh axes.

    >>> num_shards_over(("data", "model"), {"data": 2, "model": 4, "context": 8})
    8
    """
    return math.prod(sizes[axis] for axis in axes)


def _unknown_dim(name: str, known: Collection[str]) -> str:
    """Returns the problem of a dim that the rules do not know."""
    if not known:
        return f"the dim is named {name!r}, but the rules table is empty. Remedy: give Rules a rule for {name!r}."
    return (
        f"unknown logical dim {name!r}.{did_you_mean(name, known)} The rules know {listing(sorted(known))}. Remedy: "
        f"correct the annotation, or add {name!r} to the rules (as None to leave it unsharded)."
    )


def _remedy(name: str, rivals: Collection[str], *, chooses: bool) -> str:
    """Returns the remedy for a dim that does not fit.

    Args:
      name: the dim.
      rivals: the dims that claim the same axes.
      chooses: whether the dim's rule is a ``first_of``.
    """
    if chooses:
        return "add None as the last option, to leave the dim unsharded"
    if name in rivals:
        return "give one of the two another name, with its own rule"
    if rivals:
        return "give one of the two another axis or None, possibly in one role only (activations, params, ...)"
    return f"change the size, the rule or the mesh, or leave such dims unsharded: {allow_replication(name)}"
