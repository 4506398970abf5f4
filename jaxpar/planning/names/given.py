"""Names that a user gives: in the model's annotations, or to parameters by patterns of their paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from jaxpar.errors import AnnotationError, did_you_mean, listing
from jaxpar.planning.names.dim_classes import Dim, DimClasses
from jaxpar.planning.names.roles import DimName
from jaxpar.sharding.names import Names, check_names
from jaxpar.training.model import part_of

Patterns = Mapping[str, Sequence[str | None]]
"""Path pattern → a name or ``None`` for each dim. ``*`` stands for one part of a path, ``**`` for any number."""


Given = Mapping[str, tuple[Names, str]]
"""Path of an array → the names that the user gave to its dims, and where they come from."""


def match(patterns: Patterns, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Names, str]]:
    """Returns the names of each parameter that a pattern matches, and the pattern; the first that matches counts.

    Args:
      patterns: the patterns.
      shapes: path → shape of every parameter.

    Raises:
      AnnotationError: malformed names, a pattern that matches nothing, or another number of names than dims.

    >>> shapes = {"layers/0/mlp/up": (8, 32), "layers/1/mlp/up": (8, 32), "embedding": (64, 8)}
    >>> match({"layers/*/mlp/up": ("embed", "mlp")}, shapes)["layers/1/mlp/up"]
    (('embed', 'mlp'), 'layers/*/mlp/up')
    """
    found: dict[str, tuple[Names, str]] = {}
    for pattern, given in patterns.items():
        names = check_names(given, f"names[{pattern!r}]")
        paths = [path for path in shapes if matches(pattern, path)]
        if not paths:
            raise AnnotationError(
                f"names[{pattern!r}] matches no parameter.{did_you_mean(pattern, shapes)} Remedy: write paths as "
                f"annotate(...) prints them, with * for one part of a path and ** for any number, such as "
                f"{next(iter(shapes))!r}."
            )
        misfits = [f"{path} {list(shapes[path])}" for path in paths if len(shapes[path]) != len(names)]
        if misfits:
            raise AnnotationError(
                f"names[{pattern!r}] has {len(names)} names, but matches {listing(misfits)}. Remedy: give each dim a "
                "name or None, or a narrower pattern."
            )
        for path in paths:
            found.setdefault(path, (names, pattern))
    return found


def matches(pattern: str, path: str) -> bool:
    """Whether a path has a pattern.

    >>> matches("layers/*/up", "layers/0/up"), matches("**/up", "layers/0/mlp/up"), matches("*/up", "layers/0/up")
    (True, True, False)
    """
    return _matches(pattern.split("/"), path.split("/"))


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


def by_class(
    classes: DimClasses, dims: Mapping[str, list[Dim]], given: Given
) -> tuple[dict[int, DimName], dict[Dim, DimName], list[str]]:
    """Returns the names given to classes and to dims of several atoms, and a note for each class with several names.

    Of several names that of the batch's arrays counts first: a table of positions is looked up along the sequence.

    Args:
      classes: the classes.
      dims: those of each array, by path.
      given: the names of some arrays, and where they come from, by path.
    """
    votes: dict[Dim, Counter[str]] = {}
    first = len(given)
    source: dict[tuple[Dim, str], str] = {}
    for path, (names, origin) in given.items():
        for dim, name in zip(dims[path], names, strict=True):
            if (flat := classes.flat(dim)) and name is not None:
                votes.setdefault(flat, Counter())[name] += first if part_of(path) == "batch" else 1
                source.setdefault((flat, name), origin)
    single, several, notes = {}, {}, []
    for flat, counts in votes.items():
        (name, _), *others = counts.most_common()
        chosen = DimName(name, source[flat, name])
        if len(flat) == 1:
            single[flat[0]] = chosen
        else:
            several[flat] = chosen
        if others:
            notes.append(
                f"one class of dims has the given names {listing(counts)}: parameters keep them, activations take "
                f"{name!r}"
            )
    return single, several, notes
