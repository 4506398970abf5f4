"""Eight simulated devices for every test; the one place in the suite that sets them up, before jax is imported."""

import os
import sys
from pathlib import Path

import pytest

from jaxpar.utils.simulate_devices import simulate_devices

if sys.dont_write_bytecode:
    # Of the 7 CPU seconds that importing jax and what stands on it takes, 5 go into compiling their sources, in every worker and in every
    # process that a test starts. Bytecode that may not lie beside the sources is kept with pytest's own cache.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

simulate_devices(8)
# Programs of tests run once, on few numbers: making them fast takes longer than running them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# The doctest collector would import these by their common name, and find the wrong one.
collect_ignore_glob = ["tests/*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")
