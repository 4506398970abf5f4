"""``jaxpar generate``: text from a run's model."""
