"""All tests of asynchronous pipelines run in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def fp64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
