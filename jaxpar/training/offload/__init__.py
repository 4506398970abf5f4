"""Updates of a state in host memory or on disk."""
