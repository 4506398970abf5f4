"""Two half batches interleaved, so that communication overlaps with compute."""
