"""The ``jaxpar`` command."""
