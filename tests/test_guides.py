"""The code of the guides runs after the program of docs/start.md, whose names it uses."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from profiles import few
from small_tokenizer import save_tokenizer, sentences, write_jsonl

import jaxpar as jp
from jaxpar.app.cli import main

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, also those inside a list."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)]


@pytest.fixture(scope="module")
def start() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "start"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(blocks("docs/start.md")[0], names)  # noqa: S102 (our own page)
    x = np.ones((64, 64), np.float32)
    loss_fn = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean()
    batch = {"x": x, "y": x}
    return names | {"loss_fn": loss_fn, "tx": optax.adamw(1e-3), "batch": batch, "printed": printed.getvalue()}


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    names = dict(names)
    exec(code, names)  # noqa: S102 (our own guides)
    return names


def test_the_first_program_trains(start: dict[str, Any]) -> None:
    assert "params/up/kernel" in start["printed"] and np.isfinite(start["metrics"]["loss"])


@pytest.mark.slow
def test_zero(start: dict[str, Any]) -> None:
    (code,) = blocks("docs/guides/zero.md")
    found = run(code, start | {"rules": jp.Rules(batch="data", embed=None, mlp=None)})
    _, metrics = found["step"](found["state"], found["batch"])
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_muon(start: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/guides/muon.md")
    state = run(code, start)["state"]
    kernels = {
        f"'{name}/kernel': MuonDimensionNumbers(reduction_axis=(0,), output_axis=(1,))" for name in ("down", "up")
    }
    assert capsys.readouterr().out == f"{{{', '.join(sorted(kernels))}}}\n"
    assert (
        state.opt_state.inner_states["muon"].inner_state[0].mu["up"]["kernel"].shape
        == state.params["up"]["kernel"].shape
    )


@pytest.mark.slow
def test_prune(start: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/guides/prune.md")
    run(code, start)
    assert capsys.readouterr().out == "{'down/kernel': 0.5, 'up/kernel': 0.5}\n"


@pytest.mark.slow
def test_quantize(start: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = run("\n".join(blocks("docs/guides/quantize.md")), start)
    assert capsys.readouterr().out == "int4 352 2080\n"
    assert found["integers"]["up"]["kernel"].values.dtype == "int4"


@pytest.mark.slow
def test_finetune(start: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("\n".join(blocks("docs/guides/finetune.md")), start)
    assert {path for path in found["state"].params["up"]["kernel"]} == {"lora_a", "lora_b"}
    assert found["params"]["down"]["kernel"].shape == (256, 64)


def test_precision(start: dict[str, Any]) -> None:
    (code,) = blocks("docs/guides/precision.md")
    state = jp.abstract_state(start["layout"], start["make_model"], start["tx"])
    after, metrics = jax.eval_shape(run(code, start)["step"], state, start["batch"])
    assert metrics["loss"].shape == () and jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize("guide", ["offload", "one_bit_adam"])
def test_optimizers(guide: str, start: dict[str, Any]) -> None:
    (code,) = blocks(f"docs/guides/{guide}.md")
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(8), jp.Rules(batch="data", embed=None, mlp=None))
    found = run(code, start)
    assert jp.abstract_state(layout, found["make_model"], found["tx"])


def test_memory(start: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("docs/guides/memory.md")
    assert run(code, start)["report"].memory.total > 0
    assert "params/up/kernel" in capsys.readouterr().out


def test_disk(start: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("docs/guides/disk.md"))
    assert "/nvme/run1" in code
    assert int(run(code.replace("/nvme/run1", str(tmp_path / "moments")), start)["state"].step) == 1


def test_checkpoints(start: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/guides/checkpoints.md")
    tx = optax.adamw(1e-3)
    state = jp.init(start["layout"], start["make_model"], tx)
    stream = SimpleNamespace(get_state=lambda: {"position": 3})
    found = run(code, start | {"tx": tx, "state": state, "number": 100, "stream": stream})
    assert found["found"] is None
    assert (tmp_path / "runs" / "one" / "checkpoints" / "100" / "manifest.json").is_file()


def test_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run("\n".join(blocks("docs/guides/pipeline_schedule.md")), {"jp": jp})
    assert (tmp_path / "interleaved.png").is_file()
    assert "interleaved" in capsys.readouterr().out


@pytest.mark.slow
def test_annotate() -> None:
    names = {"__name__": "annotate"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(blocks("docs/guides/annotate.md")), names)  # noqa: S102 (our own guide)
    found: Any = names["found"]
    assert (
        found.names == ("batch", "embed", "features", "mlp", "vocab") and "params/Dense_*/kernel" in printed.getvalue()
    )
    assert np.isfinite(float(names["metrics"]["loss"]))  # type: ignore[index]


def test_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/guides/any_model.md").read_text(encoding="utf-8")
    found = {kind: re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for kind in ("yaml", "sh")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "digits.py").write_text(blocks("docs/guides/any_model.md")[0], encoding="utf-8")
    (tmp_path / "digits.yaml").write_text(found["yaml"][0], encoding="utf-8")
    commands = [shlex.split(line, comments=True)[1:] for line in found["sh"][0].splitlines()]
    run = {words[0]: words for words in reversed(commands) if "--processes" not in words}
    assert run.keys() == {"explain", "check", "verify", "train", "verify-checkpoint"}
    try:
        assert [main(run[name]) for name in ("explain", "check", "train", "verify-checkpoint")] == [0, 0, 0, 0]
    finally:
        sys.modules.pop("digits", None)
    screen = capsys.readouterr().out
    assert "no problems" in screen and "examples/s (median step)" in screen
    assert "digits:make_data: 512 examples to train on, 512 examples held out; batch 32" in screen


STYLES = {"nnx": 0, "linen": 1, "state": 2}


def changed_lines(before: str, after: str) -> int:
    """The lines that a user types or deletes: of each changed place, the larger of its lines before and after."""
    old, new = before.splitlines(), after.splitlines()
    edits = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in edits if kind != "equal")


def final_params(names: dict[str, Any]) -> list[np.ndarray]:
    held = nnx.state(names["model"], nnx.Param) if "optimizer" in names else names.get("state", names["params"])
    return [np.asarray(x) for x in jax.tree.leaves(getattr(held, "params", held))]


@pytest.mark.parametrize("style", few(STYLES, 1))
def test_parallelize(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pages = blocks("docs/guides/parallelize.md")[1:]
    before, after = pages[2 * STYLES[style] : 2 * STYLES[style] + 2]
    assert 0 < changed_lines(before, after) <= 5
    one, many = (run(code, {"__name__": style}) for code in (before, after))
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-5)
    for x, y in zip(final_params(many), final_params(one), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)
    assert many["train_step"].steps == 4 and (tmp_path / "runs" / style / "4" / "manifest.json").is_file()
    many["train_step"].close()


@pytest.mark.slow
def test_huggingface(start: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("docs/guides/huggingface.md")
    assert "models/Llama-3.1-8B" in code
    found = run(code.replace("models/Llama-3.1-8B", str(ROOT / "tests/golden/huggingface/llama2")), {"jp": jp} | start)
    assert found["logits"].shape == (8, 16, 32) and (tmp_path / "models/tuned/model.safetensors").is_file()


def test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path)
    write_jsonl(tmp_path / "corpus/rows.jsonl", [*sentences(200), ""])
    (code,) = blocks("docs/guides/text.md")
    names = run(code, {})
    assert next(names["stream"])["tokens"].shape == next(names["mixed"])["positions"].shape == (8, 16)
    assert "200 1 bad row skipped: corpus/rows.jsonl row 201: its field 'text' is empty" in capsys.readouterr().out


@pytest.mark.slow
def test_parameter_server(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("\n".join(blocks("docs/guides/parameter_server.md")), {})
    assert capsys.readouterr().out == "{'params/bias': (1,), 'params/kernel': (4, 1)}\n"
    assert names["table"].rows == 10**9


def test_sliced_images(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(ROOT):
        run("\n".join(blocks("docs/guides/sliced_images.md")), {})
    assert capsys.readouterr().out == "(2, 32, 32, 4)\nP(None, 'context', 'ulysses', None)\n"


@pytest.mark.slow
def test_experts() -> None:
    (code,) = blocks("docs/guides/experts.md")
    found = run(code, {})
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"router": (16, 8), "gate": (8, 16, 12), "up": (8, 16, 12), "down": (8, 12, 16)}
    model = {name: jax.random.normal(key, shapes[name]) for key, name in zip(keys, shapes, strict=False)}
    with found["layout"]:
        y, balance, metrics = jax.jit(found["mixture"])(model, jax.random.normal(keys[4], (8, 4, 16)))
    assert y.shape == (8, 4, 16) and 0.01 <= balance < 0.08 and metrics["dropped_fraction"] == 0
