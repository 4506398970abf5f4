"""Runs on text files with a tokenizer.json, from the command line: train, evaluate, generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_tokenizer import save_tokenizer, write_jsonl

from jaxpar.app.cli import main

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
