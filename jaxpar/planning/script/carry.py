"""The state of a train step: the parts of its arguments that it returns changed, and the results that continue them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxpar.errors import ConfigError, did_you_mean, listing
from jaxpar.planning.script.flow import carried
from jaxpar.planning.script.step_data import Node, StepData
from jaxpar.training.model import show

_MOST = 5000
"""Matchings of arguments and results that are compared."""


@dataclass(frozen=True)
class StatePart:
    """A part of the arguments that a step may return changed, as the parameters or a centre.

    Attributes:
      path: its path, which begins with the name of the argument.
      arrays: the indices of its arrays among those of the arguments.
      starts: the index of the first array of each result that may continue it, the likeliest first.
      results: the paths of these results.
      sure: whether one of them does for certain.
      placed: whether it is placed as state, and may be overwritten; else it is placed as data.
    """

    path: str
    arrays: range
    starts: tuple[int, ...]
    results: tuple[str, ...]
    sure: bool
    placed: bool = True

    @property
    def decided(self) -> bool:
        """Whether it is known what continues it."""
        return self.sure and len(self.starts) == 1

    def updates(self) -> dict[int, int]:
        """Returns the index of the array that likely continues each of its arrays."""
        return {i: self.starts[0] + k for k, i in enumerate(self.arrays)}


@dataclass(frozen=True)
class _Match:
    """A part of the arguments and a result of its structure.

    Attributes:
      node, result: the two.
      linear, carries, depends: the number of arrays of the result that are linear in the argument, carry it on, depend
        on it.
      last: the equation that computes the last of them: parameters are computed after their gradients.
    """

    node: Node
    result: Node
    linear: int
    carries: int
    depends: int
    last: int

    @property
    def level(self) -> int:
        return 2 if self.carries else int(bool(self.depends))


def state_parts(step: StepData, dependencies: Sequence[frozenset[int]], is_key: Any) -> tuple[StatePart, ...]:
    """Finds the state of a step in the flow of its data, as far as one call shows it.

    A part of the arguments is state if a result has its structure and carries it on. Where several results do, as
    the parameters and their gradients with a penalty on the weights, the next call shows which.

    Args:
      step: the step.
      dependencies: the arguments that each result depends on.
      is_key: whether a shape is that of a PRNG key.
    """
    carries, results = carried(step.program), list(step.results().walk())
    made = {var: n for n, eqn in enumerate(step.program.jaxpr.eqns) for var in eqn.outvars}

    def matches(node: Node) -> list[_Match]:
        rated = []
        for result in results:
            pairs = list(zip(node.arrays, result.arrays, strict=False))
            same = result.tree == node.tree and len(node.arrays) == len(result.arrays)
            if same and all(step.kind(i) == step.result_kind(j) for i, j in pairs):
                on = [carries[j][i] for i, j in pairs if i in carries[j]]
                last = max((made.get(step.result_var(j), -1) for j in result.arrays), default=-1)
                depends = sum(i in dependencies[j] for i, j in pairs)
                rated.append(_Match(node, result, sum(on), len(on), depends, last))
        values = [tuple(step.first_of(j) for j in match.result.arrays) for match in rated]
        return [match for n, match in enumerate(rated) if values[n] not in values[:n]]

    def trees(node: Node) -> Iterator[list[_Match]]:
        if node.is_array or not node.arrays:
            return
        if rated := matches(node):
            yield [match for match in rated if match.level == max(other.level for other in rated)]
        elif step.loaded.isdisjoint(node.arrays):
            for child in node.children:
                yield from trees(child)

    arguments = step.arguments()
    options = [rated for node in arguments for rated in trees(node)]
    parts = _matched(options)
    if any(batches := [_is_batch(step, part, parts, arguments, is_key) for part in parts]) and not all(batches):
        parts = [part for part, is_batch in zip(parts, batches, strict=True) if not is_batch]
    used = {j for part in parts for j in part.updates().values()}
    taken = {i for part in parts for i in part.arrays}
    bare = [node for node in arguments if node.is_array]
    rows = _rows(step, [i for node in arguments for i in node.arrays if i not in taken], bare, matches, is_key)
    fed = any(i in step.loaded and shape.shape[:1] == (rows,) for i, shape in enumerate(step.program.in_avals))
    options = []
    unsure: set[int] = set()
    for node in bare:
        (i,) = node.arrays
        shape, key = step.program.in_avals[i], is_key(step.program.in_avals[i])
        rated = [m for m in matches(node) if m.result.among and m.result.arrays.start not in used and m.level]
        rated = [m for m in rated if key or not step.is_same(i, m.result.arrays.start)]
        if not key and not shape.shape:
            rated = [match for match in rated if match.linear]
        rated = [match for match in rated if match.level == max(other.level for other in rated)]
        is_data = not key and shape.shape and (shape.shape[0] == rows or rated[:1] and rated[0].level < 2)
        if is_data and i in step.loaded:
            continue
        if fed and any(match.linear for match in rated):  # a weight or a mean, beside the loader's batch
            is_data = False
        unsure |= {i} if is_data else set()
        options += [rated] if rated else []
    arrays = _matched(options)
    alone = not parts and not step.call.objects and all(part.arrays.start in unsure for part in arrays)
    floats = lambda part: jnp.issubdtype(step.kind(part.arrays.start)[1], jnp.inexact)
    for part in arrays:
        if part.arrays.start in unsure and not (alone and floats(part)):
            part = replace(part, sure=False, placed=False)
        parts.append(part)
    return tuple(sorted(parts, key=lambda part: part.arrays.start))


def _is_batch(
    step: StepData, part: StatePart, parts: Sequence[StatePart], arguments: Sequence[Node], is_key: Any
) -> bool:
    """Whether a tree is a batch of a loader that a result is like, as its reconstruction is."""
    shapes = [step.program.in_avals[i] for i in part.arrays]
    sizes = {shape.shape[0] for shape in shapes if shape.shape}
    state = {i for other in parts if other is not part for i in other.arrays}
    free = [i for node in arguments for i in node.arrays if i not in state]
    loaded = step.loaded.issuperset(part.arrays)
    return loaded and len(sizes) == 1 and sizes == {_rows(step, free, [], lambda node: [], is_key)}


def _rows(step: StepData, free: list[int], bare: list[Node], matches: Any, is_key: Any) -> int:
    """The size of the batch: what most arrays beside the state begin with; of those that no result is like, if any."""
    shapes = {i: step.program.in_avals[i] for i in free}
    data = [i for i, shape in shapes.items() if shape.shape and not is_key(shape)]
    like = {node.arrays.start for node in bare if matches(node)}
    sizes = Counter(shapes[i].shape[0] for i in [i for i in data if i not in like] or data)
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


def _matched(options: list[list[_Match]]) -> list[StatePart]:
    """The matchings that carry on most arrays, each to a result of its own, as parts; the likeliest comes first."""
    best: list[tuple[tuple[int, int], tuple[int, int], tuple[_Match, ...]]] = []
    tried = 0

    def search(k: int, chosen: tuple[_Match, ...], used: frozenset[int]) -> None:
        nonlocal best, tried
        if k == len(options):
            tried += 1
            arrays = sum(len(m.node.arrays) for m in chosen if m.level == 2), sum(len(m.node.arrays) for m in chosen)
            rank = -sum(m.linear for m in chosen), -sum(m.last for m in chosen)
            if not best or arrays >= best[0][0]:
                best = [*(one for one in best if one[0] == arrays), (arrays, rank, chosen)]
            return
        if tried > _MOST:
            return
        for match in options[k]:
            if used.isdisjoint(match.result.arrays):
                search(k + 1, (*chosen, match), used.union(match.result.arrays))
        search(k + 1, chosen, used)

    search(0, (), frozenset())
    best.sort(key=lambda one: one[1])
    parts = []
    for match in best[0][2]:
        mine = [next((m for m in chosen if m.node is match.node), None) for _, _, chosen in best]
        results = list({m.result.path: m.result for m in (match, *mine) if m is not None}.values())
        parts.append(
            StatePart(
                show(match.node.path),
                match.node.arrays,
                tuple(result.arrays.start for result in results),
                tuple(show(result.path) for result in results),
                sure=None not in mine and tried <= _MOST,
            )
        )
    return parts


Continued = Mapping[str, int | str]
"""Path of an argument or a part of it → path of the result that continues it."""


def parts_of(step: StepData, state: Continued) -> tuple[StatePart, ...]:
    """Returns the state that a caller names.

    Args:
      step: the step.
      state: path of an argument, or of a part of it → index or path of the result that continues it.

    Raises:
      ConfigError: a path is that of no argument or result, or their arrays differ.
    """
    arguments = {show(node.path): node for top in step.arguments() for node in top.walk()}
    results = {show(node.path): node for node in step.results().walk()}
    parts = []
    for path, result in state.items():
        for what, name, known in (("argument", path, arguments), ("result", str(result), results)):
            if name not in known:
                raise ConfigError(
                    f"state: train_step has no {what} {name!r}.{did_you_mean(name, known)} Remedy: state={{'params': "
                    f"0}} says that result 0 continues the argument params; the {what}s are "
                    f"{listing(sorted(known)[:12])}."
                )
        node, other = arguments[path], results[str(result)]
        kinds = [step.kind(i) for i in node.arrays], [step.result_kind(j) for j in other.arrays]
        if kinds[0] != kinds[1]:
            n = next((n for n, (a, b) in enumerate(zip(*kinds, strict=False)) if a != b), None)
            why = f"{len(kinds[0])} arrays and {len(kinds[1])}"
            if n is not None:
                (a, b), (c, d) = kinds[0][n], kinds[1][n]
                why = f"{step.call.paths[node.arrays[n]]} is {b}{list(a)}, and its result {d}{list(c)}"
            raise ConfigError(
                f"state: result {str(result)!r} cannot continue {path!r}: {why}. Remedy: name the result that the next "
                "call is passed as this argument."
            )
        parts.append(StatePart(path, node.arrays, (other.arrays.start,), (str(result),), sure=True))
    return tuple(sorted(parts, key=lambda part: part.arrays.start))
