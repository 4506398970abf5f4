"""Trackers receive a run's metrics; a service that fails does not end the run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.config import RunConfig
from jaxpar.app.train.metrics import MetricsWriter
from jaxpar.app.train.trackers import open_trackers
from jaxpar.errors import ConfigError, MissingExtraError


class FakeService(ModuleType):
    """A package with the interface of Weights & Biases, whose log fails from a step on."""

    def __init__(self, fails_at: int = 1000):
        super().__init__("wandb")
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options["project"], options["name"], options["config"]["train"]["steps"]))
        return SimpleNamespace(url="https://example.org/run")

    def log(self, values: dict[str, float], *, step: int) -> None:
        if step >= self.fails_at:
            raise ConnectionError("no route")
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))


def record(monkeypatch: pytest.MonkeyPatch, folder: Path, service: FakeService) -> list[str]:
    monkeypatch.setitem(sys.modules, "wandb", service)
    told: list[str] = []
    config = RunConfig(model={}, trackers={"wandb": {"project": "mine"}})
    trackers = open_trackers(config, "run", told.append)
    assert trackers[0].link == "https://example.org/run"
    with MetricsWriter(folder, trackers=trackers, tell=told.append) as writer:
        for step in (1, 2, 3):
            writer.write(step, loss=float(step))
        writer.note(3, text="not a number")
    return told


def test_records_reach_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service = FakeService()
    assert record(monkeypatch, tmp_path, service) == []
    logged = [("log", step, {"loss": float(step)}) for step in (1, 2, 3)]
    assert service.calls == [("init", "mine", "run", 100), *logged, ("finish",)]


def test_a_failing_service_is_reported_once_and_the_file_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = FakeService(fails_at=2)
    told = record(monkeypatch, tmp_path, service)
    assert told == ["metrics: wandb failed (ConnectionError: no route); nothing more is sent to it."]
    assert [call[0] for call in service.calls] == ["init", "log"]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def test_trackio_on_this_machine_names_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimpleNamespace(init=lambda **options: SimpleNamespace(url=None))
    monkeypatch.setitem(sys.modules, "trackio", service)  # type: ignore[arg-type]
    (tracker,) = open_trackers(RunConfig(model={}, trackers={"trackio": {"project": "mine"}}), "run", print)
    assert tracker.link == "trackio show --project mine"


def test_a_tracker_whose_own_import_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trackio.py").write_text("import distutils_of_old\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises(MissingExtraError, "distutils_of_old"):
        open_trackers(RunConfig(model={}, trackers={"trackio": {}}), "run", print)


def test_what_cannot_be_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with raises(MissingExtraError, "trackio", "installed"):
        open_trackers(RunConfig(model={}, trackers={"trackio": {}}), "run", print)
    with raises(ConfigError, "wandb: config"):
        open_trackers(RunConfig(model={}, trackers={"wandb": {"config": "x"}}), "run", print)
