"""A state and its checkpoint, which several tests restore and copy, and none changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_step import drawn
from placed_arrays import TX

import jaxpar as jp


@pytest.fixture(scope="session")
def state(mlp: Any) -> jp.TrainState:
    """A training state of step 1, fully sharded over eight devices."""
    shapes = jp.abstract_state(mlp.layout(), mlp.make, TX)
    return dataclasses.replace(drawn(shapes), step=jax.device_put(jnp.int32(1), shapes.step.sharding))


@pytest.fixture(scope="session")
def saved(state: jp.TrainState, mlp: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which that state is saved."""
    folder = tmp_path_factory.mktemp("saved") / "one"
    jp.save(folder, state, layout=mlp.layout(), metadata={"config": {"seed": 3}, "position": {"step": 1}})
    return folder
