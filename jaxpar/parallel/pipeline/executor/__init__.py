"""A schedule's table run tick by tick."""
