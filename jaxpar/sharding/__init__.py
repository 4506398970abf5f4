"""Which mesh axes shard which dim, and why: mesh, rules, resolution, layout."""
