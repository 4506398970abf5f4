"""The peak memory of a step, estimated without compiling it."""
