"""Compression: pruning while a model trains, with masks that are sharded like their parameters."""

from jaxpar.training.pruning import PruneConfig, PruneState, prune, sparsity_of

__all__ = ["PruneConfig", "PruneState", "prune", "sparsity_of"]
