"""Tests a run's handling of losses, time and signals without devices: spikes, goodput, rollbacks and stragglers."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_texts import raises

from jaxpar.app.config import load_run
from jaxpar.app.train import process_sync
from jaxpar.app.train.goodput import CAUSES, Goodput, describe
from jaxpar.app.train.process_sync import ProcessStatus, StatusExchange, Stragglers, slow
from jaxpar.app.train.signals import Stop
from jaxpar.app.train.spikes import LossWatch, SkippedBatches, describe_trouble, give_up_message
from jaxpar.app.train_config import SpikeConfig, StragglerConfig, TrainConfig
from jaxpar.errors import ConfigError


class Clock:
    """A clock that advances only when a test advances it."""

    def __init__(self, epoch: float = 1000.0):
        self.seconds, self.epoch = 0.0, epoch

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.epoch + self.seconds

    def account(self) -> Goodput:
        return Goodput(self, self.now)


def test_all_causes_add_up_to_the_wall_time_and_what_is_inside_is_not_counted_twice() -> None:
    clock = Clock()
    account = clock.account()
    clock.seconds += 1  # counts as "other"
    with account.spend("compile"):
        clock.seconds += 5
    for number, seconds in enumerate((2.0, 3.0, 4.0), 1):
        with account.spend("steps"):
            clock.seconds += seconds - 0.5
            with account.spend("checkpoint"):
                clock.seconds += 0.25
            clock.seconds += 0.5
        account.count_step(number, seconds, 1.0 if number == 3 else 0.0)
    assert account.lose(after=2) == 3.0  # The step's data wait of 1 s is already counted under "data".
    with pytest.raises(ZeroDivisionError), account.spend("evaluation"):
        clock.seconds += 7
        raise ZeroDivisionError
    record = account.record()
    assert record["spent"] == dict.fromkeys(CAUSES, 0.0) | {
        "steps": 5.0, "lost": 3.0, "data": 1.0, "compile": 5.0, "checkpoint": 0.75, "evaluation": 7.0, "other": 1.0,
    }  # fmt: skip
    assert account.wall() == clock.seconds == sum(account.spent.values()) == record["wall_seconds"]
    assert describe(record) == (
        "22.0% of 23 s in steps; evaluation 7.0 s, compile 5.0 s, lost 3.0 s, data 1.0 s, other 1.0 s, checkpoint 0.8 s"
    )


def test_the_account_goes_on_over_a_kill_and_a_rollback() -> None:
    clock, records = Clock(), list[dict[str, Any]]()
    account = clock.account()

    def step(number: int, waited: float = 0.0) -> None:
        with account.spend("steps"):
            clock.seconds += 2
        account.count_step(number, 2.0, waited)
        records.append({"step": number, "step_seconds": 2.0, "data_seconds": waited, "elapsed": account.wall()})

    with account.spend("compile"):
        clock.seconds += 10
    for number in (1, 2):
        step(number)
    account.lose(1)
    records.append({"step": 2, "rollback_to": 1})
    step(2)
    records.append({"step": 2, **account.record()})
    step(3, waited=0.5)
    with account.spend("checkpoint"):
        clock.seconds += 1
    step(4)
    account.lose(3)
    records.append({"step": 4, "rollback_to": 3})
    step(4)
    clock.seconds += 0.5  # This time is spent elsewhere; then the run is killed before it records it.
    killed = clock.now()
    again = Clock(killed + 20)
    other = again.account()
    again.seconds += 3
    other.resume(json.loads(json.dumps(records)), 3)
    assert other.began == 1000 and other.wall() == again.now() - 1000
    # Step 4 ran for 2 s twice: once rolled back, once killed. Only the ages of the steps reveal the pause of 1 s.
    assert other.spent == dict.fromkeys(CAUSES, 0.0) | {
        "compile": 10.0, "steps": 5.5, "lost": 6.0, "data": 0.5, "restart": 20.5, "other": 4.0,
    }  # fmt: skip
    assert other.lose(1) == 3.5  # A rollback can still discard steps from before the kill.


def test_an_account_of_a_run_without_one_begins_anew() -> None:
    account = Clock().account()
    account.resume([{"step": 1, "loss": 2.0}], 1)
    assert account.wall() == 0.0 and account.share() == 0.0 and describe(account.record()) == "0.0% of 0 s in steps"


def test_steps_that_are_skipped_are_trouble_in_a_row_only() -> None:
    watch = LossWatch(2)
    for loss, skipped, bad in ((1, False, 0), (math.nan, True, 1), (9.0, False, 0), (math.nan, True, 1)):
        watch.see(loss, skipped=skipped)
        assert (watch.bad, watch.trouble) == (bad, None)
    # A step that searches for the loss scale is neither good nor bad.
    watch.see(math.nan, skipped=True, searching=True)
    assert (watch.skipped, watch.bad) == (0, 0)
    again = LossWatch(2)
    watch.see(math.nan, skipped=True)
    again.resume(json.loads(json.dumps(watch.state())))
    again.see(math.nan, skipped=True)
    assert again.trouble == "skipped" and again.bad == 2 and watch.trouble is None
    assert describe_trouble(again, 7, math.nan, "w") == "2 steps in a row, up to step 7, were not finite, first in w."


def test_a_spike_is_far_above_the_last_losses_and_patience_bears_with_some() -> None:
    watch = LossWatch(3, SpikeConfig(sigmas=6.0, window=4, patience=2))
    for loss in (5.0, 30.0, 2.0, 2.1):
        watch.see(loss)  # too few losses to judge by
    assert watch.bad == 0
    for loss in (1.9, 2.0, 2.1, 2.0):
        watch.see(loss)
    # The median is 2.0. The deviations 0.1, 0, 0.1, 0 have the median 0.05, so sigma is 0.0741.
    watch.see(2.4)
    assert watch.bad == 0 and math.isclose(watch.bound, 2.0 + 6 * 1.4826 * 0.05)
    watch.see(2.5)
    watch.see(math.nan, skipped=True)  # This is no spike, but it does not end a row of spikes.
    assert (watch.bad, watch.high, watch.trouble) == (2, 1, None)
    watch.see(math.inf)
    assert (watch.bad, watch.trouble) == (3, "spike")
    assert describe_trouble(watch, 8, 2.5, "").startswith(
        "2 steps in a row, up to step 8, were spikes: the loss is 2.5, above 2."
    )
    watch.see(2.0)
    assert (watch.bad, watch.trouble) == (0, None)


def test_a_loss_that_does_not_move_and_one_that_is_nan_are_judged_too() -> None:
    watch = LossWatch(3, SpikeConfig(window=3, patience=1))
    watch.see(math.nan)  # as with skip_nonfinite=False
    assert watch.trouble == "spike"
    for _ in range(3):
        watch.see(1.0)
    watch.see(1.005)
    assert watch.trouble is None and math.isclose(watch.bound, 1.006)
    watch.see(1.007)
    assert watch.trouble == "spike"
    assert describe_trouble(watch, 9, 1.007, "") == "step 9 was a spike: the loss is 1.007, above 1.006."


def test_batches_that_are_passed_over_are_numbered_in_the_stream() -> None:
    passed = SkippedBatches()
    assert passed.roll_back(12, 10, {}) == (11, 12)
    saved = json.loads(json.dumps(passed.state()))
    # Steps 11 to 20 used batches 13 to 22. The checkpoint of step 15 (batch 17) was saved in between.
    assert passed.roll_back(20, 15, saved) == (18, 22)
    assert passed.state() == {"passed": [[11, 12], [18, 22]], "rollbacks": 2} and passed.count == 7
    # Step 16 used batch 23. Checkpoint 15 is damaged, so the run returns to 5 and skips every batch since then.
    assert passed.roll_back(16, 5, {}) == (6, 23)
    assert passed.state() == {"passed": [[6, 23]], "rollbacks": 3}


@pytest.mark.parametrize(
    ("trouble", "rollbacks", "checkpoints", "text"),
    [
        (
            "skipped", 0, False,
            (
                "X. No update was applied, and the run keeps no checkpoints to roll back to. Remedy: a smaller "
                "optimizer.learning_rate, or a clip_norm; train.max_consecutive_nonfinite=1 allows more of them; "
                "checkpoint: {save_interval_steps: 100}, to roll back and skip these batches."),
        ),
        (
            "skipped", 3, True,
            (
                "X. No update was applied, and the run was rolled back 3 times, as often as train.max_rollbacks=3 "
                "allows. Remedy: a smaller optimizer.learning_rate, or a clip_norm; "
                "train.max_consecutive_nonfinite=1 allows more of them."),
        ),
        (
            "spike", 1, True,
            (
                "X. The updates were applied, and there is no undamaged checkpoint before step 9 to roll back to. "
                "Remedy: a smaller optimizer.learning_rate, or a clip_norm; a larger train.spike.sigmas, factor or "
                "patience; a smaller checkpoint.save_interval_steps."),
        ),
    ],
)  # fmt: skip
def test_why_a_run_cannot_go_back_is_said(trouble: str, rollbacks: int, checkpoints: bool, text: str) -> None:
    watch = LossWatch(1, SpikeConfig(window=2, patience=1))
    watch.see(math.nan, skipped=trouble == "skipped")
    passed = SkippedBatches(rollbacks=rollbacks)
    assert (
        give_up_message("X.", watch, passed, TrainConfig(max_consecutive_nonfinite=1), first=9, checkpoints=checkpoints)
        == text
    )


def test_a_process_is_slow_where_its_own_time_counts() -> None:
    assert slow([0.01, 0.012, 0.5, 0.011], 0.6, 2.0) == [2]
    assert slow([0.0, 0.003], 0.1, 2.0) == []  # Far more than nothing can still be little.
    watch = Stragglers(StragglerConfig(factor=2.0, every=4))
    two = [
        ProcessStatus(steps=2, own=0.02, waited=1.0, seconds=1.2),
        ProcessStatus(steps=2, own=1.0, waited=0.1, seconds=1.2),
    ]
    assert watch.add(two) is None and watch.add(two) == [1]
    assert (watch.own, watch.waited) == ([0.01, 0.5], [0.5, 0.05])
    assert watch.add(two) is None  # The counts start again.
    assert Stragglers(StragglerConfig(every=1)).add(two[:1]) is None


def test_one_process_has_its_own_news_after_every_step() -> None:
    exchange = StatusExchange(1)
    assert exchange.after_step(ProcessStatus) == [ProcessStatus()]
    assert exchange.after_step(lambda: ProcessStatus(signal=15)) == [ProcessStatus(signal=15)]


def test_several_processes_exchange_their_news_as_often_as_the_slowest_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count the same steps to the next exchange: as many as the slower process does in a second."""
    sent: list[np.ndarray] = []
    other = [float(signal.SIGTERM), 1, 4, 0.5, 0.25, 1.0, 0]

    def gather(row: np.ndarray) -> np.ndarray:
        sent.append(row)
        return np.stack([row, np.float32(other)])

    monkeypatch.setattr(process_sync, "gather_rows", gather)
    exchange, mine = StatusExchange(2), ProcessStatus(steps=10, own=0.5, seconds=0.5)
    theirs = ProcessStatus(signal.SIGTERM, True, 4, 0.5, 0.25, 1.0)
    assert exchange.after_step(lambda: mine) == [mine, theirs] and sent[0].dtype == np.float32
    answers = [exchange.after_step(lambda: mine) for _ in range(8)]
    assert [answer is not None for answer in answers] == [False, False, False, True] * 2


def test_the_second_signal_is_as_if_nobody_listened() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, forwarded by a launcher
        assert stop.number == signal.SIGINT and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        stop._when -= 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_comes_after_the_end_that_others_asked_for_spoils_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with Stop() as stop:
            stop.late = True
        os.kill(os.getpid(), signal.SIGTERM)  # Without the handler, this would end the process.
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_of_the_main_thread_no_handler_is_set() -> None:
    before, found = signal.getsignal(signal.SIGTERM), list[Any]()

    def look() -> None:
        with Stop() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.number))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(before, 0)]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("train.max_rollbacks=-1", "train: max_rollbacks"),
        ("train.spike={sigmas: 3, factor: 2}", "train.spike.sigmas=3"),
        ("train.spike={factor: 1}", "spike: factor"),
        ("train.spike={sigmas: 0}", "spike: sigmas"),
        ("train.spike={window: 1}", "spike: window"),
        ("train.spike={patience: 0}", "spike: patience"),
        ("train.straggler={factor: 1}", "straggler: factor"),
        ("train.straggler={every: 0}", "straggler: every"),
    ],
)
def test_keys_that_make_no_sense_are_named(setting: str, name: str) -> None:
    file = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    with raises(ConfigError, name):
        load_run(file, [setting])
