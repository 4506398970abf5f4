"""``--profile START:COUNT`` writes a trace of these steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from error_texts import raises

from jaxpar.app.train.launch import profile_settings
from jaxpar.app.train.profile import Profiler
from jaxpar.app.train_config import ProfileConfig
from jaxpar.errors import ConfigError


def calls(monkeypatch: pytest.MonkeyPatch, span: ProfileConfig | None, steps: range) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    profiler = Profiler(span, Path("out"), seen.append)
    for step in steps:
        profiler.before(step)
        seen.append(step)
        profiler.after(step)
    profiler.close()
    return seen


def test_the_steps_of_the_range_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "profile out/profile: open it with xprof or TensorBoard, such as xprof out/profile"
    span = ProfileConfig(3, 2)
    assert calls(monkeypatch, span, range(1, 7)) == [1, 2, "out/profile", 3, 4, "stop", told, 5, 6]
    assert calls(monkeypatch, span, range(1, 4)) == [1, 2, "out/profile", 3, "stop", told]
    assert calls(monkeypatch, span, range(4, 6)) == [4, 5]
    assert calls(monkeypatch, None, range(1, 3)) == [1, 2]


def test_a_trace_is_written(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(1, 1), tmp_path, lambda text: None)
    profiler.before(1)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    profiler.after(1)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("text", ["10", "a:3", "10:-3", ""])
def test_a_range_is_two_numbers(text: str) -> None:
    with raises(ConfigError, "--profile"):
        profile_settings(text)
