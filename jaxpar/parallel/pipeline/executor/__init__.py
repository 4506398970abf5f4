"""Runs the table of a schedule tick by tick."""
