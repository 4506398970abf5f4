"""Runs on text files with a tokenizer.json, from the command line: train, evaluate, generate."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from error_texts import raises
from megatron_files import write_megatron
from rich.console import Console
from small_tokenizer import save_tokenizer, write_jsonl

from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.train.run_data import open_data
from jaxpar.data import load_tokenizer
from jaxpar.errors import ConfigError, DataError

LAYOUT = Path(__file__).parents[2] / "configs/layouts/fsdp_tp.yaml"
MODEL = {"family": "llama", "preset": "tiny", "layers": 1, "embed": 64, "heads": 2, "head_dim": 16, "mlp": 64}
SENTENCE = "the cat sat on the mat"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path, vocab=320)
    write_jsonl(tmp_path / "corpus/rows.jsonl", [SENTENCE] * 400)
    run: dict[str, Any] = {
        "model": {**MODEL, "vocab": 320},
        "layout": str(LAYOUT),
        "cpu_devices": 8,
        "data": {"source": "corpus", "tokenizer": "tokenizer.json", "batch": 8, "seq": 16},
        "optimizer": {"learning_rate": 0.01, "warmup": 0},
        "train": {"steps": 30, "eval_every": 30, "eval_batches": 1},
        "checkpoint": {"save_interval_steps": 100},
        "output": "out",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_a_run_on_jsonl_with_a_tokenizer_generates_what_it_learned(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("corpus/rows.jsonl").open("a") as file:
        file.write("not JSON\n")
    assert main(["train", str(config)]) == 2
    assert "rows.jsonl row 401: it is not JSON: Expecting value, at character 1. Remedy:" in capsys.readouterr().err
    assert main(["train", str(config), "--set", "data.bad_rows=skip"]) == 0
    screen = capsys.readouterr().out
    assert "of 400 rows); batch 8 × 16 tokens; 1 bad row skipped: corpus/rows.jsonl row 401: it is not JSON" in screen
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [record["heldout_loss"] for record in records if "heldout_loss" in record][-1] < 0.3
    generate = ["generate", str(config), "--checkpoint", "out/checkpoints", "--json", "answers.jsonl"]
    assert main([*generate, "--prompt", "the cat", "--prompt", "the cat sat on"]) == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] + answer["text"] for answer in answers] == [SENTENCE] * 2
    assert {answer["ended"] for answer in answers} == {"stop"}
    assert answers[0]["tokens"] < len(answers[0]["text"]) / 2  # tokens are no bytes


def first_tokens(config: Path, *settings: str) -> list[list[int]]:
    """The tokens of the first two training batches, and of the first that is held out."""
    job = make_job(load_run(config, settings))
    data = open_data(job, job.layout())
    return [batch["tokens"].tolist() for batch in (next(data.stream), next(data.stream), data.heldout[0])]


def test_a_token_file_is_read_as_its_text_and_generates_with_its_tokenizer(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenize", str(config), "a.tokens"]) == 0
    said = capsys.readouterr().out
    assert said == "a.tokens: 2,798 tokens (uint16, 0.0 MiB) of tokenizer.json; 25 of 400 rows held out\n"
    assert main(["verify-tokens", "a.tokens"]) == 0
    assert capsys.readouterr().out == said.rstrip("\n") + "; all bytes match the checksum\n"
    text = first_tokens(config)
    assert text == first_tokens(config, "data.source=a.tokens")
    assert text == first_tokens(config, "data.source=a.tokens", "data.tokenizer=null")
    own = ["--set", "data.source=a.tokens", "--set", "data.tokenizer=null"]
    assert main(["generate", str(config), "--prompt", "a", *own]) == 2
    assert "was written with the tokenizer tokenizer.json (sha256:" in capsys.readouterr().err


def blended(config: Path, *settings: str) -> tuple[Path, str]:
    """A run on two sources, one of them a token file, and the line about its data."""
    write_jsonl(Path("more/rows.jsonl"), [f"a dog {i} ran" for i in range(100)])
    if not Path("more.tokens").exists():
        assert main(["tokenize", "more", "more.tokens", "--tokenizer", "tokenizer.json"]) == 0
    run = yaml.safe_load(config.read_text())
    del run["data"]["source"]
    run["data"]["blend"] = [{"source": "corpus", "weight": 3}, {"source": "more.tokens", "weight": 1}]
    Path("blend.yaml").write_text(yaml.safe_dump(run))
    job = make_job(load_run("blend.yaml", settings))
    return Path("blend.yaml"), open_data(job, job.layout()).line


def test_a_blend_reads_its_sources_in_their_shares(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, line = blended(config)
    assert line.startswith("corpus (weight 3): 2,6") and "; more (weight 1): " in line
    job = make_job(load_run(run))
    data = open_data(job, job.layout())
    dog = load_tokenizer("tokenizer.json").encode_prompt("a dog")
    rows = np.concatenate([next(data.stream)["tokens"] for _ in range(40)])
    of_dogs = [any(row[i : i + 2] == dog[:2] for i in range(len(row))) for row in rows.tolist()]
    assert np.mean(of_dogs) == pytest.approx(0.25, abs=0.01)
    packed = make_job(load_run(run, ["data.packing=documents"]))
    assert next(open_data(packed, packed.layout()).stream).keys() == {*packed.batch_names()}


def test_settings_of_a_blend_that_do_not_go_together(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = blended(config)
    capsys.readouterr()
    assert main(["train", str(run), "--set", "data.source=corpus"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: blend.yaml: data.source and data.blend are mutually exclusive: each source of a blend has its "
        "own. Remedy: blend: [{source: ...}].\nexit 2: the configuration or the command line is wrong\n"
    )
    assert main(["tokenize", str(run), "out.tokens"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: tokenize: data.blend has several sources. Remedy: tokenize each, and blend the files.\n"
    )
    with raises(DataError, "blend: more"):
        blended(config, "data.tokenizer=null")


def test_megatrons_files_need_no_tokenizer_to_train(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [[5 + i, 6, 7 + i % 3, 2] * (1 + i % 4) for i in range(300)]
    write_megatron(Path("pile"), documents)
    settings = ["data.source=pile", "data.tokenizer=null", "data.packing=documents"]
    job = make_job(load_run(config, settings))
    data = open_data(job, job.layout())
    assert data.line.startswith("pile: 2,") and "held out (15 of 300 documents); batch 8 × 16 tokens; " in data.line
    assert next(data.stream)["targets"].max() > 255
    with raises(ConfigError, "pile", "data"):
        job.tokenizer  # noqa: B018 (it is loaded when it is read)
    windows = make_job(load_run(config, [*settings[:2], "data.packing=true"]))
    with raises(DataError, "data.packing"):
        open_data(windows, windows.layout())
    with raises(ConfigError, "model: vocab"):
        small = make_job(load_run(config, [*settings, "model.vocab=64"]))
        open_data(small, small.layout())


def test_tokenize_shows_its_progress_in_a_terminal(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console", functools.partial(Console, force_terminal=True, width=120))
    assert main(["tokenize", "corpus", "a.tokens"]) == 0
    shown = capsys.readouterr().err
    assert "400 documents, 9,200 tokens" in shown and "\u2501" in shown and "kB" in shown
