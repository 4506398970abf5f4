"""Data that was changed between two parts of a run is noticed when it resumes, held-out data too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import raises
from small_tokenizer import EOS, save_tokenizer, sentences, write_jsonl

from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.train.checkpointing import check_data
from jaxpar.app.train.run_data import Identity, open_data
from jaxpar.data import write_tokens
from jaxpar.data.sources import is_heldout
from jaxpar.errors import DamagedError, DataError
from jaxpar.utils.yaml_config import parse_yaml

RUN = """
model: {family: llama, preset: tiny, layers: 1, embed: 16, heads: 2, head_dim: 8, mlp: 24, vocab: 512}
mesh: {data: -1}
rules: {batch: data, seq: null, residual_seq: null, embed: null, norm: null, heads: null, kv_heads: null,
        head_dim: null, mlp: null, vocab: null, layers: null}
train: {steps: 2, eval_batches: 1}
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}" \
    "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip


def identity(folder: Path, data: dict[str, Any]) -> Identity:
    """The identity of a run's data, as JSON has it."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**parse_yaml(RUN), "data": {"batch": 2, "seq": 8, **data}}))
    job = make_job(load_run(file))
    found = open_data(job, job.layout().on_one_device())
    found.stream.close()
    return dict(json.loads(json.dumps(found.identity())))


def rows_of(folder: Path, rows: list[str]) -> dict[str, Any]:
    return {"source": str(write_jsonl(folder / "rows.jsonl", rows))}


def packed(folder: Path, rows: list[str]) -> dict[str, Any]:
    return {**rows_of(folder, rows), "packing": "documents"}


def token_file(folder: Path, rows: list[str]) -> dict[str, Any]:
    (folder / "a.tokens").unlink(missing_ok=True)
    write_tokens(write_jsonl(folder / "rows.jsonl", rows), folder / "a.tokens")
    return {"source": str(folder / "a.tokens")}


def blend(folder: Path, rows: list[str]) -> dict[str, Any]:
    same = write_jsonl(folder / "same.jsonl", sentences(60))
    return {"blend": [{"source": str(same)}, {"source": str(write_jsonl(folder / "rows.jsonl", rows))}]}


def conversations(folder: Path, rows: list[str]) -> dict[str, Any]:
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    lines = (json.dumps({"prompt": "hm?", "completion": row}) + "\n" for row in rows)
    (folder / "chat.jsonl").write_text("".join(lines))
    tokenizer = str(folder / "tokenizer.json")
    return {"source": str(folder / "chat.jsonl"), "tokenizer": tokenizer, "chat_template": tokenizer, "seq": 64}


@pytest.mark.parametrize("make", [rows_of, packed, token_file, blend, conversations], ids=lambda make: make.__name__)
def test_other_heldout_text_has_another_identity(
    make: Callable[[Path, list[str]], dict[str, Any]], tmp_path: Path
) -> None:
    rows = sentences(60)
    name = "chat.jsonl" if make is conversations else "rows.jsonl"
    held = next(i for i in range(60) if is_heldout(f"{name}:{i + 1}", 0.05, 0))
    before = identity(tmp_path, make(tmp_path, rows))
    check_data("manifest.json", {"data": before}, lambda: identity(tmp_path, make(tmp_path, rows)))
    letter = "b" if rows[held][0] == "a" else "a"
    rows[held] = letter + rows[held][1:]
    with raises(DataError, "held-out", "content") as error:
        check_data("manifest.json", {"data": before}, lambda: identity(tmp_path, make(tmp_path, rows)))
    assert exit_code(error.value) is ExitCode.CONFIGURATION


def test_other_conversations_to_train_on_have_another_identity(tmp_path: Path) -> None:
    rows = sentences(60)
    before = identity(tmp_path, conversations(tmp_path, rows))
    trained = next(i for i in range(60) if not is_heldout(f"chat.jsonl:{i + 1}", 0.05, 0))
    rows[trained] = rows[trained][::-1]
    after = identity(tmp_path, conversations(tmp_path, rows))
    assert [name for name in before if before[name] != after[name]] == ["content"]


def test_the_differences_are_named_and_older_checkpoints_have_none() -> None:
    here: Identity = {"held-out tokens": 3, "held-out content": "sha256:1"}
    check_data("manifest.json", {}, lambda: pytest.fail("there is nothing to compare"))
    check_data("manifest.json", {"data": {"held-out tokens": 3}}, lambda: here)
    with raises(DataError, "manifest.json", "was 4"):
        check_data("manifest.json", {"data": {"held-out tokens": 4, "more": "x"}}, lambda: here)
    with raises(DamagedError, "manifest.json", "[1]"):
        check_data("manifest.json", {"data": [1]}, lambda: here)
