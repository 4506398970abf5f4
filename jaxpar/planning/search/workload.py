"""``Workload``: what one step of a model computes and keeps, by logical dim, from traces that know no mesh.

From it the cost of any layout follows without another trace: how many FLOPs a device does, how many bytes it holds,
and what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxpar.parallel.experts.options import ExpertCall
from jaxpar.planning.layers.find import RepeatedLayers
from jaxpar.planning.search.fsdp import StoredArray
from jaxpar.planning.search.plan import BATCH, SEQ, Plan

type Factor = tuple[str | None, int]
"""A factor of a dim: its name, if it has one, and its size."""
type Factors = tuple[Factor, ...]


@dataclass(frozen=True)
class Matmul:
    """A matmul or convolution of the forward pass.

    Attributes:
      shared: factors that both operands and the result have.
      rows: further factors of the activation, which the result has.
      columns: those of the weight, or of the second activation.
      summed: the factors that are summed over.
      weight: whether one operand is a weight.
      layered: whether it runs in a layer of a stack, or of equal separate layers.
      times: how often it runs in a step.
      source: a number that matmuls of the same activation share.
      groups: factors of the weight that neither the activation nor the result has: each row takes one of its matrices.
    """

    shared: Factors
    rows: Factors
    columns: Factors
    summed: Factors
    weight: bool
    layered: bool
    times: int
    source: int
    groups: Factors = ()

    @property
    def choices(self) -> int:
        """The rows of each token: the experts that it chooses, or 1."""
        return count(tuple(f for f in self.rows if f[0] is None)) if self.groups else 1

    @property
    def attends(self) -> bool:
        """Whether it is one of the two matmuls of attention: queries with keys, or scores with values."""
        return not self.weight and [n for n, _ in (*self.rows, *self.columns, *self.summed)].count(SEQ) > 1

    @property
    def flops(self) -> float:
        """FLOPs in a step, without a mesh."""
        return 2.0 * self.times * count(self.shared, self.rows, self.columns, self.summed)


@dataclass(frozen=True)
class KeptArray:
    """An array by its named factors and the bytes of one element.

    Attributes:
      path: a parameter's path; "" for an activation.
      factors: of its dims.
      itemsize: bytes of an element.
      rows: whether it has a row for each expert that a token chooses.
    """

    path: str
    factors: Factors
    itemsize: int
    rows: bool = False

    @property
    def bytes(self) -> int:
        """Bytes, without a mesh."""
        return count(self.factors) * self.itemsize


@dataclass(frozen=True)
class OutsideLoops:
    """What the backward pass keeps where no loop runs the layers, and XLA sees both passes of all of them.

    Attributes:
      kept: the activations that it keeps.
      again: the largest activation that it computes again from these; empty if there is none.
      keeps_weights: whether the layers' weights are gathered once for both passes. If layers are recomputed, they are
        gathered in each.
    """

    kept: tuple[KeptArray, ...]
    again: tuple[KeptArray, ...] = ()
    keeps_weights: bool = False


@dataclass(frozen=True)
class Backward:
    """What the backward pass of one recomputation policy keeps and does.

    Attributes:
      kept: the activations that it keeps, where a loop or the stages of a pipeline store them.
      weight_passes: FLOPs of a whole step divided by those of its forward pass, for the layers' matmuls with weights.
      attention_passes: the same for matmuls of two activations.
      outside_loops: what it keeps instead where the layers run without a loop; ``None`` if a scan runs them.
    """

    kept: tuple[KeptArray, ...]
    weight_passes: float
    attention_passes: float
    outside_loops: OutsideLoops | None = None

    def without_loops(self, plan: Plan) -> OutsideLoops | None:
        """Returns what it keeps outside of loops, if a plan runs the layers so; else ``None``."""
        return self.outside_loops if plan.pipeline == 1 else None

    def kept_by(self, plan: Plan) -> tuple[KeptArray, ...]:
        """Returns the activations that it keeps under a plan."""
        alone = self.without_loops(plan)
        return self.kept if alone is None else alone.kept


@dataclass(frozen=True)
class ExpertLayers:
    """Equal calls of :func:`jaxpar.experts`.

    Attributes:
      call: its sizes and options.
      times: how often it runs in a step.
      layered: whether it runs in a layer of a stack, or of equal separate layers.
    """

    call: ExpertCall
    times: int
    layered: bool


@dataclass(frozen=True)
class Workload:
    """One step of a model over all devices.

    Attributes:
      matmuls: of the forward pass.
      params: the parameters.
      backward: recomputation policy → what it keeps and does.
      state_bytes: bytes of optimizer state for each byte of parameters.
      sizes: logical dim → its largest size.
      names: all logical dims, those of hints included.
      layers: the repeated layers.
      flash: whether attention runs in tiles, which skip masked pairs and write no scores. It does so in any case where
        the sequence is sharded.
      causal: whether no query sees later keys.
      compute_bytes: bytes of an element of activations and gathered weights.
      reduce_bytes: bytes of an element of reduced gradients.
      experts: the layers with experts.
      in_pieces: as ``backward``, where devices process the tokens of experts in pieces, which are computed again in the
        backward pass; empty without experts.
      stored: the parameters again, by their dims as rules see them.
      compiler_options: platform, such as ``tpu`` → the options that its compiler is given.
    """

    matmuls: tuple[Matmul, ...]
    params: tuple[KeptArray, ...]
    backward: Mapping[str, Backward]
    state_bytes: float
    sizes: Mapping[str, int]
    names: tuple[str, ...] = ()
    layers: tuple[RepeatedLayers, ...] = ()
    flash: bool = False
    causal: bool = True
    compute_bytes: int = 2
    reduce_bytes: int = 4
    experts: tuple[ExpertLayers, ...] = ()
    in_pieces: Mapping[str, Backward] = field(default_factory=dict)
    stored: tuple[StoredArray, ...] = ()
    compiler_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.bytes for p in self.params)

    @cached_property
    def param_count(self) -> int:
        """The number of parameters."""
        return sum(count(p.factors) for p in self.params)

    @property
    def policies(self) -> tuple[str, ...]:
        """The recomputation policies to choose from; ``""`` alone, which is what the model does, if there are none."""
        return tuple(name for name in self.backward if name) or ("",)

    @property
    def own_policy(self) -> str:
        """The recomputation policy that keeps as much as the model does by itself; ``""`` if there is none."""
        kept = {name: sum(array.bytes for array in back.kept) for name, back in self.backward.items()}
        return next((name for name, size in kept.items() if name and size == kept[""]), "")

    @property
    def model_flops(self) -> float:
        """FLOPs of the matmuls of a step that recomputes nothing, without a mesh; causal attention counts by half."""
        return 3.0 * sum(m.flops * (0.5 if m.attends and self.causal else 1.0) for m in self.matmuls)

    def of_batch(self, batch: int) -> Workload:
        """Returns the step of another number of sequences over all devices."""
        own = self.sizes[BATCH]

        def scaled(factors: Factors) -> Factors:
            return tuple((name, size * batch // own if name == BATCH else size) for name, size in factors)

        matmuls = tuple(
            replace(m, shared=scaled(m.shared), rows=scaled(m.rows), columns=scaled(m.columns), summed=scaled(m.summed))
            for m in self.matmuls
        )

        def arrays(found: tuple[KeptArray, ...]) -> tuple[KeptArray, ...]:
            return tuple(replace(array, factors=scaled(array.factors)) for array in found)

        def passes(back: Backward) -> Backward:
            alone = back.outside_loops
            if alone is not None:
                alone = replace(alone, kept=arrays(alone.kept), again=arrays(alone.again))
            return replace(back, kept=arrays(back.kept), outside_loops=alone)

        backward, in_pieces = (
            {name: passes(back) for name, back in table.items()} for table in (self.backward, self.in_pieces)
        )
        sizes = {**self.sizes, BATCH: batch}
        return replace(self, matmuls=matmuls, backward=backward, in_pieces=in_pieces, sizes=sizes)


def count(*factors: Factors) -> int:
    """Returns the product of the sizes of all factors."""
    return math.prod(size for group in factors for _, size in group)
