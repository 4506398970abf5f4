"""Strict YAML, plotting, agreement between processes, simulated devices, and all jax contexts. Nothing here knows a mesh or a model."""
