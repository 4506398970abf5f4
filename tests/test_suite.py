"""How a run of the suite is divided, and its closing line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import suite

pytest_plugins = ["pytester"]


def test_a_container_has_the_cores_of_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    assert [suite.cores(quota) for quota in (None, "max 100000\n", "250000 100000\n", "50000 100000\n")] == [
        12,
        12,
        2,
        1,
    ]
    assert suite.cores("2400000 100000\n") == 12


def test_workers_fit_into_memory() -> None:
    assert [suite.workers(12, gib) for gib in (64, 8, 1)] == [12, 5, 1]


@pytest.mark.parametrize("text", ["", "4", "0/4", "5/4", "a/b", "1/4/2", "-1/4"])
def test_a_shard_is_two_numbers(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard"):
        suite.parse_shard(text)


@pytest.fixture
def three_tests(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the plugin alone, and three tests: one of many cases, one slow, one that fails."""
    pytester.makeconftest(Path(suite.__file__).read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nmarkers = slow: takes minutes\n")
    pytester.makepyfile("""
        import pytest
        @pytest.mark.parametrize("i", range(20))
        def test_cases(i): pass
        @pytest.mark.slow
        def test_slow(): pytest.skip("no")
        def test_fails(): assert False
        @pytest.mark.slow
        def test_slow_too(): pass
    """)
    return pytester


def test_the_closing_line_counts_what_ran(three_tests: pytest.Pytester) -> None:
    done = three_tests.runpytest_subprocess("-m", "slow", "-n2", "-p", "no:cacheprovider")
    done.stdout.fnmatch_lines(["ran 1 of 2 slow tests and 0 of 21 others in * CPU minutes (1 skipped)"])


def test_every_test_is_in_one_shard_and_cases_stay_together(three_tests: pytest.Pytester) -> None:
    done = three_tests.runpytest_subprocess("--collect-only", "-q", "-n0", "--shard=2/3")
    functions = ("test_cases", "test_slow", "test_fails", "test_slow_too")
    file = next(three_tests.path.glob("test_*.py")).name
    chosen = {name for name in functions if suite.shard_of(f"{file}::{name}", 3) == 2}
    assert {line.partition("::")[2].partition("[")[0] for line in done.outlines if "::" in line} == chosen
    for name in functions:
        assert len({suite.shard_of(f"{file}::{name}[{i}]", 3) for i in range(20)}) == 1
        assert suite.shard_of(f"{file}::{name}", 3) in (1, 2, 3)
