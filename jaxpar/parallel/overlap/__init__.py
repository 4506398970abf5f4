"""Two half batches interleaved, so that the communication of one overlaps with the compute of the other."""
