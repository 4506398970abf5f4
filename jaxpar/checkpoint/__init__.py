"""State that survives: checkpoints with a manifest that vouches for every byte ([all](reliability.md))."""
