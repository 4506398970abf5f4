"""Collectives in rounds, quantized, one bit a number, in buckets."""
