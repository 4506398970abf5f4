"""``jaxpar train``: the loop, its checkpoints, metrics and reports."""
