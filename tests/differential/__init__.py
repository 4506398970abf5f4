"""Random cases of jaxpar's computations, each compared with a plain reference: ``python -m tests.differential
--help``."""
