"""Pipelines: a schedule's table carried out inside one jit, with gradients by hand."""
