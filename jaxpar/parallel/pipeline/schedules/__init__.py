"""Pipeline schedules as data: orders, ticks, slots, tables. No jax."""
