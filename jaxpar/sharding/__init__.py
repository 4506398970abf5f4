"""Meshes, rules and layouts: which mesh axes shard each dim of a tensor, and why."""
