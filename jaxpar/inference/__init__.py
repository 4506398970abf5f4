"""Prefill, decode, KV cache and sampling, sharded by the same rules."""
