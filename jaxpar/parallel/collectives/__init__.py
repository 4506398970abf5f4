"""Collectives in several rounds, in int8, in one bit per number, and in buckets."""
