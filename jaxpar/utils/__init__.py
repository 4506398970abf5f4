"""Strict YAML, plotting, agreement between processes, simulated devices and jax contexts.

No module here depends on a mesh or a model.
"""
