"""Several processes that run as one: found in an environment or started here, watched, ended, and started again."""
