"""``explain``: why each tensor is sharded as it is."""
