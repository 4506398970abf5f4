"""Attention over a sharded sequence: ring, Ulysses, hybrid."""
