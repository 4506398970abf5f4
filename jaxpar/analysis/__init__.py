"""Static analysis of a layout before it runs: explain, estimate, audit, ahead-of-time compilation, comparison."""
