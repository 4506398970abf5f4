"""Attention: one function, with the kernel that the accelerator wants."""
