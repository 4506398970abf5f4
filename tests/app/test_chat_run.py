"""Runs on conversations: ``data.chat_template``, a loss on answers only, LoRA on the weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from error_texts import raises
from small_tokenizer import EOS, save_tokenizer

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.conversation_data import conversation_plans, describe, run_conversations
from jaxpar.app.generate.chat import chat_prompts
from jaxpar.app.generate.prompts import read_prompts
from jaxpar.app.job import Job, make_job
from jaxpar.app.train.run_data import global_stream, open_data
from jaxpar.data import load_tokenizer
from jaxpar.errors import ConfigError, DataError
from jaxpar.models.losses import next_token_loss

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "lora_llama.yaml"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, its template and 80 conversations."""
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": TEMPLATE}))
    rows = [{"prompt": f"where sat cat {i} on the log?", "completion": f"cat {i} sat on the mat."} for i in range(80)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(folder: Path, output: Path, **changes: Any) -> list[str]:
    values: dict[str, Any] = {"model.layers": 1, "model.embed": 32, "model.mlp": 48, "model.head_dim": 8}
    values |= {"model.vocab": 300, "data.source": folder / "chat.jsonl", "data.seq": 96, "data.batch": 8}
    values |= {"data.tokenizer": folder / "tokenizer.json", "data.chat_template": folder / "tokenizer.json"}
    values |= {"data.heldout_fraction": 0.2, "train.init_from": "null", "train.steps": 4, "train.eval_every": 2}
    values |= {"train.eval_batches": 1, "checkpoint.save_interval_steps": 2, "checkpoint.keep": 2, "output": output}
    return [f"{key}={value}" for key, value in (values | changes).items()]


def job_of(folder: Path, output: Path, **changes: Any) -> Job:
    return make_job(load_run(RECIPE, settings(folder, output, **changes)))


@pytest.mark.slow
def test_batches_have_a_mask_and_the_loss_is_that_of_answers(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, tmp_path)
    assert job.batch_names() == ("tokens", "targets", "loss_mask")
    layout = job.layout().on_one_device()
    data = open_data(job, layout)
    assert data.line.startswith("chat.jsonl: 6") and data.line.endswith("with a loss on answers")
    batch, same = next(data.stream), next(global_stream(job, layout))
    data.stream.close()
    for name in job.batch_names():
        np.testing.assert_array_equal(batch[name], same[name])
        assert batch[name].shape == (8, 96) and batch[name].dtype == np.int32
    assert 0 < batch["loss_mask"].mean() < 0.6 and len(data.heldout) == 1
    assert {name: (leaf.value.shape, leaf.dims) for name, leaf in job.batch_spec().items()} == {
        name: ((8, 96), ("batch", "seq")) for name in job.batch_names()
    }
    state = jp.init(layout, job.make_model, job.tx)
    run = jax.jit(lambda state, batch: (next_token_loss(state.model, batch), state.model(batch["tokens"])))
    with layout:
        (loss, metrics), logits = run(state, batch)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], -1)[..., 0]
    mask = batch["loss_mask"]
    assert float(loss) == pytest.approx(-(chosen * mask).sum() / mask.sum(), abs=1e-5)
    assert int(metrics["weight"]) == mask.sum()


@pytest.mark.slow
def test_packed_conversations_have_the_loss_and_gradients_of_padded_ones(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, tmp_path, **{"data.packing": "documents", "data.seq": 200, "model.lora": "null"})
    assert job.batch_names() == ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    layout = job.layout()
    data = open_data(job, layout)
    data.stream.close()
    assert " conversations to train on in " in data.line
    found = run_conversations(job.config, job.tokenizer)
    packed = jax.tree.map(lambda *rows: np.stack(rows), *found.train[:8])
    kept = [(row, segment) for row in range(8) for segment in np.unique(packed["segment_ids"][row])]
    kept = [(row, s) for row, s in kept if packed["loss_mask"][row][packed["segment_ids"][row] == s].any()]
    padded = {name: np.zeros((-(-len(kept) // 8) * 8, 200), np.int32) for name in ("tokens", "targets", "loss_mask")}
    for number, (row, segment) in enumerate(kept):
        at = packed["segment_ids"][row] == segment
        for name, array in padded.items():
            array[number, : at.sum()] = packed[name][row][at]
    assert len(kept) > 16
    losses, grads = [], []
    for one, batch in ((layout, packed), (layout.on_one_device(), padded)):
        state = jp.init(one, job.make_model, job.tx)
        step = jp.train_step(one, job.loss_fn, donate=False, return_grads=True)
        _, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        grads.append(jax.tree.map(np.asarray, metrics["grads"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    chex.assert_trees_all_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packing", ["false", "documents"])
def test_the_line_about_conversations_and_their_batches(packing: str, folder: Path, tmp_path: Path) -> None:
    config = load_run(RECIPE, settings(folder, tmp_path, **{"data.packing": packing})).config
    found = run_conversations(config, load_tokenizer(folder / "tokenizer.json"))
    train, heldout = found.conversations
    assert train + heldout == 80 and (len(found.train) == train) is (packing == "false")
    rows = f" in {len(found.train):,} rows" if packing == "documents" else ""
    line = f"chat.jsonl: {train} conversations to train on{rows}, {heldout} held out; batch 8 × 96 tokens, with a loss"
    assert describe(found, config) == f"{line} on answers"
    some = dataclasses.replace(found, truncated=2, bad="1 bad row skipped")
    assert describe(some, config) == f"{line} on answers; 2 are longer, and cut; 1 bad row skipped"
    plans = conversation_plans(found, 4, {"process_index": 1, "process_count": 2})
    for plan, rows_of in zip(plans, (found.train, found.heldout), strict=True):
        np.testing.assert_array_equal(plan.read(np.array([0, 1, 3, 2]))["tokens"][0], rows_of[3]["tokens"])


def test_settings_that_exclude_conversations_are_errors(folder: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "data.chat_template", "packs"):
        job_of(folder, tmp_path, **{"data.packing": True})
    with raises(ConfigError, "data.chat_template", "parallel.context.load_balance"):
        job_of(folder, tmp_path, **{"parallel.context.load_balance": "balanced"})


def test_prompts_are_conversations_as_in_training(folder: Path, tmp_path: Path) -> None:
    job = job_of(folder, tmp_path, **{"model.lora": "null"})
    lines = [
        "where sat cat 1?",
        [{"role": "user", "content": "where?"}],
        {"messages": [{"role": "user", "content": "w"}]},
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = chat_prompts(["hi", *read_prompts(tmp_path / "chat.jsonl", chat=True)], job)
    said = ("hi", "where sat cat 1?", "where?", "w")
    assert prompts.texts == tuple(f"user: {text}{EOS}\nassistant: " for text in said)
    assert list(prompts.ids[0]) == job.tokenizer.encode_rendered(prompts.texts[0])[0].tolist()
    assert prompts.ids[0].count(job.tokenizer.eos) == 1 and prompts.ids[0][-1] != job.tokenizer.eos
    assert (prompts.stop_tokens, prompts.stop) == ((job.tokenizer.eos,), ())
    Path(tmp_path / "plain.jinja").write_text(TEMPLATE.replace("{{ eos_token }}", "|"))
    other = job_of(folder, tmp_path, **{"model.lora": "null", "data.chat_template": tmp_path / "plain.jinja"})
    assert (chat_prompts(["hi"], other).stop_tokens, chat_prompts(["hi"], other).stop) == ((), ("|",))


def test_a_run_on_text_asks_with_the_template_of_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    wanted = chat_prompts(["hi"], job_of(folder, tmp_path))
    for tokenizer in (folder / "tokenizer.json", f"{{file: {folder / 'tokenizer.json'}}}"):
        found = chat_prompts(
            ["hi"],
            job_of(folder, tmp_path, **{"data.chat_template": "null", "data.tokenizer": tokenizer}),
        )
        assert found == wanted
    alone = save_tokenizer(tmp_path)
    with raises(DataError, "chat_template.jinja"):
        chat_prompts(["hi"], job_of(folder, tmp_path, **{"data.chat_template": "null", "data.tokenizer": alone}))


def test_conversations_that_cannot_be_prompts_are_errors(folder: Path, tmp_path: Path) -> None:
    with raises(ConfigError, "--chat"):
        chat_prompts(["hi"], job_of(folder, tmp_path, **{"data.chat_template": "null", "data.tokenizer": "null"}))
    with raises(DataError, "prompt 1"):
        chat_prompts(["hi", f"a{EOS}"], job_of(folder, tmp_path))
    file = tmp_path / "chat.jsonl"
    file.write_text("3\n")
    with raises(ConfigError, "--prompts", "chat.jsonl"):
        read_prompts(file, chat=True)


@pytest.mark.slow
def test_a_run_on_conversations_resumes_bitwise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lambda output: [word for one in settings(folder, tmp_path / output) for word in ("--set", one)]
    assert main(["train", str(RECIPE), *run("one")]) == 0
    generate = ["generate", str(RECIPE), *run("one"), "--prompt=hi", "--max-new-tokens=2", "--batch=8"]
    generate += ["--checkpoint", str(tmp_path / "one" / "checkpoints"), "--json", str(tmp_path / "answers.jsonl")]
    capsys.readouterr()
    assert main([*generate, "--chat"]) == 0
    screen = capsys.readouterr()
    assert screen.out.startswith(f"user: hi{EOS}\nassistant: ") and "Remedy: --chat" not in screen.err
    assert json.loads((tmp_path / "answers.jsonl").read_text())["prompt"] == f"user: hi{EOS}\nassistant: "
    assert main(generate) == 0
    assert "prompts are continued as text, but the run trains on conversations. Remedy: --chat" in (
        " ".join(capsys.readouterr().err.split())
    )
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "4")
    assert main(["train", str(RECIPE), *run("two")]) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    job = job_of(folder, tmp_path)
    like = {"params": jp.abstract_state(job.layout(), job.make_model, job.tx).params}
    ends = [jp.restore(tmp_path / name / "checkpoints" / "4", like, only=["params"]) for name in ("one", "two")]
    chex.assert_trees_all_equal(*ends)
    records = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(record["loss"]) for record in records if "loss" in record)
