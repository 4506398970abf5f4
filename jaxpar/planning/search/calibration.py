"""``Calibration``: the constants of the cost model that cannot be derived, as fitted to compiled programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from jaxpar.analysis.compile.gathers import overlaps_gathers
from jaxpar.sharding.hardware.topology import Topology

_HIDDEN = {
    "gather in layer": 1.0, "scatter in layer": 1.0, "gather in outside": 0.3, "scatter in outside": 0.0,
    "gather in step": 0.0, "scatter in step": 0.0, "reduce": 0.0, "tensor": 0.1, "ring": 1.0, "exchange": 0.0,
    "stages": 0.5, "ends": 0.0, "gather in chunks": 1.0, "scatter in chunks": 1.0,
    "ring in chunks": 0.5, "scatter beside ring": 0.0, "layers": 1.0,
    "gather in experts": 0.15, "scatter in experts": 0.0, "experts": 0.4,
}  # fmt: skip
_STALLED = {"gather in layer": 0.2, "scatter in layer": 0.2, "tensor": 0.4}

_BY_EINSUM = "xla_tpu_enable_windowed_einsum_for_reduce_scatter"
_LARGE = {"v6e": 32 * 2**20}
"""Accelerator → the bytes of the largest array that programs keep on the chip: a quarter of its vector memory."""


@dataclass(frozen=True)
class Calibration:
    """What cannot be derived, as fitted to programs that XLA:TPU compiled.

    Attributes:
      matmul_traffic: bytes through main memory for each byte of a matmul's operands and result.
      kept_traffic: the same for each byte that is kept for the backward pass.
      stash_traffic: the same where a pipeline stage stores it in slots for its microbatches.
      expert_traffic, expert_weight_traffic: the same for each byte of rows and weights that experts' matmuls have.
      rows_traffic: the same for each byte of rows that travel to experts.
      expert_gather_traffic: the same for each byte of experts' weights that a device gathers; a layer gathers them in
        the forward and in the backward pass. Of DeepSeek's experts under FSDP 8 × EP 2 a device gathers 8.9 GB twice a
        step. In the compiled program the gathers move 24 GB through main memory, the reduce-scatters of the gradients
        10, and copies without a source in the model, around both, 44.
      chunk_traffic, expert_chunk_traffic: bytes through main memory in each tick for each weight of a chunk, where a
        stage has several, and in addition for each weight of experts. In a compiled 8B under PP 4 × ring 4 with 8
        chunks and 32 microbatches, slices of a stage's weights, copies of them, and updates of gradient sums move 1.4
        of 2.0 TB; in DeepSeek's experts under PP 4 × EP 2 × ring 2 with 4 chunks, 0.3 of 0.7.
      state_traffic: the same for each byte of parameters and optimizer state.
      whole_traffic: bytes sent for each byte of a weight that XLA gathers whole.
      rows_copies: bytes of rows that a layer with experts holds, for each byte of its matmuls' operands and results.
      gathered_copies: gathered copies of the residual stream under sequence parallelism.
      stage_copies: copies of the residual stream of all microbatches in a pipeline.
      step_copies: the part of the weights gathered before a step that is alive at the peak.
      beside_ring: the part of a step's work beside which a ring's keys travel; what takes longer outlasts it.
      large: arrays of more bytes do not fit into the memory on the chip. Elsewhere than on v6e compute hides their
        traffic, and no array counts as large.
      large_activations, large_weights, large_kept: bytes through main memory for each byte of large operands and
        results of matmuls, of large weights, and of large arrays that are kept, in addition to those above. With them
        1B, 8B and 70B on v6e move 1.04, 1.05 and 1.06 of what their compiled programs move.
      scatters_by_einsum: whether the compiler scatters the gradients of large weights by einsum, which reads an operand
        again for every second device.
      hidden: kind of transfer → the fraction of its time that the compiler overlaps with compute.
      stalled: kind of transfer → the fraction of that for which it outlasts the compute.
    """

    matmul_traffic: float = 0.52
    kept_traffic: float = 2.6
    stash_traffic: float = 5.2
    expert_traffic: float = 1.435
    expert_weight_traffic: float = 1.35
    rows_traffic: float = 23.5
    expert_gather_traffic: float = 4.4
    chunk_traffic: float = 24.0
    expert_chunk_traffic: float = 32.0
    state_traffic: float = 4.6
    whole_traffic: float = 1.75
    rows_copies: float = 0.9
    gathered_copies: float = 4.0
    stage_copies: float = 6.0
    step_copies: float = 0.6
    beside_ring: float = 0.4
    large: float = math.inf
    large_activations: float = 2.8
    large_weights: float = 0.5
    large_kept: float = 7.0
    scatters_by_einsum: bool = True
    hidden: Mapping[str, float] = field(default_factory=lambda: dict(_HIDDEN))
    stalled: Mapping[str, float] = field(default_factory=lambda: dict(_STALLED))

    @classmethod
    def of(cls, topology: Topology, compiler_options: Mapping[str, Mapping[str, Any]]) -> Self:
        """Returns the constants for the compiler of a topology; the options are by platform."""
        options, kind = compiler_options.get(topology.platform) or {}, topology.accelerator.kind
        hidden = dict(_HIDDEN)
        if not overlaps_gathers(kind, options):
            alone = [what for what in _HIDDEN if what.startswith("gather") and what != "gather in chunks"]  # permutes
            hidden |= dict.fromkeys(alone, 0.0)
        by_einsum = options.get(_BY_EINSUM) is not False
        return cls(large=_LARGE.get(kind, math.inf), scatters_by_einsum=by_einsum, hidden=hidden)
