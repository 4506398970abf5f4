"""plan searches for the fastest layout of a model on a topology: it enumerates, estimates, compiles and explains."""
