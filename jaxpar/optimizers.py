"""Optimizers that need the logical dims of a model: Muon for its matrices, and Adam for all other parameters."""

from jaxpar.training.muon import MuonConfig, matrices_of, muon

__all__ = ["MuonConfig", "matrices_of", "muon"]
