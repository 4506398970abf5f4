"""Attention written out in a traced program: it is recognised, and runs as jp.attention if its sequence is sharded."""
