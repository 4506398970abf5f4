"""The dtypes of compute and collectives, fp8 matmuls, int8 arrays."""
