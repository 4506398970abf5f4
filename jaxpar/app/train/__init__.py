"""``jaxpar train``: the training loop, its checkpoints, metrics and reports."""
