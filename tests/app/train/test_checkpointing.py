"""Values of a manifest that are forged or damaged end a resume with an error that names the manifest and the value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.train.checkpointing import naming, resume
from jaxpar.app.train.spikes import LossWatch, SkippedBatches
from jaxpar.app.train_config import SpikeConfig
from jaxpar.checkpoint.manifest import REMEDY
from jaxpar.data import Batches, batches
from jaxpar.errors import DamagedError, DataError, JaxparError

COUNT = "an integer from 0 to 281,474,976,710,656"
RANGES = "passed must be a list of ranges [first, last] of batches, in order, got"


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


def refused(kind: type[JaxparError], metadata: dict[str, Any], stream: Batches) -> str:
    """The error of a resume, without the name of the manifest, with which it begins."""
    with pytest.raises(kind) as error, naming("run/7/manifest.json"):
        resume(metadata, stream, LossWatch(3, SpikeConfig(window=4)))
    text = str(error.value)
    assert text.startswith("run/7/manifest.json: metadata: ")
    assert exit_code(error.value) is (ExitCode.FAILED if kind is DamagedError else ExitCode.CONFIGURATION)
    return text.removeprefix("run/7/manifest.json: metadata: ")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("skipped", -1, f"skipped must be {COUNT}, got -1."),
        ("high", True, f"high must be {COUNT}, got True."),
        ("bad", 2**48 + 1, f"bad must be {COUNT}, got 281474976710657."),
        ("bad", 10**5000, f"bad must be {COUNT}, got a value of type int."),
        ("rollbacks", "1", f"rollbacks must be {COUNT}, got '1'."),
        ("recent", {"a": 1}, "recent must be a list of finite numbers, got {'a': 1}."),
        ("recent", [1.0, None], "recent must be a list of finite numbers, got [1.0, None]."),
        ("recent", [10**400], "recent must be a list of finite numbers, got [1000"),
        ("passed", [[3, 2]], f"{RANGES} [[3, 2]]."),
        ("passed", [[2, 3], [3, 4]], f"{RANGES} [[2, 3], [3, 4]]."),
        ("passed", [[0, 1]], f"{RANGES} [[0, 1]]."),
        ("passed", [2, 3], f"{RANGES} [2, 3]."),
        ("passed", [[1, 2, 3]], f"{RANGES} [[1, 2, 3]]."),
        ("passed", {"1": 2}, f"{RANGES} {{'1': 2}}."),
    ],
    ids=lambda value: value[:8] if isinstance(value, str) else type(value).__name__,
)
def test_a_forged_count_is_named(stream: Batches, key: str, value: Any, text: str) -> None:
    found = refused(DamagedError, forged(stream, **{key: value}), stream)
    assert found.startswith(text) and found.endswith(f" {REMEDY}")


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"fingerprint": 1}, {"fingerprint": [1], "position": {}}])
def test_a_position_that_is_none_is_named(stream: Batches, value: Any) -> None:
    text = f"position: this is not a saved data position: {value!r}. Remedy: pass what get_state() returned."
    assert refused(DataError, forged(stream, position=value), stream) == text


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (-1, "it must be an integer from 0"),
        (1.5, "it must be an integer from 0"),
        (True, "it must be an integer from 0"),
        (None, "it must be an integer from 0"),
        (25, "`next_index` 25 is out of range"),
        (2**70, "`next_index` 1180591620717411303424 is out of range"),
    ],
)
def test_a_position_that_does_not_exist_is_named_and_changes_nothing(stream: Batches, index: Any, why: str) -> None:
    first = stream.get_state()
    state = {**first, "position": {"next_index": index}}
    found = refused(DataError, forged(stream, position=state), stream)
    start = f"position: data position {{'next_index': {index}}} does not exist in this stream of 24 global batches "
    assert found.startswith(f"{start}per epoch (") and why in found, found
    assert stream.get_state() == first


def test_a_position_of_other_data_is_named(stream: Batches) -> None:
    state = stream.get_state()
    fingerprint = {**state["fingerprint"], "seed": [9] * 1000, "\x1b[31m": 1}
    found = refused(DataError, forged(stream, position={**state, "fingerprint": fingerprint}), stream)
    different = "seed was [9, 9, 9, 9, 9, 9, ...], is now 1; \\x1b[31m was 1, is now 'absent'"
    remedy = "Remedy: rebuild the stream with the saved values, or start this one from the beginning."
    assert found == f"position: this data position belongs to another run: {different}. {remedy}"


def test_a_checkpoint_that_skipped_what_the_run_did_not_is_no_step_to_roll_back_to(stream: Batches) -> None:
    text = f"passed must be at most the 2 batches that this run skipped, got [[2, 3], [5, 5]]. {REMEDY}"
    with pytest.raises(DamagedError, match=f"^{re.escape(text)}$"):
        SkippedBatches([[2, 3]], 1).roll_back(9, 6, {"passed": [[2, 3], [5, 5]]})
