"""Loss and gradients of a step whose layers run in a pipeline."""
