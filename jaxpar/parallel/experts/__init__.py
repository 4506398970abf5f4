"""Mixture of experts: routing, dispatch over devices, and grouped matmuls."""
