"""A layer's branches on several parts of a batch at once: beside what one part computes, what another sends crosses the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name


@dataclass(frozen=True)
class Branch:
    """What a layer adds to its residual stream: ``x + second(block, first(block, before(block, x), side))``.

    Attributes:
      before: ``before(block, x) -> h`` token by token, as a norm. It sees what lies by ``residual_seq``.
      compute, output_projection: ``compute(block, h, side) -> hidden`` and ``output_projection(block, hidden) -> y`` [rows, seq, embed], of about equal work. The axes that
        split ``residual_seq`` and not ``seq`` are manual in them: weights, heads and hidden units are those of one device, and ``y`` is its share of
        a sum over them.
      name: of what is added, for policies of recomputation.
      carried: ``carried(block, h, side, carry) -> (hidden, carry)`` in the place of ``compute`` where sequences are cut: ``carry`` is what it gave for the
        tokens before these, ``None`` for the first of a sequence. Without it ``compute`` is taken, token by token.
    """

    before: Callable[[Any, jax.Array], jax.Array]
    compute: Callable[[Any, jax.Array, Any], Any]
    output_projection: Callable[[Any, Any], jax.Array]
    name: str = ""
    carried: Callable[[Any, jax.Array, Any, Any], tuple[Any, Any]] | None = None


class Crossing(Protocol):
    """How a part's tokens cross the mesh: ``hand`` is the axes that they cross by hand, ``dim`` what was cut into parts."""

    @property
    def hand(self) -> tuple[str, ...]: ...

    @property
    def dim(self) -> str: ...

    def together(self, h: jax.Array) -> jax.Array:
        """What a branch is given."""

    def apart(self, y: jax.Array) -> jax.Array:
        """What a branch adds."""


def woven(
    branches: Sequence[Branch],
    how: Crossing,
    block: Any,
    xs: Sequence[jax.Array],
    sides: Sequence[Any],
    within: Callable[[int], AbstractContextManager[None]] = lambda at: nullcontext(),
) -> tuple[jax.Array, ...]:
    """All branches of all parts, two steps behind each other: beside each step of one that computes, one of the other crosses the mesh.

    After each of these pairs both wait for each other, or the compiler would put what crosses side by side again. Where nothing crosses but inside of a
    branch (context parallelism alone), the second is a branch behind: attention of one stands beside the MLP of the other. What a part's branches do is
    traced in the context ``within(part)``.
    """
    chains: list[_Chain] = []
    for x, side in zip(xs, sides, strict=True):
        chains.append(_Chain(branches, how, block, x, side, chains[-1] if chains else None))
    lag = 2 if how.hand else 4
    last = chains[0].steps + lag * (len(chains) - 1)
    for step in range(last):
        # The last chain begins with what it sends, while the first computes already.
        here = []
        for n, chain in enumerate(chains):
            with within(n):
                waits = chain.take(step - lag * n)
            here += [chain] if waits else []
        _wait_for_each_other(here)
    return tuple(chain.x for chain in chains)


class _Chain:
    """One part on its way through the branches: four steps each, of which the first two compute and the others cross the mesh."""

    def __init__(
        self, branches: Sequence[Branch], how: Crossing, block: Any, x: jax.Array, side: Any, ahead: _Chain | None
    ):
        self.branches, self.how, self.block, self.side = branches, how, block, side
        self.ahead, self.carries = ahead, [None] * len(branches)
        self.x, self.steps = x, 4 * len(branches) - 1
        self.now: Any = how.together(branches[0].before(block, x))

    def take(self, step: int) -> bool:
        """Whether the step leaves something that a later one wants."""
        if not 0 <= step < self.steps:
            return step < 0
        branch, kind = self.branches[step // 4], step % 4
        if kind == 0:
            self.now = self._first(step // 4)
        elif kind == 1:
            self.now = branch.output_projection(self.block, self.now)
        elif kind == 2:
            y = self.how.apart(self.now)
            self.x += checkpoint_name(y, branch.name) if branch.name else y
            if step + 1 == self.steps:
                return False
            self.now = self.branches[step // 4 + 1].before(self.block, self.x)
        else:
            self.now = self.how.together(self.now)
        return True

    def _first(self, number: int) -> Any:
        branch = self.branches[number]
        if self.how.dim == "batch" or branch.carried is None:
            return branch.compute(self.block, self.now, self.side)
        carry = None if self.ahead is None else self.ahead.carries[number]
        hidden, self.carries[number] = branch.carried(self.block, self.now, self.side, carry)
        return hidden


def _wait_for_each_other(chains: Sequence[_Chain]) -> None:
    if len(chains) > 1:
        for chain, now in zip(chains, jax.lax.optimization_barrier([c.now for c in chains]), strict=True):
            chain.now = now
