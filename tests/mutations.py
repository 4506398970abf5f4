"""Configurations with random values at random keys."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 0.5, -1.5, 1e30, 2**70, "", "auto", "x", "1f1b", "$A"),
    *([], [1], [1, 2], [[1, 2], [3]], [[0, 0], [0, 0]], ["a"], [None], [True, False], {}, {"a": 1}),
    *({"layers": True}, [{"layers": [1]}], [{"op_name": 3, "layers": True}]),
)


def mutated(data: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A copy of ``data`` in which up to three values are replaced by those of other kinds and sizes."""
    rng, result = random.Random(seed), copy.deepcopy(dict(data))
    for _ in range(rng.choice((1, 1, 2, 3))):
        *parents, last = rng.choice(list(_paths(result)))
        at = result
        for part in parents:
            at = at[part]
        at[last] = copy.deepcopy(rng.choice(VALUES))
    return result


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
