"""The pytest plugin of the recorder in ``sitecustomize.py``: one record for each test."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sitecustomize import RECORDER  # type: ignore[import-not-found, unused-ignore]


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    RECORDER.clear()
    start = _cpu_seconds()
    result = yield
    RECORDER.record(item.nodeid, _cpu_seconds() - start)
    return result


def pytest_runtest_logreport(report: Any) -> None:
    if report.outcome != "passed":
        RECORDER.outcome = report.outcome
