"""``jaxpar generate``: generate text with a run's model."""
