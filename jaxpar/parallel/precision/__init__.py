"""Dtypes of compute and collectives, fp8 matmuls and int8 arrays."""
