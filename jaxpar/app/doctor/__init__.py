"""``jaxpar doctor``: check the machine, and the checkpoints of a run."""
