"""Values of a manifest that are forged or damaged end a resume with an error that names the manifest and the value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.train.checkpointing import naming, resume
from jaxpar.app.train.spikes import LossWatch, SkippedBatches
from jaxpar.app.train_config import SpikeConfig
from jaxpar.data import Batches, batches
from jaxpar.errors import DamagedError, DataError, JaxparError


@pytest.fixture
def stream() -> Iterator[Batches]:
    with_epochs = batches(range(400), batch=2, seq=8, seed=1, epochs=1)
    yield with_epochs
    with_epochs.close()


def forged(stream: Batches, **changes: Any) -> dict[str, Any]:
    """The metadata of a saved step with other values."""
    watch = LossWatch(3, SpikeConfig(window=4))
    passed = SkippedBatches([[2, 3]], 1)
    return {"position": stream.get_state(), **watch.state(), **passed.state(), **changes}


def refused(kind: type[JaxparError], metadata: dict[str, Any], stream: Batches, *names: str) -> None:
    with raises(kind, "run/7/manifest.json", *names) as error, naming("run/7/manifest.json"):
        resume(metadata, stream, LossWatch(3, SpikeConfig(window=4)))
    assert exit_code(error.value) is (ExitCode.FAILED if kind is DamagedError else ExitCode.CONFIGURATION)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("skipped", -1, "got -1"),
        ("high", True, "got True"),
        ("bad", 2**48 + 1, "got 281474976710657"),
        ("bad", 10**5000, "type int"),
        ("rollbacks", "1", "got '1'"),
        ("recent", {"a": 1}, "{'a': 1}"),
        ("recent", [1.0, None], "[1.0, None]"),
        ("recent", [10**400], "got [1000"),
        ("passed", [[3, 2]], "[[3, 2]]"),
        ("passed", [[2, 3], [3, 4]], "[3, 4]]"),
        ("passed", [[0, 1]], "[[0, 1]]"),
        ("passed", [2, 3], "[2, 3]"),
        ("passed", [[1, 2, 3]], "[[1, 2, 3]]"),
        ("passed", {"1": 2}, "{'1': 2}"),
    ],
    ids=lambda value: value[:8] if isinstance(value, str) else type(value).__name__,
)
def test_a_forged_count_is_named(stream: Batches, key: str, value: Any, name: str) -> None:
    refused(DamagedError, forged(stream, **{key: value}), stream, key, name)


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"fingerprint": 1}, {"fingerprint": [1], "position": {}}])
def test_a_position_that_is_none_is_named(stream: Batches, value: Any) -> None:
    refused(DataError, forged(stream, position=value), stream, "position")


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (-1, "an integer"),
        (1.5, "an integer"),
        (True, "an integer"),
        (None, "an integer"),
        (25, "`next_index` 25"),
        (2**70, "`next_index` 1180591620717411303424"),
    ],
)
def test_a_position_that_does_not_exist_is_named_and_changes_nothing(stream: Batches, index: Any, why: str) -> None:
    first = stream.get_state()
    state = {**first, "position": {"next_index": index}}
    refused(DataError, forged(stream, position=state), stream, "position", why)
    assert stream.get_state() == first


def test_a_position_of_other_data_is_named(stream: Batches) -> None:
    state = stream.get_state()
    fingerprint = {**state["fingerprint"], "seed": [9] * 1000, "\x1b[31m": 1}
    forgery = forged(stream, position={**state, "fingerprint": fingerprint})
    refused(DataError, forgery, stream, "position", "9, ...]", r"\x1b[31m was")


def test_a_checkpoint_that_skipped_what_the_run_did_not_is_no_step_to_roll_back_to(stream: Batches) -> None:
    with raises(DamagedError, "passed", "the 2"):
        SkippedBatches([[2, 3]], 1).roll_back(9, 6, {"passed": [[2, 3], [5, 5]]})
