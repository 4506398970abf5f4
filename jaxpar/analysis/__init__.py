"""What a layout costs and does, before it runs: explain, estimate, audit, compile, compare."""
