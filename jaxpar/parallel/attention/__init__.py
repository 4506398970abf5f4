"""Attention on sharded arrays: masks, tiles, rings, head exchanges and the kernels of each accelerator."""
