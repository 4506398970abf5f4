"""How a run of the suite is divided over processes and machines, and the line that says how much of it ran."""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

WORKER_GIB = 1.5
"""Memory of one worker: jax, flax, and the programs of a run on eight simulated devices."""

SLOW, OTHER = "slow tests", "others"
COLLECTED = pytest.StashKey[dict[str, int]]()
CPU_SECONDS = pytest.StashKey[float]()


def cores(quota: str | None) -> int:
    """Cores that this process may use, where ``quota`` is the text of the control group's ``cpu.max``."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit, _, period = (quota or "max").partition(" ")
    return usable if limit == "max" else max(1, min(usable, int(limit) // int(period)))


def workers(cores: int, memory_gib: float) -> int:
    """One worker a core, as far as memory reaches."""
    return max(1, min(cores, int(memory_gib / WORKER_GIB)))


def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: a container has as many cores as its quota, which xdist does not read."""
    if value := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(value)
    quota = Path("/sys/fs/cgroup/cpu.max")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return workers(cores(quota.read_text() if quota.exists() else None), memory)


def shard_of(name: str, shards: int) -> int:
    """The shard, from 1, that runs a test: all cases of one function are in the same, because they share programs."""
    return zlib.crc32(name.partition("[")[0].encode()) % shards + 1


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/4"`` as ``(2, 4)``."""
    shard, _, shards = text.partition("/")
    if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
        raise pytest.UsageError(f'--shard {text}: two numbers are expected, as in "--shard 1/4" to "--shard 4/4".')
    return int(shard), int(shards)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the selected tests, as in --shard 1/4")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shard"):
        parse_shard(config.getoption("--shard"))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    every = Counter(SLOW if item.get_closest_marker("slow") else OTHER for item in items)
    if text := config.getoption("--shard"):
        shard, shards = parse_shard(text)
        left = [item for item in items if shard_of(item.nodeid, shards) != shard]
        items[:] = [item for item in items if shard_of(item.nodeid, shards) == shard]
        config.hook.pytest_deselected(items=left)
    config.stash[COLLECTED] = dict(every)
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
        session.config.workeroutput |= {"collected": session.config.stash.get(COLLECTED, {}), "cpu_seconds": seconds}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended: its CPU time counts, and what it collected, which is the same in all."""
    output = getattr(node, "workeroutput", None) or {}
    stash = node.config.stash
    stash[CPU_SECONDS] = stash.get(CPU_SECONDS, 0.0) + output.get("cpu_seconds", 0.0)
    stash[COLLECTED] = output.get("collected") or stash.get(COLLECTED, {})


def closing_line(collected: dict[str, int], ran: dict[str, int], cpu_seconds: float) -> str:
    """``"ran 2,000 of 2,000 slow tests and 0 of 5,000 others in 90.0 CPU minutes"``."""
    parts = [f"{ran.get(kind, 0):,} of {collected.get(kind, 0):,} {kind}" for kind in (SLOW, OTHER)]
    return f"ran {' and '.join(parts)} in {cpu_seconds / 60:.1f} CPU minutes"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if COLLECTED not in config.stash or config.option.collectonly:
        return
    outcomes = ("passed", "failed", "error", "xfailed", "xpassed")
    reports = [report for outcome in outcomes for report in terminalreporter.stats.get(outcome, ())]
    slow = {report.nodeid: "slow" in report.keywords for report in reports if hasattr(report, "keywords")}
    ran = Counter(SLOW if is_slow else OTHER for is_slow in slow.values())
    skipped = len(terminalreporter.stats.get("skipped", ()))
    line = closing_line(config.stash[COLLECTED], ran, config.stash.get(CPU_SECONDS, time.process_time()))
    terminalreporter.write_line(line + (f" ({skipped} skipped)" if skipped else ""))
