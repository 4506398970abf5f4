"""Ahead-of-time compilation for a topology that is not present."""
