"""Stacks whose layers differ in their window: which layers one scan runs, and how it takes them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxpar.parallel.offload.host_weights import cut


def scan_groups(local: Sequence[bool], first: int = 0, last: int | None = None) -> list[tuple[int, int, int]]:
    """Returns ``(begin, end, period)``: scans over layers ``begin`` to ``end - 1``, each step over ``period`` of them.

    Every step of a scan runs the same program, so a period repeats the windows of its layers. Layers that do not fill
    a last period, and stacks without a period, become scans over layers that are alike.

    Args:
      local: for each layer, whether it has the sliding window.
      first, last: the layers to run, ``first`` to ``last - 1``; all by default.

    >>> scan_groups([True, False] * 3)
    [(0, 6, 2)]
    >>> scan_groups([True, True, False] * 2 + [True, True])
    [(0, 6, 3), (6, 8, 1)]
    >>> scan_groups([False] * 5 + [True] * 2, first=3)
    [(3, 5, 1), (5, 7, 1)]
    """
    kinds = local[first:last]
    layers = len(kinds)
    repeats = lambda period: all(kinds[i] is kinds[i % period] for i in range(layers))
    period = next((p for p in range(1, layers // 2 + 1) if repeats(p)), layers)
    begin = 0 if period == layers else layers - layers % period
    groups = [(first, first + begin, period)] if begin else []
    while begin < layers:
        end = next((i for i in range(begin, layers) if kinds[i] is not kinds[begin]), layers)
        groups.append((first + begin, first + end, 1))
        begin = end
    return groups


def layers_of(stack: nnx.Module, begin: int, end: int, period: int) -> nnx.Module:
    """Returns layers ``begin`` to ``end - 1`` of a stack [layers, ...], as [steps, period, ...] if the period is > 1.

    Raises:
      ConfigError: they are some of the layers of a stack in host memory.
    """

    def part(x: Any) -> Any:
        x = x if (begin, end) == (0, x.shape[0]) else cut(x, begin, end)
        return x if period < 2 else x.reshape(-1, period, *x.shape[1:])

    return _mapped(part, stack)


def layer_of(group: nnx.Module, number: int) -> nnx.Module:
    """Returns one layer of a group [period, ...]."""
    return _mapped(lambda x: x[number], group)


def _mapped(f: Any, module: nnx.Module) -> nnx.Module:
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(f, state))
