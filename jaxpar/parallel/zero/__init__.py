"""ZeRO and FSDP: stages as rules, weight gathering, sharded matmuls."""
