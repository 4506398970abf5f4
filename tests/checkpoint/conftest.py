"""A state and its checkpoint, which several tests restore and copy, and none changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from placed_arrays import TX

import jaxpar as jp


@pytest.fixture(scope="session")
def state(mlp: Any) -> jp.TrainState:
    """A training state after one step, fully sharded over eight devices."""
    step = jp.train_step(mlp.layout(), mlp.loss)
    return step(jp.init(mlp.layout(), mlp.make, TX), mlp.batch())[0]


@pytest.fixture(scope="session")
def saved(state: jp.TrainState, mlp: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which that state is saved."""
    folder = tmp_path_factory.mktemp("saved") / "one"
    jp.save(folder, state, layout=mlp.layout(), metadata={"config": {"seed": 3}, "position": {"step": 1}})
    return folder
