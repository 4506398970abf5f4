"""Checkpoints: a manifest with a checksum of every tensor piece and every file (docs/guides/checkpoints.md)."""
