"""Simulate eight devices for every test; no other file of the suite sets them up, and it must happen before the jax
import."""

import os
import sys
from pathlib import Path

import pytest

from jaxpar.utils.simulate_devices import simulate_devices

if sys.dont_write_bytecode:
    # Importing jax and its dependencies takes 7 CPU seconds, of which 5 go into compiling their sources, in every
    # worker and in every process that a test starts. Where bytecode may not be written next to the sources, it goes
    # into pytest's own cache.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

simulate_devices(8)
# Test programs run once, on small arrays: optimizing them takes longer than running them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The doctest collector would import these files by their common name and find the wrong one.
collect_ignore_glob = ["tests/*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")
