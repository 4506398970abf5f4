"""Attention: masks, tiles, rings, exchanges of heads, and the kernels of each accelerator."""
