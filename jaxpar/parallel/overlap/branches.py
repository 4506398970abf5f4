"""Interleaves a layer's branches on several parts of a batch: one part communicates while another computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name


@dataclass(frozen=True)
class Branch:
    """A branch of a layer, ``x + output_projection(block, compute(block, before(block, x), side))``.

    The mesh axes that shard ``residual_seq`` but not ``seq`` are manual in ``compute`` and ``output_projection``:
    weights, heads and hidden units are those of one device.

    Attributes:
      before: ``before(block, x) -> h``, a function of each token such as a norm. Its input is sharded as
        ``residual_seq``.
      compute: ``compute(block, h, side) -> hidden``. It should take about as long as ``output_projection``.
      output_projection: ``output_projection(block, hidden) -> y`` ``[rows, seq, embed]``, this device's summand of a
        sum over the manual axes.
      name: the checkpoint name of the branch's output, for remat policies.
      carried: ``carried(block, h, side, carry) -> (hidden, carry)``, used instead of ``compute`` where sequences are
        split. ``carry`` is its result for the preceding tokens, and ``None`` for the first ones. Without
        ``carried``, ``compute`` is used, and has to treat each token independently.

    >>> import jax, jax.numpy as jnp
    >>> import jaxpar as jp
    >>> mlp = Branch(
    ...     before=lambda block, x: x,
    ...     compute=lambda block, h, side: jnp.tanh(h @ block["up"]),
    ...     output_projection=lambda block, hidden: hidden @ block["down"],
    ... )
    >>> rules = jp.Rules(batch="data", seq=None, residual_seq="model", embed=None)
    >>> with jp.Layout(jp.MeshSpec(data=-1, model=2).build(), rules):
    ...     run = jp.overlap.interleave_batches([mlp])
    ...     jax.eval_shape(run, {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}, jnp.ones((16, 2, 4)), None).shape
    (16, 2, 4)
    """

    before: Callable[[Any, jax.Array], jax.Array]
    compute: Callable[[Any, jax.Array, Any], Any]
    output_projection: Callable[[Any, Any], jax.Array]
    name: str = ""
    carried: Callable[[Any, jax.Array, Any, Any], tuple[Any, Any]] | None = None


class BranchCollectives(Protocol):
    """The collectives between branches.

    Attributes:
      permute_axes: the axes over which tokens are gathered and summed by permutes.
      dim: the dim that is split into parts, ``batch`` or ``seq``.
    """

    @property
    def permute_axes(self) -> tuple[str, ...]: ...

    @property
    def dim(self) -> str: ...

    def gather_seq(self, h: jax.Array) -> jax.Array:
        """Gathers the sequence for a branch."""

    def scatter_seq(self, y: jax.Array) -> jax.Array:
        """Sums and scatters the output of a branch."""


def interleave_branches(
    branches: Sequence[Branch],
    plan: BranchCollectives,
    block: Any,
    xs: Sequence[jax.Array],
    sides: Sequence[Any],
    within: Callable[[int], AbstractContextManager[None]],
) -> tuple[jax.Array, ...]:
    """Runs all branches on all parts, and schedules them so that one part communicates while another computes.

    Each part is two steps behind the previous one. A barrier follows each pair of steps; without it the compiler would
    schedule the communication of both parts together. If nothing is sent between branches (context parallelism alone),
    the second part is one branch behind: the attention of one part runs next to the MLP of the other.

    Args:
      branches: the layer's branches.
      plan: the collectives between branches.
      block: the weights, as the branches take them.
      xs: the parts of the residual stream, ``[rows, seq, embed]`` each.
      sides: for each part, the argument ``side`` of the branches.
      within: returns the context in which a part is traced.

    Returns:
      The parts after the layer.
    """
    chains: list[_Chain] = []
    for x, side in zip(xs, sides, strict=True):
        chains.append(_Chain(branches, plan, block, x, side, chains[-1] if chains else None))
    lag = 2 if plan.permute_axes else 4
    for step in range(chains[0].steps + lag * (len(chains) - 1)):
        # The last chain begins with communication, while the first one already computes.
        here = []
        for n, chain in enumerate(chains):
            with within(n):
                pending = chain.take(step - lag * n)
            here += [chain] if pending else []
        _barrier(here)
    return tuple(chain.x for chain in chains)


@dataclass(eq=False)
class _Chain:
    """One part on its way through the branches: four steps per branch, two of compute and two of communication."""

    branches: Sequence[Branch]
    plan: BranchCollectives
    block: Any
    x: jax.Array
    side: Any
    previous: _Chain | None

    def __post_init__(self) -> None:
        self.carries, self.steps = [None] * len(self.branches), 4 * len(self.branches) - 1
        self.now: Any = self.plan.gather_seq(self.branches[0].before(self.block, self.x))

    def take(self, step: int) -> bool:
        """Runs a step; returns whether a later step uses ``now``, so that it belongs to the barrier."""
        if not 0 <= step < self.steps:
            return step < 0
        branch, kind = self.branches[step // 4], step % 4
        if kind == 0:
            self.now = self._first(step // 4)
        elif kind == 1:
            self.now = branch.output_projection(self.block, self.now)
        elif kind == 2:
            y = self.plan.scatter_seq(self.now)
            self.x += checkpoint_name(y, branch.name) if branch.name else y
            if step + 1 == self.steps:
                return False
            self.now = self.branches[step // 4 + 1].before(self.block, self.x)
        else:
            self.now = self.plan.gather_seq(self.now)
        return True

    def _first(self, number: int) -> Any:
        branch = self.branches[number]
        if self.plan.dim == "batch" or branch.carried is None:
            return branch.compute(self.block, self.now, self.side)
        carry = None if self.previous is None else self.previous.carries[number]
        hidden, self.carries[number] = branch.carried(self.block, self.now, self.side, carry)
        return hidden


def _barrier(chains: Sequence[_Chain]) -> None:
    if len(chains) > 1:
        for chain, now in zip(chains, jax.lax.optimization_barrier([c.now for c in chains]), strict=True):
            chain.now = now
