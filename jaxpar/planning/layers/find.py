"""Finds the repeated layers of a traced loss: a scan over stacked weights, or equal modules one after the other."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpar.planning.names.fold import families
from jaxpar.utils.jaxprs import opened

_PARAMS = "params/"


@dataclass(frozen=True)
class RepeatedLayers:
    """Layers that a program runs one after the other.

    Attributes:
      path: of their parameters, with ``*`` for the number of a layer; "" if they are stacked.
      spans: the first equation of each layer and the one after its last; of a stack, the scan alone.
      count: the number of layers.
      stacked: whether a scan runs them.
    """

    path: str
    spans: tuple[tuple[int, int], ...]
    count: int
    stacked: bool

    def __str__(self) -> str:
        return f"{self.count} layers in a scan" if self.stacked else f"{self.count} layers {self.path}"


def find_layers(jaxpr: Jaxpr, paths: Sequence[str]) -> tuple[RepeatedLayers, ...]:
    """Returns the repeated layers of a program, in its order.

    Separate layers are modules whose paths differ in one number, at least two of them with the same shapes, that run
    one after the other. A layer ends where the fewest bytes of activations are needed later: after the sum with the
    residual stream, not in the middle of the next norm.

    Args:
      jaxpr: the traced loss, inlined.
      paths: of its arguments, which begin with ``params/`` for parameters.

    >>> import jax, jax.numpy as jnp
    >>> def loss(params, x):
    ...     for w in params["blocks"]:
    ...         x = x + jnp.tanh(x @ w)
    ...     return x.sum()
    >>> jaxpr = jax.make_jaxpr(loss)({"blocks": [jnp.ones((4, 4))] * 2}, jnp.ones((8, 4))).jaxpr
    >>> [found] = find_layers(jaxpr, ["params/blocks/0", "params/blocks/1", "batch/x"])
    >>> str(found), [[eqn.primitive.name for eqn in jaxpr.eqns[a:b]] for a, b in found.spans]
    ('2 layers params/blocks/*', [['dot_general', 'tanh', 'add'], ['dot_general', 'tanh', 'add']])
    """
    values = _Values(jaxpr, paths)
    found = [*_scans(jaxpr, values), *_separate(values)]
    return tuple(sorted(found, key=lambda layers: layers.spans))


class _Values:
    """What the variables of a program depend on, and where they are needed.

    Attributes:
      params: path → shape of the parameters.
      origin: a variable that depends on parameters alone → their paths.
      data: the variables that depend on other arguments.
      reads: path of a parameter → the equations that combine it, or what is made of it, with data.
      bytes: the bytes of data that cross the place before each equation.
    """

    def __init__(self, jaxpr: Jaxpr, paths: Sequence[str]):
        pairs = list(zip(jaxpr.invars, paths, strict=True))
        self.params = {path: _shape(var) for var, path in pairs if path.startswith(_PARAMS)}
        self.origin = {var: frozenset((path,)) for var, path in pairs if path in self.params}
        self.data = {var for var, path in pairs if path not in self.params}
        self.reads: dict[str, list[int]] = defaultdict(list)
        made = dict.fromkeys(self.data, -1)
        last: dict[Var, int] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            read = [atom for atom in eqn.invars if isinstance(atom, Var)]
            last |= dict.fromkeys(read, number)
            weights = frozenset[str]().union(*(self.origin.get(atom, ()) for atom in read))
            if any(atom in self.data for atom in read):
                self.data.update(eqn.outvars)
                made |= dict.fromkeys(eqn.outvars, number)
                for path in weights:
                    self.reads[path].append(number)
            elif weights:
                self.origin |= dict.fromkeys(eqn.outvars, weights)
        last |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if isinstance(atom, Var)}
        change = [0] * (len(jaxpr.eqns) + 2)
        for var, number in made.items():
            change[number + 1] += _bytes(var)
            change[max(last.get(var, 0), number) + 1] -= _bytes(var)
        self.bytes = [*itertools.accumulate(change)]

    def best_cut(self, after: int, until: int) -> int:
        """Returns the place behind equation ``after``, at most before equation ``until``, that fewest bytes cross."""
        return min(range(after + 1, min(until + 1, len(self.bytes) - 1)), key=lambda place: self.bytes[place])

    def all_reads(self, paths: set[str]) -> list[int]:
        """Returns the equations that combine one of these parameters with data, in order."""
        return sorted({number for path in paths for number in self.reads.get(path, ())})


def _shape(var: Var) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _bytes(var: Var) -> int:
    return math.prod(_shape(var)) * getattr(getattr(var.aval, "dtype", None), "itemsize", 4)


def _scans(jaxpr: Jaxpr, values: _Values) -> Iterator[RepeatedLayers]:
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
            continue
        if any(atom in values.origin for atom in _stacked(eqn)) and not values.data.isdisjoint(eqn.outvars):
            yield RepeatedLayers("", ((number, number + 1),), eqn.params["length"], True)


def _stacked(eqn: JaxprEqn) -> Iterator[Var]:
    """The arguments of a scan of which each step has its own part."""
    for atom, inner in zip(eqn.invars, opened(eqn.params["jaxpr"]).invars, strict=True):
        if isinstance(atom, Var) and len(_shape(atom)) > len(_shape(inner)):
            yield atom


def _separate(values: _Values) -> Iterator[RepeatedLayers]:
    """Separate layers, those with most parameters first; what is inside of them is a part of them."""
    taken: list[str] = []
    used: list[tuple[int, int]] = []
    modules = families(values.params)
    weights = {prefix: -_weight(members, values.params) for prefix, members in modules.items()}
    for prefix in sorted((p for p in modules if weights[p]), key=lambda prefix: (weights[prefix], len(prefix))):
        inside = any(prefix.startswith(outer) for outer in taken)
        spans = () if inside else _spans(values, _members(modules[prefix]))
        if spans and not any(a < spans[-1][1] and spans[0][0] < b for a, b in used):
            taken.append(prefix)
            used.append((spans[0][0], spans[-1][1]))
            yield RepeatedLayers(f"{prefix}*", spans, len(spans), False)


def _weight(members: Mapping[str, Mapping[str, str]], params: Mapping[str, tuple[int, ...]]) -> float:
    """The number of parameters, times the share of the modules that have the same shapes; 0 if no two have."""
    shapes = Counter(
        tuple(sorted((rest, params[path]) for rest, path in member.items())) for member in members.values()
    )
    most = max(shapes.values())
    size = sum(math.prod(params[path]) for member in members.values() for path in member.values())
    return size * most / len(members) if most > 1 else 0.0


def _members(members: Mapping[str, Mapping[str, str]]) -> list[set[str]]:
    """The parameters of each module that another has too.

    What only one has, such as a table of relative positions in the first layer, may be used by all.
    """
    count = Counter(rest for member in members.values() for rest in member)
    return [{path for rest, path in member.items() if count[rest] > 1} for member in members.values()]


def _spans(values: _Values, members: Sequence[set[str]]) -> tuple[tuple[int, int], ...]:
    """The equations of each layer; none if they do not run one after the other."""
    reads = sorted(numbers for paths in members if (numbers := values.all_reads(paths)))
    if len(reads) < 2 or any(one[-1] >= other[0] for one, other in itertools.pairwise(reads)):
        return ()
    first, last = reads[0][0], reads[-1][-1]
    inner = [values.best_cut(one[-1], other[0]) for one, other in itertools.pairwise(reads)]
    others = values.all_reads(set(values.reads) - {path for paths in members for path in paths})
    # The first layer begins, and the last one ends, as the others do.
    begin = max(other[0] - cut for cut, other in zip(inner, reads[1:], strict=True))
    end = max(cut - one[-1] for cut, one in zip(inner, reads, strict=False))
    before = max((number for number in others if number < first), default=-1)
    after = min((number for number in others if number > last), default=last + end)
    start = values.best_cut(max(before, first - begin - 1), first)
    return tuple(itertools.pairwise((start, *inner, values.best_cut(last, min(after, last + end)))))
