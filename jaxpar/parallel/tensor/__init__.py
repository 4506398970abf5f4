"""Tensor parallelism in two, 2.5 and three dimensions: matmuls whose operands are all sharded, and what they send."""
