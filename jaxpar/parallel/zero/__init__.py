"""ZeRO and FSDP: stages as rules, gathers of weights, and sharded matmuls."""
