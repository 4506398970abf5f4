"""Pipeline schedules as data: orders, ticks, buffer slots and tables, without JAX."""
