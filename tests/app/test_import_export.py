"""``jaxpar import`` and ``jaxpar export``, and runs that start from imported parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
from one_step import drawn
from small_tokenizer import EOS, save_tokenizer

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.generate.chat import chat_prompts
from jaxpar.app.huggingface import spread
from jaxpar.app.job import make_job
from jaxpar.app.train.programs import StepPrograms
from jaxpar.interop import huggingface
from jaxpar.interop.safetensors import read_tensors
from jaxpar.models import make_decoder
from jaxpar.models.llama import LlamaConfig
from jaxpar.models.moe.config import preset

CONFIG = LlamaConfig(vocab=256, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, sliding_window=24)

WITHOUT_TOKENIZER = ["--set", "data.tokenizer=null"]
"""The checkpoint's tokenizer is an empty file; the run then trains on bytes."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``source``, a Hugging Face checkpoint, and ``out``, what ``jaxpar import`` made of it."""
    folder = tmp_path_factory.mktemp("imported")
    state = drawn(jp.abstract_state(spread(CONFIG), make_decoder(CONFIG), optax.identity()), scale=0.2)
    huggingface.export(folder / "source", state.params, CONFIG, fields={"eos_token_id": 7})
    (folder / "source" / "tokenizer.json").write_text("{}")  # an import only names it
    assert main(["import", str(folder / "source"), str(folder / "out")]) == 0
    return folder


def values(folder: Path) -> dict[str, Any]:
    return {
        name: (t.dtype, t.shape, t.file.read_bytes()[t.start : t.start + t.size])
        for name, t in read_tensors(folder).items()
    }


def test_an_import_is_exported_bitwise(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(imported / "out" / "checkpoint"), str(tmp_path / "back")]) == 0
    assert values(tmp_path / "back") == values(imported / "source")
    fields = [json.loads((folder / "config.json").read_text()) for folder in (imported / "source", tmp_path / "back")]
    assert fields[0] == fields[1] and fields[0]["eos_token_id"] == 7 and fields[0]["model_type"] == "mistral"
    assert "31,904 parameters; wrote" in capsys.readouterr().out


@pytest.mark.parametrize("field", ["nope", "hidden_size", "num_nextn_predict_layers"])
def test_a_field_that_is_ignored_without_effect_is_refused(
    field: str, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(imported / "source"), str(tmp_path / "out"), "--ignore", field]) == 2
    assert capsys.readouterr().err == (
        f"ConfigError: {imported / 'source' / 'config.json'}: --ignore {field} has no effect: the file has no such "
        "field, or the field is not refused. Remedy: leave it out.\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_field_that_is_ignored_with_effect_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A field that is refused, or the layers for further tokens, whose copies differ in this checkpoint."""
    sizes = {"layers": 2, "embed": 16, "mlp": 8, "expert_mlp": 8, "vocab": 32, "heads": 2, "kv_heads": 2}
    config = preset("deepseek_v3", **sizes, mtp_depth=1)
    params = jp.init(spread(config), make_decoder(config), optax.identity()).params
    huggingface.export(tmp_path / "source", params, config, fields={"a_new_field": 3})
    stored = read_tensors(tmp_path / "source")["model.layers.2.embed_tokens.weight"]
    with stored.file.open("r+b") as file:
        file.seek(stored.start)
        file.write(np.float32(7).tobytes())
    line = ["import", str(tmp_path / "source"), str(tmp_path / "out"), "--ignore", "a_new_field"]
    assert main(line) == 2
    assert "Remedy: --ignore num_nextn_predict_layers (Python: read_config(" in capsys.readouterr().err
    assert main([*line, "--ignore", "num_nextn_predict_layers"]) == 0
    assert "mtp" not in (tmp_path / "out" / "run.yaml").read_text().replace("mtp_depth: 0", "").replace(
        "mtp_weight", ""
    )


def test_a_run_starts_from_an_import(imported: Path) -> None:
    job = make_job(load_run(imported / "out" / "run.yaml"))
    assert job.model == CONFIG and job.config.data.tokenizer == str(imported / "source" / "tokenizer.json")
    state = StepPrograms(job, job.layout()).first_state()
    wanted = huggingface.load(job.layout(), imported / "source")
    chex.assert_trees_all_equal(state.params, wanted)
    assert int(state.step) == 0


@pytest.mark.slow
def test_an_import_is_trained_generated_from_and_exported(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, settings = str(imported / "out" / "run.yaml"), ["--set", f"output={tmp_path}", "--set", "train.steps=2"]
    checkpoint = ["--set", "checkpoint={save_interval_steps: 2}"]
    assert main(["train", run, *settings, *checkpoint, "--set", "data.source=synthetic", *WITHOUT_TOKENIZER]) == 0
    arguments = ["--prompt", "a", "--max-new-tokens", "4", "--checkpoint"]
    assert main(["generate", run, *WITHOUT_TOKENIZER, *arguments, str(imported / "out" / "checkpoint")]) == 0
    assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / "trained"), "--dtype", "bfloat16"]) == 0
    assert "parameters of" in capsys.readouterr().err
    assert {dtype for dtype, _, _ in values(tmp_path / "trained").values()} == {"BF16"}


def imported_chat(tmp_path: Path) -> Path:
    """The folder that ``jaxpar import`` makes of a checkpoint with a chat template."""
    source, out, config = tmp_path / "source", tmp_path / "out", replace(CONFIG, vocab=304, layers=1)
    state = drawn(jp.abstract_state(spread(config), make_decoder(config), optax.identity()), scale=0.2)
    huggingface.export(source, state.params, config)
    save_tokenizer(source)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (source / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert main(["import", str(source), str(out)]) == 0
    return out


def test_an_import_with_a_chat_template_knows_how_it_is_asked(tmp_path: Path) -> None:
    job = make_job(load_run(imported_chat(tmp_path) / "run.yaml"), training=False)
    assert chat_prompts(["hi"], job).texts == (f"user: hi{EOS}assistant: ",)


@pytest.mark.slow
def test_an_import_with_a_chat_template_is_asked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = imported_chat(tmp_path)
    asked = ["--prompt", "hi", "--chat", "--max-new-tokens", "1", "--checkpoint", str(out / "checkpoint")]
    assert main(["generate", str(out / "run.yaml"), *asked]) == 0
    assert f"user: hi{EOS}assistant: " in capsys.readouterr().out


def test_an_import_replaces_nothing(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(imported / "source"), str(imported / "out")]) == 2
    assert f"{imported / 'out' / 'checkpoint'} exists. Remedy: delete it" in capsys.readouterr().err
    assert main(["export", str(imported / "out" / "checkpoint"), str(imported / "source")]) == 2
    assert f"export: {imported / 'source'} exists. Remedy: delete it" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jp.save(tmp_path / "one", {"w": jax.numpy.ones(3)})
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "does not say that it holds a built-in model" in capsys.readouterr().err
