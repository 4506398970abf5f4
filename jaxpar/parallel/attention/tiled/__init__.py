"""Flash attention in tiles."""
