"""One training step: state, loss, gradients, update."""
