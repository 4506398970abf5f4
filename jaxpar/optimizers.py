"""Optimizers that need the logical dims of a model: Muon for its matrices, and weight decay that leaves some out."""

from jaxpar.training.decay import DecayMask, decay_mask
from jaxpar.training.muon import MuonConfig, matrices_of, muon

__all__ = ["DecayMask", "MuonConfig", "decay_mask", "matrices_of", "muon"]
