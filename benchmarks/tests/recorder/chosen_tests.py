"""The pytest plugin that runs the tests of the file ``JAXPAR_TESTS`` in its order, and writes each outcome down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_CHOSEN = Path(os.environ["JAXPAR_TESTS"])


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    place = {test: n for n, test in enumerate(_CHOSEN.read_text().splitlines())}
    left_out = [item for item in items if item.nodeid not in place]
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed or report.when == "call":
        with _CHOSEN.with_suffix(".outcomes").open("a") as stream:
            stream.write(json.dumps([report.nodeid, report.outcome]) + "\n")
