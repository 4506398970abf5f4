"""Tests that a mutated configuration is accepted or refused with a short error of ours; 4,000 under ``slow``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fuzzed_runs
import pytest

from jaxpar.errors import ConfigError


def checked(folder: Path, numbers: range, traced: int | None = None) -> None:
    summary = fuzzed_runs.run(folder, numbers, traced=traced)
    assert summary.findings == []
    assert summary.outcomes.total() == len(numbers)
    assert summary.outcomes["load: ConfigError"] and summary.outcomes["job: ConfigError"]
    assert summary.outcomes["resolved: OK"] > len(numbers) / 10


def test_mutated_configurations_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    checked(tmp_path, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(4))
def test_four_thousand_mutated_configurations(thousand: int, tmp_path: Path) -> None:
    checked(tmp_path, range(1000 * thousand, 1000 * thousand + 1000), traced=10)


def test_cases_are_the_same_in_every_run() -> None:
    assert [fuzzed_runs.case(n) for n in range(5)] == [fuzzed_runs.case(n) for n in range(5)]
    assert fuzzed_runs.case(1) != fuzzed_runs.case(2)


def spin(*_: Any) -> None:
    while True:
        time.process_time()


def fill(*_: Any) -> None:
    bytearray(b"x") * (2 * fuzzed_runs.MOST_BYTES)
    raise ConfigError("after much memory")


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fault", "limits", "text"),
    [
        (raising(KeyError("x")), {}, "KeyError at "),
        (raising(RecursionError()), {}, "RecursionError at "),
        (raising(ConfigError(f"a.yaml: got {fuzzed_runs.SECRET}")), {}, "an error of 32 characters: "),
        (spin, {"MOST_SECONDS": 0.2}, "TooSlow at "),
        (fill, {"MOST_BYTES": 2**26}, " MiB of memory"),
    ],
    ids=["raw", "recursion", "secret", "hang", "memory"],
)
def test_a_planted_fault_is_found(
    fault: Any, limits: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzed_runs, "load_run", fault)
    for name, limit in limits.items():
        monkeypatch.setattr(fuzzed_runs, name, limit)
    (found,) = fuzzed_runs.run(tmp_path, range(1)).findings
    assert text in found
