"""Repeated layers folded together: modules whose paths differ in a number are to be sharded alike."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from jaxpar.planning.names.dim_classes import Dim, DimClasses

_NUMBER = re.compile(r"\d+(?=/|$)")


def families(params: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Returns, of the paths of parameters: (path before a number) → number → (path after it) → path."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for path in params:
        for number in _NUMBER.finditer(path):
            found[path[: number.start()]][number.group()][path[number.end() :]] = path
    return found


def folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns the rows of a table whose first cells are paths, those of equal layers as one row.

    >>> folded([("layers/0/up", "8 × 32"), ("layers/1/up", "8 × 32"), ("head", "8")])
    [('layers/*/up (2)', '8 × 32'), ('head', '8')]
    """
    counts = Counter((_NUMBER.sub("*", path), *cells) for path, *cells in rows)
    return [(f"{path} ({n})" if n > 1 else path, *cells) for (path, *cells), n in counts.items()]


def fold(classes: DimClasses, params: Mapping[str, list[Dim]]) -> DimClasses:
    """Returns the classes with the dims of equal modules united, module for module.

    Modules are equal if their paths differ in one number, as ``layers/0/mlp`` and ``layers/1/mlp`` do, and their
    parameters have the same shapes. Two modules remain apart where uniting them would put one class twice into a
    parameter, as with ``Dense_0`` and ``Dense_1`` of one shape in a row.

    Args:
      classes: the classes; unchanged.
      params: the dims of each parameter, by path.
    """
    for members in families(params).values():
        alike: dict[object, list[dict[str, str]]] = defaultdict(list)
        for member in members.values():
            shapes = [(rest, *map(classes.size, params[path])) for rest, path in sorted(member.items())]
            alike[tuple(shapes)].append(member)
        for group in alike.values():
            classes = _united(classes, params, group)
    return classes


def twice(classes: DimClasses, dims: list[Dim]) -> set[int]:
    """Returns the classes that occur twice in an array: a mesh axis cannot shard both."""
    flat = [atom for dim in dims for atom in classes.flat(dim)]
    return {atom for atom in flat if flat.count(atom) > 1}


def _united(classes: DimClasses, params: Mapping[str, list[Dim]], group: list[dict[str, str]]) -> DimClasses:
    """The classes with all members of a group united, or as many as can be, if not all of them can."""
    if len(group) < 2:
        return classes
    together = classes.copy()
    for other in group[1:]:
        _unite(together, params, group[0], other)
    if _number_twice(together, params) == _number_twice(classes, params):
        return together
    for other in group[1:]:
        trial = classes.copy()
        _unite(trial, params, group[0], other)
        if _number_twice(trial, params) == _number_twice(classes, params):
            classes = trial
    return classes


def _unite(classes: DimClasses, params: Mapping[str, list[Dim]], one: dict[str, str], other: dict[str, str]) -> None:
    for rest, path in one.items():
        for a, b in zip(params[path], params[other[rest]], strict=True):
            classes.unite(a, b)


def _number_twice(classes: DimClasses, params: Mapping[str, list[Dim]]) -> int:
    return sum(bool(twice(classes, dims)) for dims in params.values())
