"""Token generation: the generator, its key/value cache, sampling, and pipelined decoding."""
