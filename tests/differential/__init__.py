"""Random cases of what jaxpar computes, each held against a plain reference: ``python -m tests.differential --help``."""
