"""Attention kernels of one device: dense, GPU flash, TPU splash."""
