"""Attention over a sharded sequence: ring, Ulysses and hybrid."""
