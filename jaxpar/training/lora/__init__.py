"""Low-rank adapters in a step: products with weights that have adapters, and states without their frozen weights."""
