"""The plugin that measures how close tests are to their bounds: its documented command runs and records them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_the_plugin_records_the_margin_of_a_test(tmp_path: Path) -> None:
    here = tmp_path / "here.jsonl"
    command = "-m pytest tests/analysis/test_roofline.py -n 0 -q -p tests.margins -o enable_assertion_pass_hook=true"
    subprocess.run(
        [sys.executable, *command.split(), "--margins", str(here)], cwd=TESTS.parent, check=True, capture_output=True
    )
    margins = [json.loads(line) for line in here.read_text().splitlines()]
    assert any(0 < margin["ratio"] <= 1 and margin["where"] for margin in margins)
    assert all(margin["passed"] for margin in margins)
