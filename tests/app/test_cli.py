"""Tests the command line: its imports, and ``explain``, ``check`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
import small_model
import yaml
from error_texts import raises
from interpreters import python

import jaxpar as jp
from jaxpar.analysis.compare import Verdict
from jaxpar.analysis.layout import explain as layout_report
from jaxpar.app.cli import COMMANDS, main
from jaxpar.app.train import verify

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = ["model.layers=2", "model.embed=32", "model.heads=2", "model.head_dim=16", "model.mlp=48", "data.batch=8"]
SMALL += ["data.seq=16", "data.source=synthetic"]


def settings(*values: str) -> list[str]:
    return [word for value in (*SMALL, *values) for word in ("--set", value)]


def test_import_is_light_and_help_does_not_import_jax() -> None:
    heavy = ("jax", "flax", "numpy", "matplotlib", "grain", "tensorboardX", "jaxpar.models")
    code = (
        f"import sys, jaxpar; heavy = {heavy!r}; print([m for m in heavy if m in sys.modules])\n"
        "import jaxpar.app.cli\n"
        "try: jaxpar.app.cli.main(['--help'])\n"
        "except SystemExit as e: print('exit', e.code, [m for m in heavy if m in sys.modules and m != 'numpy'])"
    )
    lines = python(code).splitlines()
    assert lines[0] == "[]" and lines[-1] == "exit 0 []"


@pytest.mark.parametrize("package", [jp, jp.analysis, jp.inference, jp.models], ids=lambda package: package.__name__)
def test_every_public_name_loads(package: Any) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="attribute 'shard'"):
        _ = package.shard


def test_the_public_names_fit_on_a_screen() -> None:
    flat = [name for name in jp.__all__ if not isinstance(getattr(jp, name), ModuleType)]
    assert len(flat) <= 38


def test_devices_are_simulated_only_where_there_is_no_accelerator() -> None:
    code = (
        "from jaxpar.utils.simulate_devices import prefer_accelerators\nprefer_accelerators(3)\n"
        "import jax; print(jax.device_count(), jax.default_backend())"
    )
    assert python(code, JAX_PLATFORMS="cpu").split() == ["3", "cpu"]  # simulate_devices: the README's program


def test_too_late_to_simulate() -> None:
    jax.devices()
    with raises(jp.errors.MeshError, "simulate_devices(5)"):
        jp.simulate_devices(5)


def test_the_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpar {jp.__version__}\n"
    assert main(["trian", "config.yaml"]) == 2
    assert capsys.readouterr().err.startswith("unknown command 'trian'. Did you mean 'train'? The commands are train, ")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(f" {command} " in shown for command in COMMANDS)


def test_explain_writes_text_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "r.json", tmp_path / "r.html"]
    arguments = ["explain", str(QUICKSTART), "--topology", "v5e:4x8", "--json", str(files[0]), "--html", str(files[1])]
    assert main([*arguments, "--full", *settings("data.batch=16")]) == 0
    text, report = capsys.readouterr().out, json.loads(files[0].read_text())
    assert text.startswith("mesh: data 16 × model 2 = 32 devices") and "params/blocks/mlp/gate" in text
    assert "memory at the peak of a step on a TPU v5 lite, estimated\n" in text
    assert "Attention.__call__ (layers.py:" in text and "SwiGLU.__call__ (layers.py:" in text
    assert report["devices"] == 32 and report["traced"] and report["problems"] == []
    assert files[1].read_text().startswith("<!doctype html>") and "<table>" in files[1].read_text()


@pytest.mark.slow
def test_explain_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(QUICKSTART), *settings()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80 and len(lines) < 60
    assert "blocks/mlp/gate              2×32×48    embed=data mlp=model           1.50 KiB" in lines
    assert lines[-1] == "--full lists dtypes, rules and reasons of every tensor, and the activations."


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_one_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "default: None" not in shown and "None}" not in shown and ") (default" not in shown


def test_check_groups_problems_by_their_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(QUICKSTART), *settings("data.batch=6")]) == 2
    head, cause, tensors = capsys.readouterr().err.splitlines()
    assert head == "LayoutError: 14 problems, 1 cause:"
    assert cause == (
        "1. the dim 'batch' has size 6, which is not a multiple of data=4 (rule batch = (replica, data)). Remedy: "
        "change the size, the rule or the mesh, or leave such dims "
        "unsharded: rules: {indivisible: {batch: replicate}}."
    )
    assert tensors.startswith("   14 tensors: batch/targets [6, 16] (batch, seq); ") and tensors.endswith("11 more")


def test_check_passes_or_lists_every_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explained, explain = [], layout_report.explain
    for module in (jp, layout_report):
        monkeypatch.setattr(module, "explain", lambda *run, **how: explained.append(run) or explain(*run, **how))
    assert main(["check", str(QUICKSTART), *settings()]) == 0
    assert "no problem" in capsys.readouterr().out and len(explained) == 1, "one trace of the step"
    assert main(["check", str(QUICKSTART), *settings("data.batch=6", "model.mlp=49", "rules.extra=model")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("LayoutError:") and "49" in error and "'batch' has size 6" in error
    assert "the rule extra is not used by any tensor" in error


def test_check_refuses_what_lies_whole_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(QUICKSTART), "--max-replicated", "0.0001", *settings()]) == 2
    assert "are replicated on all 8 devices, more than max_replicated=0.01%" in capsys.readouterr().err


def test_an_open_axis_needs_a_number_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"model": {"family": "llama"}, "layout": str(QUICKSTART.parent / "layouts/dp.yaml")})
    )
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: the mesh has an axis of -1, so the number of devices is unknown. Remedy: pass --devices N, or "
        "set cpu_devices.\n"
    )


@pytest.mark.parametrize(
    ("first", "status", "text"),
    [
        (None, 0, "verified            within 1e-04"),
        ("up (m.py:3)", 1, "NOT verified        beyond 1e-04; first module that diverges: up (m.py:3)"),
    ],
)
def test_verify_says_what_is_proved(
    first: str | None, status: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself is tested in tests/analysis: test_compare.py, test_divergence.py."""
    asked: dict[str, Any] = {}

    def compare(one: Any, layout: Any, make_model: Any, tx: Any, loss_fn: Any, data: Any, dims: Any, **how: Any) -> Any:
        dtypes = {str(x.dtype) for x in jax.tree.leaves(jp.abstract_state(one, make_model, tx).params)}
        asked.update(steps=len(data), bound=how["bound"], devices=(one.mesh.size, layout.mesh.size), dtypes=dtypes)
        return Verdict(1e-7, 2e-7, "head, step 2", 3e-7, how["bound"], parameters_equal=first is None, first=first)

    monkeypatch.setattr(verify, "compare", compare)
    options = ["--steps", "2", "--bound", "1e-4", *settings("precision=bf16")]
    assert main(["verify", str(QUICKSTART), *options]) == status
    assert asked == {"steps": 2, "bound": 1e-4, "devices": (1, 8), "dtypes": {"float32"}}
    assert capsys.readouterr().out.splitlines()[-5:] == [
        f"initial parameters  {'bitwise equal' if first is None else 'DIFFER'}",
        "loss                largest relative difference 1.00e-07 over 2 steps",
        "gradients           largest relative difference 2.00e-07 (head, step 2)",
        "updates             largest relative difference 3.00e-07",
        text,
    ]


@pytest.mark.slow
def test_verify_proves_a_right_layout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small_model.use(monkeypatch)
    assert main(["verify", str(QUICKSTART), "--steps", "2", *settings()]) == 0
    screen = capsys.readouterr().out
    assert "initial parameters  bitwise equal" in screen and "verified            within 1e-05" in screen


def wrong(right: Any) -> Any:
    """The function, off by a thousandth where the mesh has a model axis."""
    return lambda *args, **more: right(*args, **more) * (1 + 1e-3 * (jp.current_layout().sizes["model"] - 1))


@pytest.mark.slow
def test_verify_names_the_first_module_that_diverges(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model.use(monkeypatch)
    monkeypatch.setattr(small_model, "up", wrong(small_model.up))
    assert main(["verify", str(QUICKSTART), "--steps", "1", *settings("model.layers=1")]) == 1
    screen = capsys.readouterr().out
    assert "NOT verified" in screen and "first module that diverges: loss (small_model.py:" in screen
    assert "(batch, seq, mlp), call 1: its activation differs by 1.0" in screen
