"""``jaxpar doctor``: the machine, and the checkpoints of a run."""
