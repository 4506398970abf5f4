"""Exchanges between processes: an error of one that all raise, values that must agree, and bytes of any length. One
process simulates all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from error_texts import raises

from jaxpar.errors import CheckpointError, ConfigError, LaunchError
from jaxpar.utils import multihost
from jaxpar.utils.multihost import check_same, gather, settled


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The function ``beside(other, rank=0)``: makes this process rank ``rank`` of two, where the other process always
    sends ``other``."""

    def play(other: Any, rank: int = 0) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        order = slice(None) if rank == 0 else slice(None, None, -1)
        monkeypatch.setattr(multihost, "gather", lambda mine: [mine, json.dumps(other).encode()][order])

    return play


def failing() -> int:
    raise CheckpointError("a/b: no checkpoint.")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_is_raised_by_both(beside: Callable[..., None], rank: int) -> None:
    beside(None, rank)
    with raises(CheckpointError, "a/b", "of 2"):
        settled(failing)
    beside(["CheckpointError", "a/b: no checkpoint."], rank)
    with raises(CheckpointError, "a/b", "of 2"):
        settled(lambda: 3)
    with pytest.raises(CheckpointError, match=r"^a/b: no checkpoint.$"):
        settled(failing)  # both fail in the same way


def test_an_error_that_nobody_foresaw_is_raised_by_both_too(beside: Callable[..., None]) -> None:
    beside(None)
    with pytest.raises(ZeroDivisionError):
        settled(lambda: 1 // 0)
    beside(["ZeroDivisionError", "integer division"], rank=1)
    with raises(LaunchError, "ZeroDivisionError"):
        settled(lambda: 3)
    beside(None)
    assert settled(lambda: 3) == 3


def test_what_is_not_the_same_is_named_with_both_values(beside: Callable[..., None]) -> None:
    mine = {"seed": 1, "stop": ["a"], "slots": None}
    beside(mine)
    check_same("generate", mine, "it.")
    for other, text in (
        ({**mine, "stop": []}, "0, []"),
        ({**mine, "slots": 3}, "3"),
        ({"prompt": "p", **mine}, "0, p"),
    ):
        beside(other)
        with raises(ConfigError, text):
            check_same("generate", mine, "it.")


def test_bytes_of_any_length_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest message decides the size of the second round."""
    every = [b"", b"x" * 2048, bytes(range(256)) * 20]
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    rows = lambda row: np.stack([multihost._row(one, row.size - 4) for one in every])
    monkeypatch.setattr(multihost, "gather_rows", rows)
    for mine in every:
        assert gather(mine) == every
