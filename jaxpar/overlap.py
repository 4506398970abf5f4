"""Overlap: communication that runs while the devices compute."""

from jaxpar.parallel.collectives.bucketing import CollectiveFusion
from jaxpar.parallel.overlap.branches import Branch
from jaxpar.parallel.overlap.interleave import interleave_batches

__all__ = [
    "Branch",
    "CollectiveFusion",
    "interleave_batches",
]
