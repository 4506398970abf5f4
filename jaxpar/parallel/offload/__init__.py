"""Weights and optimizer state in host memory or on disk."""
