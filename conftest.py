"""Eight simulated devices for every test; the one place in the suite that sets them up, before jax is imported."""

import os

import pytest

from jaxpar.simulate import simulate_devices

simulate_devices(8)
# Programs of tests run once, on few numbers: making them fast takes longer than running them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The doctest collector would import these by their common name, and find the wrong one.
collect_ignore_glob = ["tests/*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")
