"""Tests runs of models and data that the configuration names: vectors, images, tokens with dropout, bytes."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from error_texts import raises
from run_processes import TrainProcess

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.data_config import DataConfig
from jaxpar.app.job import make_job
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.own_data import own_data
from jaxpar.app.train.metrics import MetricsWriter
from jaxpar.checkpoint.verify import check, steps_in
from jaxpar.errors import DataError

LAYOUT = Path(__file__).parents[2] / "configs/layouts/fsdp_tp.yaml"
RUN: dict[str, Any] = {
    "layout": str(LAYOUT),
    "cpu_devices": 8,
    "optimizer": {"learning_rate": 0.02, "warmup": 0},
    "train": {"steps": 6, "eval_every": 3, "eval_batches": 2},
    "checkpoint": {"save_interval_steps": 100},
    "output": "out",
}
RUNS: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": {"factory": "own_models:make_mlp", "loss": "own_models:classify", "args": {"width": 32}},
        "data": {"factory": "own_models:make_points", "batch": 16},
        "rules": {"features": None},
    },
    "resnet": {
        "model": {
            "factory": "own_models:make_resnet",
            "loss": "own_models:resnet_loss",
            "eval_loss": "own_models:resnet_eval_loss",
        },
        "data": {
            "factory": "own_models:make_images",
            "batch": 16,
            "dims": {"pixels/image": ["batch", None, None, None]},
        },
        "rules": {"channels": "model", "channels_2": None, "vocab": None},
    },
    "encoder": {
        "model": {
            "factory": "own_models:make_encoder",
            "loss": "own_models:copy_loss",
            "eval_loss": "own_models:copy_eval_loss",
        },
        "data": {"factory": "own_models:make_tokens", "batch": 16, "seq": 8},
    },
    "gpt": {
        "model": {
            "factory": "own_models:make_gpt",
            "loss": "own_models:next_byte",
            "decoder": "own_models:gpt_decoder",
        },
        "data": {"source": "synthetic", "batch": 16, "seq": 16},
    },
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``run(name, **changes)`` writes the configuration of a run beside its module, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(Path(__file__).with_name("own_models.py"), tmp_path)

    def write(name: str, **changes: Any) -> str:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, **RUNS[name], **changes}))
        return "run.yaml"

    yield write
    sys.modules.pop("own_models", None)


def records(key: str) -> list[float]:
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def end_at_three(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    write = MetricsWriter.write

    def terminating(self: MetricsWriter, step: int, **values: float) -> None:
        write(self, step, **values)
        if step == 3 and "loss" in values:
            signal.raise_signal(number)

    monkeypatch.setattr(MetricsWriter, "write", terminating)


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/app/test_finetune.py compares with a run that was never killed, and test_resume.py the bytes."""
    run("mlp", train={"steps": 10**6, "eval_every": 10**6}, checkpoint={"save_interval_steps": 2})
    process = TrainProcess(tmp_path, yaml.safe_load(Path("run.yaml").read_text()))
    process.wait_for(lambda: process.reached(5))
    process.process.kill()
    assert process.process.wait() == -signal.SIGKILL
    last, before = max(steps_in(tmp_path / "run/checkpoints")), process.losses()
    assert main(["train", "run.yaml", f"--set=train.steps={last + 2}"]) == 0
    assert f"resumed from step {last} " in capsys.readouterr().out
    after = process.losses()
    assert after.keys() >= {*range(1, last + 3)} and all(after[step] == before[step] for step in range(1, last + 1))


UNIT = {"mlp": "examples", "resnet": "examples", "encoder": "tokens", "gpt": "tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet", "encoder"])  # text is resumed in tests/app/train/test_resume.py
def test_a_run_of_any_kind_is_terminated_and_resumes_on_another_mesh(
    name: str, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(name)
    number = signal.SIGHUP if name == "mlp" else signal.SIGTERM
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a run ignores SIGHUP
    with monkeypatch.context() as patch:
        end_at_three(patch, number)
        assert main(["train", config]) == ExitCode.STOPPED
    signal.signal(number, before)
    assert steps_in(Path("out/checkpoints")) == [3]
    assert main(["train", config, "--set", "mesh.model=1"]) == 0
    screen = capsys.readouterr().out
    assert "resumed from step 3" in screen and "mesh: data 8 = 8 devices" in screen
    losses, unit = records("loss"), UNIT[name]
    assert len(losses) == 6 and min(losses[3:]) < losses[0]
    assert len(records(f"{unit}_per_second")) == 6 and f" {unit}/s (median step)" in screen
    assert not records("examples_per_second" if unit == "tokens" else "tokens_per_second")
    assert "nats per token" not in screen and "MFU" not in screen
    assert main(["verify-checkpoint", "out/checkpoints/6"]) == 0
    if name == "mlp":
        assert check(Path("out/checkpoints/6")).metadata["position"]["fingerprint"]["examples"] == 64
        assert "data    own_models:make_points: 64 examples to train on, 64 examples held out; batch 16" in screen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "encoder"])  # with statistics, and with dropout
def test_a_run_of_any_kind_is_verified(name: str, run: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", run(name)]) == 0
    assert "verified            within 1e-05" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_a_run_of_any_kind_is_explained_and_checked(
    name: str, run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(name)
    assert main(["explain", config, "--full"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("batch/")}
    image = "batch, ·, ·, ·  data, ·, ·, ·"
    tokens = "batch, seq    data, ·"
    want = {
        "mlp": {"batch/x": "batch, features  data, ·", "batch/label": "batch            data"},
        "resnet": {"batch/pixels/image": image, "batch/label": "batch           data"},
        "gpt": {"batch/tokens": tokens, "batch/targets": tokens},
    }[name]
    assert rows.keys() == want.keys() and all(text in rows[path] for path, text in want.items()), rows
    assert main(["check", config, "--no-strict"]) == 0


@pytest.mark.slow
def test_a_model_with_a_decoder_generates(run: Callable[..., str]) -> None:
    config = run("gpt", model={**RUNS["gpt"]["model"], "args": {"layers": 1}})
    assert main(["generate", config, "--prompt", "ab", "--max-new-tokens", "4", "--json", "answers.jsonl"]) == 0
    (answer,) = (json.loads(line) for line in Path("answers.jsonl").read_text().splitlines())
    job = make_job(load_run(config))
    state = jp.init(job.layout(), job.make_model, optax.identity())
    model = state.metadata.kind.merge(*jax.device_get((state.params, state.variables)))
    tokens = list(b"ab")
    for _ in range(4):
        padded = jnp.array([tokens + [0] * (6 - len(tokens))])  # one shape, which a causal model does not notice
        tokens.append(int(model(padded)[0, len(tokens) - 1].argmax()))
    assert (answer["tokens"], answer["text"]) == (4, bytes(tokens[2:]).decode(errors="replace"))


def test_a_decoder_that_cannot_generate_is_named(run: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert main(["generate", run("gpt"), "--prompt", "a", *words]) == 2
        return capsys.readouterr().err

    assert error("--set=model.decoder=own_models:no_data") == (
        "ConfigError: model.decoder: own_models:no_data must return a jaxpar.inference.DecoderFns, got int. Remedy: "
        "its fields are documented there.\n"
    )
    assert error("--set=model.decoder=null") == (
        "ConfigError: generate: own_models:make_gpt is a model of your own, whose cache is not known. Remedy: model: "
        '{decoder: "my_module:decoder"}, a function that returns a jaxpar.inference.DecoderFns.\n'
    )
    assert error("--int8", "cache") == (
        "ConfigError: generate: int8 is for built-in models, but own_models:make_gpt is one of your own. Remedy: leave "
        "it out; the decoder itself can store integers (prepare, cache).\n"
    )


def test_the_positions_of_an_iterator_are_those_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from own_models import make_tokens

    from jaxpar.app.train import checkpointing
    from jaxpar.data.examples import BatchIterator

    alone = BatchIterator("m:f", make_tokens(4, 8, 0, "train", 0, 1), 4)
    saved = checkpointing.for_all_processes(alone, alone.get_state())
    next(alone)
    alone.set_state(checkpointing.for_this_process(saved, alone))
    assert alone.get_state() == saved
    streams = [
        BatchIterator("m:f", make_tokens(4, 8, 0, "train", i, 2), 4, process_index=i, process_count=2) for i in (0, 1)
    ]
    next(streams[0]), next(streams[1])
    states = [stream.get_state() for stream in streams]
    monkeypatch.setattr(checkpointing.jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpointing, "gather", lambda mine: [json.dumps(s["position"]).encode() for s in states])
    saved = checkpointing.for_all_processes(streams[0], states[0])
    assert saved["positions"] == [{"next": 1, "first_row": 0}, {"next": 1, "first_row": 2}]
    monkeypatch.setattr(checkpointing.jax, "process_index", lambda: 1)
    streams[1].set_state(checkpointing.for_this_process(saved, streams[1]))
    assert streams[1].get_state() == states[1]


def token_data(monkeypatch: pytest.MonkeyPatch, **table: Any) -> Any:
    """Data of this folder's module, which is an iterator of batches."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return own_data(DataConfig(**{"factory": "own_models:make_tokens", "batch": 4, "seq": 8, **table}))


def test_an_iterator_is_where_it_was_after_a_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, and batches for evaluation, which are the same in every call, take nothing of the stream."""
    data = token_data(monkeypatch)
    assert data.shapes()["tokens"].shape == (4, 8) and data.shapes()["tokens"].dtype == "int32"
    assert data.describe() == (
        "own_models:make_tokens: batches of an iterator to train on, batches of an iterator held out; batch 4"
    )
    first, again = data.heldout(2), data.heldout(2)
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one["tokens"], other["tokens"])
    assert not np.array_equal(first[0]["tokens"], first[1]["tokens"])
    whole = next(data.stream())["tokens"]
    halves = [next(data.stream(process_index=index, process_count=2))["tokens"] for index in (0, 1)]
    assert np.array_equal(np.concatenate(halves), whole)
    assert not np.array_equal(whole, first[0]["tokens"])  # what is held out is not trained on


@pytest.mark.parametrize(
    ("factory", "call"),
    [
        ("own_models:few_batches", lambda data: data.heldout(2)),
        ("own_models:few_batches", lambda data: data.stream(process_count=2)),
        ("own_models:a_text", lambda data: data.stream()),
    ],
)
def test_iterators_that_cannot_be_read(
    factory: str, call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(DataError, factory):
        call(token_data(monkeypatch, factory=factory, seq=128))


def test_fewer_batches_than_asked_for_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(token_data(monkeypatch, factory="own_models:few_batches", seq=128, args={"count": 2}).heldout(5)) == 2


NAMES = "'split', 'batch', 'seq', 'seed', 'process_index', 'process_count'"
WRONG: dict[str, tuple[str, list[str], str]] = {
    "no module": (
        "mlp",
        ["data.factory=own:data"],
        (
            "data.factory: there is no module 'own' in {folder} or on Python's path. Remedy: run in the folder of "
            "own.py, or install it."
        ),
    ),
    "arguments": (
        "mlp",
        ["data.args.count=3"],
        (
            "data: own_models:make_points fails with args {{'count': 3}}: TypeError: make_points() got an unexpected "
            "keyword argument 'count' (called by jaxpar). Remedy: it is called as function(**args), with those of "
            f"{NAMES} that it takes."
        ),
    ),
    "seq": (
        "mlp",
        ["data.seq=64"],
        "data.seq is set, but own_models:make_points takes no argument `seq`. Remedy: leave data.seq out.",
    ),
    "source": (
        "mlp",
        ["data.source=synthetic"],
        "data.source is set, but data.factory names data of your own. Remedy: leave data.source out.",
    ),
    "a chat template": (
        "mlp",
        ["data.chat_template=chat_template.jinja"],
        "data.chat_template is set, but data.factory names data of your own. Remedy: leave data.chat_template out.",
    ),
    "no data": (
        "mlp",
        ["data.factory=own_models:no_data"],
        (
            "data: own_models:no_data must return examples, got int. Remedy: a sequence of examples, a mapping of "
            "arrays, or an iterable with get_state and set_state."
        ),
    ),
    "too few": (
        "mlp",
        ["data.args.examples=8"],
        (
            "data: own_models:make_points: 8 examples are too few for one global batch of 16. Remedy: a smaller "
            "data.batch, or more examples."
        ),
    ),
    "unknown dim": (
        "resnet",
        ["data.dims.labels=[batch]"],
        "data.dims names 'labels', but the batch has 'label', 'pixels/image'. Did you mean 'label'?",
    ),
    "number of dims": (
        "resnet",
        ["data.dims.label=[batch, null]"],
        "data.dims: label must have a name or null for each of its 1 dims [16], got ['batch', None].",
    ),
    "dims of a text": (
        "gpt",
        ["data.dims.tokens=[batch, seq]"],
        (
            "data.dims is for data.factory, but the data is the text 'synthetic'. Remedy: leave data.dims out, or set "
            "data.factory."
        ),
    ),
    "a built-in model": (
        "mlp",
        ["model={family: llama}"],
        (
            "data.factory names data of your own, but model.family: llama trains on text. Remedy: data.source, or a "
            "model.factory of your own."
        ),
    ),
    "no rules": (
        "mlp",
        ["rules={}"],
        (
            "model: own_models:make_mlp names no dims, and of the names found for them 'features' has no rule. Remedy: "
            "rules: {{features: null}}, which replicates; or a mesh axis instead of null, such as model."
        ),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_that_does_not_fit_is_named(
    case: str, run: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, changes, text = WRONG[case]
    assert main(["explain", run(name), *(f"--set={change}" for change in changes)]) == 2
    kind, _, message = capsys.readouterr().err.rstrip("\n").partition(": ")
    assert kind in ("ConfigError", "DataError") and message == text.format(folder=tmp_path)


def test_nothing_is_held_out_by_data_without_a_split(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = run("mlp", data={"factory": "own_models:more_points", "batch": 16}, checkpoint={"best": {}})
    assert main(["train", config, "--set=checkpoint.save_interval_steps=3"]) == 2
    captured = capsys.readouterr()
    assert (
        "own_models:more_points: 64 examples to train on; nothing is held out, because it takes no argument `split`"
        in captured.out
    )
    assert "checkpoint: best ranks by heldout_loss, but own_models:more_points holds nothing out. Remedy: metric: " in (
        captured.err
    )
