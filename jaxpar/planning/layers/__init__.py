"""The repeated layers of a loss that names none: they are found in its trace, and recomputed by a policy."""
