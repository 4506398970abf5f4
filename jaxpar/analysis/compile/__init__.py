"""Compilation for a topology that is not here, ahead of time."""
