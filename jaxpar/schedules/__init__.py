"""Schedules of pipelines: pure data, from orders to the table that an executor reads."""
