"""Overlap: communication that runs while the devices compute."""

from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.overlap.branches import Branch
from jaxpar.parallel.overlap.interleave import interleave_batches
from jaxpar.parallel.overlap.sequence_dot import dot_scatter, gather_dot

__all__ = [
    "Branch",
    "CollectiveFusion",
    "dot_scatter",
    "gather_dot",
    "interleave_batches",
]
