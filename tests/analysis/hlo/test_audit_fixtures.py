"""The stored programs are listed in the index, small, and free of folders of the machine that compiled them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import make_fixtures
import pytest

FIXTURES = Path(__file__).parent / "fixtures"
INDEX = json.loads((FIXTURES / "index.json").read_text(encoding="utf-8"))


def test_each_stored_program_is_noted_and_each_note_has_its_program():
    assert {path.name.removesuffix(".hlo.gz") for path in FIXTURES.glob("*.gz")} == set(INDEX)


@pytest.mark.parametrize("name", INDEX)
def test_a_stored_program_is_small_and_names_no_folder_of_a_machine(name, stored_text):
    assert (FIXTURES / f"{name}.hlo.gz").stat().st_size < 150_000
    files = re.findall(r'(?m)^\d+ "(.*\.py)"$', stored_text(name))
    assert files and all(re.match(r"(jaxpar|tests/audit|tests/analysis/hlo|site-packages)/", file) for file in files), (
        files
    )
    assert set(INDEX[name]["compiled_with"]) == set(make_fixtures.COMPILERS[name.partition("_")[0]])


def test_scrubbing_keeps_what_says_whose_file_it_is():
    root = Path(__file__).parents[3]
    text = f'1 "{root}/jaxpar/training/step.py"\n2 "/opt/env/lib/python3.12/site-packages/flax/nnx/graphlib.py"\n'
    assert make_fixtures.scrub(text) == '1 "jaxpar/training/step.py"\n2 "site-packages/flax/nnx/graphlib.py"\n'
