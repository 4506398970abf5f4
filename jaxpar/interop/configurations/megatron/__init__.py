"""Megatron-LM arguments: read from a shell script or a list, and what each becomes."""
