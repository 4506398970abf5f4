"""Names found for the dims of a model that names none, and layouts found for a model and a topology."""
