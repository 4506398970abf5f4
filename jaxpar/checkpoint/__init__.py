"""Checkpoints: a manifest with a checksum of every tensor piece and every file ([guide](reliability.md))."""
