"""Runs that SIGKILL ends twenty times resume to the same bytes.

Their steps are NumPy and all else is real; benchmarks/reliability/kills_and_corruptions.py also kills runs with jitted
steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reliability" / "kills_and_corruptions.py"


@pytest.mark.slow
def test_twenty_kills_while_starting_stepping_and_saving() -> None:
    command = [sys.executable, str(BENCHMARK), "--plain", "--kills", "20", "--steps", "60", "--corruptions", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"^pass  SIGKILL: 20 kills \((\d+) during a save, \d+ before .*: every step equals that of",
        done.stdout,
        re.MULTILINE,
    )
    assert found and int(found[1]) >= 5, done.stdout
