"""ZeRO stage 1 in a step without microbatches: communication while the layers compute, where the compiler can do that.

A step that gathers all weights first and reduces all gradients last overlaps nothing. With a single microbatch nothing
requires this: each gradient can be reduced where it arises, and the layers of a scan can gather their own weights, if
what they gather is kept for the backward pass. Each weight still crosses the mesh once, and so does each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.parallel.collectives.gather_reduce import batch_axes
from jaxpar.parallel.precision.policy import INT8
from jaxpar.parallel.zero.sharded_matmul import GATHERED
from jaxpar.sharding.hardware.topology import platform_of
from jaxpar.sharding.layout import Layout
from jaxpar.training.exact_weights import SAME_NUMBERS
from jaxpar.training.microbatches import StepConfig
from jaxpar.utils.jaxprs import follow, inner_jaxprs, opened, scan_counts

MOST_DEVICES = 16
"""The most devices of an axis over which the TPU compiler scatters gradients in rings that overlap with matmuls.

Over the 256 devices of a v5e 16x16 it all-reduces full gradients instead, which sends twice the bytes.
"""
type _Policy = Callable[..., Any] | None
type _Weights = frozenset[int]
_NONE: _Weights = frozenset()


def overlaps(layout: Layout, config: StepConfig) -> bool:
    """Returns whether a step of ZeRO stage 1 reduces gradients where they arise, and lets layers gather their weights.

    It does if it has one microbatch, and if the compiler then overlaps the reductions and sums as precisely: for TPUs,
    over one mesh axis, with gradients summed in the dtype in which they are computed.
    """
    stage_1 = config.weight_gather == config.grad_reduction == "per_step" and not config.per_device_grads
    if not stage_1 or config.grad_accum_steps > 1 or config.pipeline is not None:
        return False
    used = [axis for axis, size in layout.sizes.items() if size > 1]
    if tuple(used) != batch_axes(layout) or len(used) != 1 or layout.sizes[used[0]] > MOST_DEVICES:
        return False
    computed = config.precision.compute
    if computed is None or INT8 in (config.precision.gather, config.precision.reduce):
        return False
    same = config.precision.summing(computed) is None and config.precision.gather in (None, computed)
    grouped = any(isinstance(value, tuple) for value in vars(config.fusion).values())
    return same and not grouped and platform_of(layout.mesh) == "tpu"


def gathered_in_layers(run: Callable[..., Any], params: Any) -> list[bool]:
    """Returns, for each parameter, whether loops gather all that they use of it and keep it for the backward pass.

    Args:
      run: the loss as a function of the parameters.
      params: the parameters, as arrays or shapes.

    >>> import jax.numpy as jnp
    >>> import jaxpar as jp
    >>> rules = jp.Rules(batch="data", embed=None, mlp=None, params={"embed": "data"})
    >>> layer = lambda x, w: (x @ jp.gather_weight(w, "embed", "mlp"), None)
    >>> loss = lambda p: (jax.lax.scan(layer, jnp.ones((8, 4)), p["layers"])[0] @ p["head"]).sum()
    >>> with jp.Layout(jp.MeshSpec(data=8).abstract(), rules):
    ...     gathered_in_layers(loss, {"head": jnp.ones((4, 8)), "layers": jnp.ones((3, 4, 4))})
    [False, True]
    """
    uses = _Uses()
    traced = jax.make_jaxpr(run)(params).jaxpr
    left = uses.follow(traced, [frozenset((i,)) for i in range(len(traced.invars))], None)
    other = uses.other.union(*left)
    return [i in uses.gathered and i not in other for i in range(len(traced.invars))]


class _Uses:
    """Follows weights through a program to the operations that use them.

    Attributes:
      gathered: the weights that some loop gathers and keeps, one slice in each iteration.
      other: the weights that something else uses.
    """

    def __init__(self) -> None:
        self.gathered, self.other = set[int](), set[int]()
        self._loops = 0

    def follow(self, jaxpr: Jaxpr, given: Sequence[_Weights], policy: _Policy) -> list[_Weights]:
        """Returns the weights that each result is, if the arguments are ``given``.

        ``policy`` decides what a ``jax.checkpoint`` around the program keeps; it is ``None`` if everything is kept.
        """
        return follow(jaxpr, given, _NONE, lambda eqn, operands: self._results(eqn, operands, policy))

    def _results(self, eqn: JaxprEqn, operands: list[_Weights], policy: _Policy) -> list[_Weights]:
        name, count, all_of = eqn.primitive.name, len(eqn.outvars), _NONE.union(*operands)
        if not all_of:
            return [_NONE] * count
        if name == "name" and eqn.params["name"] == GATHERED:
            kept = policy is None or _keeps(policy, eqn)
            (self.gathered if self._loops and kept else self.other).update(all_of)
            return [_NONE] * count
        if name == "optimization_barrier":
            return operands
        if name in SAME_NUMBERS or name in ("name", "dynamic_slice"):
            return [all_of] * count
        found = self._inside(eqn, operands, policy)
        if found is None:
            self.other |= all_of
            return [_NONE] * count
        return found

    def _inside(self, eqn: JaxprEqn, operands: list[_Weights], policy: _Policy) -> list[_Weights] | None:
        """Returns the weights that the results of a call, a loop or a branch are; ``None`` for other operations."""
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "scan":
            return self._scan(eqn, operands, policy)
        if name == "cond":
            self.other |= operands[0]
            branches = [self.follow(opened(branch), operands[1:], policy) for branch in params["branches"]]
            return [_NONE.union(*found) for found in zip(*branches, strict=True)]
        if name in ("remat2", "checkpoint", "remat") and policy is None:
            policy = params["policy"] or jax.checkpoint_policies.nothing_saveable  # an outer policy decides otherwise
        bodies = [opened(body) for body in inner_jaxprs(eqn)]
        body = next((body for body in bodies if len(body.invars) == len(operands)), None)
        if name == "while" or body is None or len(body.outvars) != count:
            return None
        return self.follow(body, operands, policy)

    def _scan(self, eqn: JaxprEqn, operands: list[_Weights], policy: _Policy) -> list[_Weights]:
        consts, carries = scan_counts(eqn)
        whole = consts + carries
        # A weight that all iterations use would be gathered in each of them.
        self.other |= _NONE.union(*operands[:whole])
        self._loops += 1
        results = self.follow(opened(eqn.params["jaxpr"]), [*[_NONE] * whole, *operands[whole:]], policy)
        self._loops -= 1
        self.other |= _NONE.union(*results[:carries])
        return [*[_NONE] * carries, *results[carries:]]


def _keeps(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Whether a checkpoint policy keeps the result of an equation on the device."""
    kept = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return kept is True or type(kept).__name__ == "SaveableType"
