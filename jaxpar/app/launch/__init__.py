"""Processes that run as one: found or started, watched, restarted."""
