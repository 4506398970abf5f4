"""Simulates eight devices for every test, and shares compiled programs between the processes of a run.

No other file of the suite sets these up; it must happen before the jax import.
"""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import profiles  # noqa: F401 (registers hypothesis profiles before the command line selects one)
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

# Many tests compile the same programs. A cache of this run alone, which the workers and the processes that tests start
# inherit, saves a fifth of the CPU time. Audits read source lines, so equal programs of other lines are other entries.
_RUN_CACHE = "" if "JAX_COMPILATION_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="jaxpar-tests-")
if _RUN_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _RUN_CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "true"

# Tracing makes many small objects: at Python's own thresholds, looking for cycles takes a twentieth of the CPU time.
gc.set_threshold(50_000, 20, 20)

pytest_plugins = ["suite"]

# The doctest collector would import these files by their common name and find the wrong one.
collect_ignore_glob = ["tests/*conftest.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests live until the end of the run


def pytest_unconfigure(config: pytest.Config) -> None:
    if _RUN_CACHE:
        shutil.rmtree(_RUN_CACHE, ignore_errors=True)
