"""The training run: configuration, loop, metrics, verification. Nothing here is imported by ``import jaxpar``."""
