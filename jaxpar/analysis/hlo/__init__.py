"""``audit``: what a compiled program sends, computes and holds."""
