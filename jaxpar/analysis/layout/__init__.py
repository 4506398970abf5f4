"""``explain``: how each tensor is sharded, and why."""
