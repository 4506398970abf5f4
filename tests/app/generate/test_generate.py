"""``jaxpar generate`` makes text from the newest good checkpoint of a run, on another mesh than the run's."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro
import yaml
from error_texts import raises
from rich.console import Console

import jaxpar as jp
from jaxpar.app.cli import Generate, main
from jaxpar.app.config import load_run
from jaxpar.app.generate.generate import INTERRUPTED, GenerateOptions, _parameters, _streamed, generator, restored
from jaxpar.app.generate.launch import words
from jaxpar.app.generate.prompts import Answer, Page, read_prompts
from jaxpar.app.job import Job, make_job
from jaxpar.app.train.compile import iterate_until_signal
from jaxpar.app.train.signals import Stop
from jaxpar.checkpoint.manifest import read
from jaxpar.errors import CheckpointError, ConfigError
from jaxpar.utils import multihost

LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"
RUN: dict[str, Any] = {
    "model": {"family": "llama", "preset": "tiny", "layers": 1, "embed": 64, "heads": 2, "head_dim": 8, "mlp": 24},
    "layout": str(LAYOUTS / "fsdp_tp.yaml"),
    "cpu_devices": 8,
    "data": {"source": "synthetic", "batch": 8, "seq": 16},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN), encoding="utf-8")
    return file


def job_of(config: Path, *settings: str) -> Job:
    return make_job(load_run(config, settings))


def saying(shapes: Any, after: int) -> Any:
    """Returns parameters that predict the last byte plus ``after``: zero layers, and a rolled embedding as the head."""
    words = np.random.default_rng(0).normal(size=shapes["embedding"].shape).astype(np.float32)
    blocks = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes["blocks"])
    whole = {
        "embedding": words,
        "blocks": blocks,
        "head": np.roll(words, after, 0).T,
        "norm": {"scale": np.ones(64, "f4")},
    }
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), whole, shapes)


@pytest.mark.slow
def test_the_newest_good_step_goes_on_on_another_mesh(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = job_of(config), tmp_path / "checkpoints"
    layout = job.layout()
    shapes = jp.abstract_state(layout, job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, {"params": saying(shapes, step), "opt_state": jnp.ones(3)}, layout=layout)
    piece = max((folder / "2").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    (folder / "3").mkdir()
    asked = ["--prompt", "abc", "--prompt", "uv", "--max-new-tokens", "5", "--checkpoint", str(folder)]
    mesh = ["--set", f"layout={LAYOUTS / 'fsdp.yaml'}"]
    assert main(["generate", str(config), *asked, *mesh]) == 0
    out, told = capsys.readouterr()
    assert out == "[0] abcdefgh\n[1] uvwxyz{\n"
    assert f"skipped: {folder / '3'} is incomplete: manifest.json is missing." in told
    assert f"skipped: {folder / '2'}" in told and f"parameters of {folder / '1'} on data 8" in told

    wide = job_of(config, "model.mlp=32")
    model = jp.abstract_state(wide.layout(), wide.make_model, optax.identity())
    with raises(CheckpointError, "blocks/mlp/up"):
        restored(folder / "1", model.params, print)
    (folder / "1").rename(folder / "1.unfinished")
    (folder / "2").rename(folder / "old")
    with raises(CheckpointError, "/3", "/1.unfinished"):
        restored(folder, model.params, print)


def test_a_step_is_taken_that_is_whole_for_both_processes(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process sees no step 3, and in step 2 it finds a damaged piece."""
    job, folder, told = job_of(config, f"layout={LAYOUTS / 'fsdp.yaml'}"), tmp_path / "checkpoints", []
    layout = job.layout()
    shapes = jp.abstract_state(layout, job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"params": saying(shapes, step)}, layout=layout)
    answers = [None, ["DamagedError", "a piece was changed"], None, None]  # of its list, of step 2, of step 1, its sum

    def gather(mine: bytes) -> list[bytes]:
        return [mine, mine if not mine.startswith(b"null") else json.dumps(answers.pop(0)).encode()]

    monkeypatch.setattr(multihost, "gather", gather)
    monkeypatch.setattr("jaxpar.app.generate.generate.gather", lambda mine: [mine, b"2/1"])
    params, path = restored(folder, shapes, told.append)
    assert path == folder / "1" and told == ["[bold]skipped: process 1 of 2: a piece was changed[/]"]
    np.testing.assert_array_equal(params["head"], saying(shapes, 1)["head"])


@pytest.mark.slow
def test_two_processes_restore_their_own_bytes_and_one_streams(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two real processes with one device each, only the second reads the damaged piece of the newest step."""
    job, folder, answers = job_of(config), tmp_path / "checkpoints", tmp_path / "answers.jsonl"
    layout = job.layout()
    shapes = jp.abstract_state(layout, job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, {"params": saying(shapes, step)}, layout=layout)
    tensor = read(folder / "2").tensors["params/embedding"]
    piece = next(folder / "2" / name for name, at, _ in tensor.pieces() if at[1][0] >= 32)
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    # The test does not depend on compiler optimizations.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"uv\nlmnopqrst\n")))
    asked = [
        "--prompt",
        "abc",
        "--prompts",
        "-",
        "--max-new-tokens",
        "5",
        "--checkpoint",
        str(folder),
        "--json",
        str(answers),
    ]
    mesh = ["--set", f"layout={LAYOUTS / 'fsdp.yaml'}", "--set", "cpu_devices=2", "--processes", "2"]
    assert main(["generate", str(config), *asked, *mesh]) == 0, capfd.readouterr()
    out, told = capfd.readouterr()
    assert out == "[0] abcdefgh\n[1] uvwxyz{\n[2] lmnopqrstuvwxy\n", "nothing but text"
    lines = told.splitlines()
    assert re.fullmatch(r"launch  process 0 of 2, coordinator 127\.0\.0\.1:\d+", lines[0]), told
    assert lines[1].startswith(
        f"skipped: process 1 of 2: {piece}, which holds params/embedding, was changed after it was written"
    )
    assert lines[2] == f"parameters of {folder / '1'} on data 2"
    assert re.fullmatch(r"15 tokens of 3 prompt\(s\); after the first tokens, [\d.]+ tokens/s", lines[3])
    assert len(lines) == 4
    assert [json.loads(line)["text"] for line in answers.read_text().splitlines()] == ["defgh", "wxyz{", "uvwxy"]


@pytest.mark.slow
def test_weights_in_int4_from_the_configuration(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = job_of(config), tmp_path / "checkpoints"
    shapes = jp.abstract_state(job.layout(), job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        manager.save(1, {"params": saying(shapes, 1)}, layout=job.layout())
    asked = ["generate", str(config), "--prompt", "abc", "--max-new-tokens", "3", "--checkpoint", str(folder)]
    how = ["--set", "generate.weights={bits: 4, group: 8, targets: ['*blocks/*', head]}"]
    assert main([*asked[:-2], "--explain", *how]) == 0
    assert re.search(r"params/head/values +64 × 256 +int4 ", capsys.readouterr().out)
    assert main([*asked, *how]) == 0
    out, err = capsys.readouterr()
    assert out == "abcdef\n"
    assert re.search(r"weights: [\d.]+ KiB, instead of [\d.]+ KiB as they are saved", err), err
    names = {
        "{bits: 4, group: 7}": "blocks/attention/k",
        "{bits: 4, group: 0}": "weights: group",
        "{axis: -2}": "generate.weights: axis",
    }
    for value, name in names.items():
        with raises(ConfigError, name):
            generator(job_of(config, f"generate.weights={value}"), [[1]], GenerateOptions(most=1))


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompts_of_a_file_in_int8_until_a_text(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, folder = job_of(config), tmp_path / "checkpoints"
    shapes = jp.abstract_state(job.layout(), job.make_model, optax.identity()).params
    with jp.CheckpointManager(folder) as manager:
        manager.save(1, {"params": saying(shapes, 1)}, layout=job.layout())
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("abc\n\nuv\nh\n", encoding="utf-8")
    asked = ["--prompts", str(prompts), "--max-new-tokens", "5", "--checkpoint", str(folder), "--json", str(answers)]
    how = ["--stop", "gh", "--stop", "m", "--int8", "weights", "cache"]
    assert main(["generate", str(config), *asked, *how]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] abcdef", "[1] uvwxyz{", "[2] hijkl"]
    found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert found[0] == {"prompt": "abc", "text": "def", "tokens": 5, "ended": "stop"}
    assert [row["ended"] for row in found] == ["stop", "length", "stop"]


def test_each_prompt_has_its_block_of_a_terminal() -> None:
    out, answers = Screen(), [Answer("a\x1b[2J", ()), Answer("b", ("yz",))]
    with Page(out, answers, 4, single=False) as page:
        for tokens in (b"x\x07", b"xy", b"xq", b"xy"):
            for answer, token in zip(answers, tokens, strict=True):
                answer.add(token)
            page.refresh()
        last = len(out.getvalue())
        answers[0].end("length")
    end = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()[last:])
    assert end.split() == ["[4]", "a␛[2Jxxxx", "[5]", "b␇yq"], "neither moves the cursor, and what may be a stop waits"
    assert answers[1].settled() == "\x07yq" and answers[1].end("length") == "y"


def test_a_stop_text_that_begins_and_does_not_end() -> None:
    answer = Answer("", ("aab",))
    assert [answer.add(token) for token in b"xaaab"] == ["x", "", "", "a", ""]
    assert (answer.text, answer.why) == ("xa", "stop")


def test_a_character_comes_when_it_is_whole() -> None:
    answer = Answer("", ("ö!",))
    assert [answer.add(token) for token in "a€öb".encode()] == ["a", "", "", "€", "", "", "öb"]
    assert answer.add(0xE2) == "" and answer.add(ord("x")) == "\ufffdx", "what makes no character is shown as such"
    assert answer.add(0xE2) == "" and answer.end("length") == "\ufffd"


class Model:
    """Yields tokens step by step, with a signal before one of the steps."""

    def __init__(self, made: list[list[int]], signal_at: int):
        self.made, self.signal_at, self.closed = made, signal_at, False

    def __iter__(self) -> Generator[list[int]]:
        try:
            for number, tokens in enumerate(self.made):
                if number == self.signal_at:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.2)
                yield tokens
        finally:
            self.closed = True


def test_ctrl_c_leaves_what_has_come() -> None:
    out, answers, model = (
        io.StringIO(),
        [Answer("ab", ("zz",)), Answer("b", ())],
        Model([[120, 0], [122, -1], [122, -1]], 2),
    )
    with Stop() as stop, Page(out, answers, 0, single=False) as page:
        steps = iterate_until_signal(iter(model), stop)
        _streamed(steps, SimpleNamespace(stop=(0,)), 8, answers, page)  # type: ignore[arg-type]
    assert model.closed and stop.number == signal.SIGINT
    assert [json.loads(answer.to_json()) for answer in answers] == [
        {"prompt": "ab", "text": "xz", "tokens": 2, "ended": INTERRUPTED},
        {"prompt": "b", "text": "", "tokens": 0, "ended": "stop"},
    ]
    assert out.getvalue() == "[1] b\n[0] abxz\n"


def test_steps_end_where_they_end_and_raise_what_they_raise() -> None:
    with Stop() as stop:
        model = Model([[1], [2]], -1)
        assert list(iterate_until_signal(iter(model), stop)) == [[1], [2]] and model.closed
        with pytest.raises(ZeroDivisionError):
            list(iterate_until_signal((1 // n for n in (1, 0)), stop))


def test_prompts_from_standard_input(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "abc\r\n\nu\u2028v\x0cw\n".encode()
    assert read_prompts(Path("-"), io.BytesIO(lines)) == ["abc", "u\u2028v\x0cw"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    assert main(["generate", str(config), "--prompts", "-"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: --prompts -: no prompt found. Remedy: write at least one prompt, one per line.\n"
    )


def test_a_command_line_comes_again_as_it_was() -> None:
    line = [
        "run.yaml",
        "--prompt",
        "a b",
        "--prompt=--x",
        "--prompts=-",
        "--max-new-tokens",
        "3",
        "--temperature",
        "0.5",
        "--top-k",
        "4",
        "--seed",
        "2",
    ]
    line += [
        "--cache",
        "64",
        "--batch",
        "2",
        "--stop",
        "",
        "--int8",
        "weights",
        "cache",
        "--json",
        "a.json",
        "--checkpoint",
        "c",
        "--processes",
        "2",
    ]
    asked = tyro.cli(Generate, args=line)
    again = tyro.cli(Generate, args=["run.yaml", *words(asked)])
    assert again == replace(asked, processes=None)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("p.txt", None, "No"),
        ("p.txt", b"\n \n", "--prompts"),
        ("p.txt", b"ab\xff", "UTF"),
        ("p.jsonl", b'"a\\nb"\n7\n', "JSON"),
        ("p.jsonl", b'"a\\nb"\n\n"c"', None),
    ],
)
def test_files_of_prompts(name: str, content: bytes | None, text: str | None, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    if text is None:
        assert read_prompts(file) == ["a\nb", "c"]
        return
    with raises(ConfigError, text):
        read_prompts(file)


def test_what_keeps_it_from_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert main(["generate", str(config), *arguments]) == 2
        return capsys.readouterr().err

    assert said("--prompt", "abc", "--checkpoint", str(tmp_path)) == (
        f"CheckpointError: {tmp_path}: no checkpoint found. Remedy: pass the folder of a run's checkpoints, such as "
        "runs/one/checkpoints, or of one of its steps.\n"
    )
    assert said("--prompt", "abcd", "--cache", "16", "--max-new-tokens", "20") == (
        "ConfigError: generate: request 0 has 4 prompt tokens and requests 20 new tokens, 24 in total, but the "
        "cache has 16 slots. Remedy: set --cache 24 or more, shorten the prompt, or set --max-new-tokens 12.\n"
    )
    assert said("--prompt", "abc", "--set", "model.vocab=208") == (
        "ConfigError: model: vocab must be at least 256, the number of tokens of the tokenizer (bytes), got 208. "
        "Remedy: model: {vocab: 256}.\n"
    )
    assert said("--prompt", "abc", "--temperature", "-1") == (
        "ConfigError: generate: --temperature must be from 0 to 1e+06, got -1.0. Remedy: use a number in this range.\n"
    )
    assert said("--prompt", "abc", "--temperature", "1", "--top-p", "1.5") == (
        "ConfigError: generate: --top-p must be above 0, at most 1, got 1.5. Remedy: use a number in this range.\n"
    )
    assert said("--prompt", "abc", "--stop", "") == (
        "ConfigError: generate: a stop string is empty, so no text could be generated. Remedy: leave it out.\n"
    )
    assert said("--prompt", "abc", "--prompt", "") == (
        "ConfigError: generate: prompt 1 is empty. Remedy: write at least one byte.\n"
    )
    assert said("--prompt", "ab\udcff") == (
        "ConfigError: generate: prompt 0 has '\\udcff' at character 2, which is not valid text. Remedy: encode the "
        "prompt as UTF-8.\n"
    )
    assert said("--prompt", "abc", "--prompt", "d", "--seed", "4294967295", "--temperature", "1") == (
        "ConfigError: generate: seed must be between 0 and 4294967294, got 4294967295, because each of the 2 "
        "prompt(s) has its "
        "own seed, counting up from it.\n"
    )
    assert said() == "ConfigError: generate: no prompts were given. Remedy: pass at least one.\n"
    assert "the dim 'cache_seq' has size 18, which is not a multiple of context=4" in said(
        "--prompt", "abc", "--cache", "18", "--max-new-tokens", "8", "--set", f"layout={LAYOUTS / 'ring.yaml'}"
    )


def test_stages_of_a_pipeline_need_no_schedule_to_generate(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mesh = ["--set", f"layout={LAYOUTS / 'pp_tp.yaml'}", "--set", "model.layers=2"]
    said = ["--prompt", "a", "--prompt", "b", "--max-new-tokens", "15", "--int8", "cache", "--explain"]
    assert main(["generate", str(config), *said, *mesh]) == 0
    out = capsys.readouterr().out
    # Two prompts are padded to four rows: a group for each of two stages, with one row for each of two devices.
    assert re.search(r"cache/keys/values +2 × 4 × 2 × 16 × 8 +int8 .* pipeline, data, model, ·, ·", out), out
    assert re.search(r"params/blocks/mlp/up +2 × 64 × 24 +float32 ", out), out


def test_initial_parameters_are_said_loudly(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, screen = job_of(config, "train.seed=7"), io.StringIO()
    layout = job.layout()
    monkeypatch.setattr(jp, "init", lambda *asked, seed: SimpleNamespace(params=(*asked[:2], seed)))
    model: Any = SimpleNamespace(layout=layout)
    params = _parameters(job, model, None, Console(file=screen, width=200))
    assert params == (layout, job.make_model, 7)
    text = (
        "INITIAL parameters, not trained, on data 4, model 2: the generated text is noise. Remedy: --checkpoint DIR\n"
    )
    assert re.fullmatch(re.escape(text), screen.getvalue())
