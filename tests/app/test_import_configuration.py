"""``jaxpar import-mindformers`` and its like: configurations of other systems that build a job and train."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxpar as jp
from jaxpar.app.cli import main
from jaxpar.app.config import load_run
from jaxpar.app.import_configuration import _MOST_BYTES
from jaxpar.app.job import make_job

MODEL = """
model:
  model_config: {hidden_size: 64, num_layers: 2, num_heads: 4, n_kv_heads: 4, vocab_size: 256, seq_length: 64,
                 intermediate_size: 96, compute_dtype: bfloat16, param_init_type: float32, %s}
lr_schedule: {type: LinearWithWarmUpLR, learning_rate: 1.e-3, warmup_steps: 2, total_steps: 4}
optimizer: {type: AdamW, weight_decay: 0.1}
runner_wrapper: {scale_sense: 1.0, use_clip_grad: true}
"""
PIPELINE = """
parallel: {enable_parallel_optimizer: true, parallel_optimizer_config: {parallel_optimizer_threshold: 1}}
parallel_config: {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2, use_seq_parallel: true}
recompute_config: {recompute: [1, 0]}
runner_config: {batch_size: 2}
"""
CONTEXT = """
parallel_config: {data_parallel: 2, context_parallel: 4, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 2}
parallel: {enable_parallel_optimizer: true, parallel_optimizer_config: {parallel_optimizer_threshold: 1}}
recompute_config: {recompute: true, parallel_optimizer_comm_recompute: true}
"""
EXPERTS = """
moe_config: {expert_num: 4, num_experts_chosen: 2, capacity_factor: 1.5, aux_loss_factor: 0.01}
parallel_config: {data_parallel: 4, model_parallel: 2, expert_parallel: 2, use_seq_parallel: true, vocab_emb_dp: false}
parallel: {enable_parallel_optimizer: true, parallel_optimizer_config: {gradient_accumulation_shard: true}}
runner_config: {gradient_accumulation_steps: 2}
"""
LATENT = """
moe_config: {expert_num: 2, num_experts_chosen: 1, first_k_dense_replace: 0, moe_intermediate_size: 32, use_gmm: true}
parallel_config: {data_parallel: 4, model_parallel: 2}
"""
LATENT_STAGES = LATENT.replace("data_parallel: 4", "data_parallel: 2, pipeline_stage: 2, micro_batch_num: 2")
LATENT_STAGES = LATENT_STAGES.replace("replace: 0", "replace: 1")
LATENT_SIZES = "kv_lora_rank: 16, q_lora_rank: 24, qk_rope_head_dim: 8, qk_nope_head_dim: 16, v_head_dim: 16"
FURTHER = f"{LATENT_SIZES}, num_hidden_layers: 4, mtp_depth: 1, offset: [1, 0]"
GROUPS = """
parallel_config: {data_parallel: 8}
parallel:
  enable_parallel_optimizer: true
  parallel_optimizer_config: {optimizer_weight_shard_size: 4, parallel_optimizer_threshold: 1}
swap_config: {swap: true}
runner_wrapper: {scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 65536}}
"""
ADAPTERS = "pet_config: {pet_type: lora, lora_rank: 2, lora_dropout: 0.0, target_modules: '.*wq|.*w2'}"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the check of the translation, which traces a step, out of tests of files and texts."""
    monkeypatch.setattr(jp, "check", lambda *asked, **how: SimpleNamespace(memory=None))


def convert(folder: Path, text: str, *options: str) -> int:
    (folder / "source.yaml").write_text(text, encoding="utf-8")
    return main(["import-mindformers", str(folder / "source.yaml"), str(folder / "run.yaml"), *options])


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        pytest.param(
            PIPELINE + MODEL % "fine_grain_interleave: 2",
            {"pipeline": 2, "data": 2, "model": 2},
            id="pipeline",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "parallel_config: {data_parallel: 8}" + MODEL % ADAPTERS, {"data": 8}, id="adapters", marks=pytest.mark.slow
        ),
        pytest.param(CONTEXT + MODEL % "qk_layernorm: true", {"data": 2, "context": 2, "ulysses": 2}, id="context"),
        pytest.param(
            EXPERTS + MODEL % "rms_norm_eps: 1.e-6",
            {"data": 2, "expert": 2, "model": 2},
            id="experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LATENT_STAGES + (MODEL % FURTHER).replace("num_layers: 2, ", ""),
            {"pipeline": 2, "data": 2, "model": 2},
            id="latent-stages",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GROUPS + (MODEL % "qkv_has_bias: true").replace("runner_wrapper", "#"),
            {"data": 8},
            id="groups",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_translation_builds_a_job(
    text: str, mesh: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, text, "--json", str(tmp_path / "report.json")) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"wrote {tmp_path / 'run.yaml'}, for 8 devices\n") and " 0 refused" in out
    job = make_job(load_run(tmp_path / "run.yaml"))
    assert job.layout_data["mesh"] == mesh and job.abstract_devices() == 8
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["status"] for row in rows} <= {"translated", "ignored"}
    if "lora" in text:
        assert main(["check", str(tmp_path / "run.yaml")]) == 0  # no rule is unused


@pytest.mark.slow  # compiles the step of a pipeline with tensor and data parallelism
def test_a_translation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert convert(tmp_path, PIPELINE + MODEL % "qkv_has_bias: false") == 0
    run = [str(tmp_path / "run.yaml"), "--set", "train.eval_every=4", "--set", "train.eval_batches=1"]
    assert main(["train", *run]) == 0
    losses = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in losses)


@pytest.mark.usefixtures("unchecked")
def test_a_refused_key_stops_the_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "parallel_config: {data_parallel: 2}" + MODEL % "hidden_act: gelu"
    assert convert(tmp_path, text) != 0
    error = capsys.readouterr().err
    assert error == (
        f"ConfigError: {tmp_path / 'source.yaml'}: 1 key cannot be translated:\n"
        "- model.model_config.hidden_act: gelu: the MLP is a SwiGLU\n"
        "Remedy: change or remove them, or import without them: --ignore KEY.\n"
    )
    assert not (tmp_path / "run.yaml").exists()
    assert convert(tmp_path, text, "--ignore", "model.model_config.hidden_act") == 0
    assert convert(tmp_path, text) != 0
    assert capsys.readouterr().err == (
        f"ConfigError: {tmp_path / 'run.yaml'} exists. Remedy: delete it, or write another file.\n"
    )


@pytest.mark.usefixtures("unchecked")
def test_a_base_has_the_model_and_the_data(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {family: llama, preset: tiny, layers: 6}\ndata: {source: stdlib, batch: 4, seq: 32}\n")
    text = "parallel_config: {data_parallel: 4}\nrunner_config: {batch_size: 2}"
    assert convert(tmp_path, text, "--base", str(base), "--steps", "3") == 0
    config = load_run(tmp_path / "run.yaml").config
    assert config.model == {"family": "llama", "preset": "tiny", "layers": 6}
    assert (config.data.source, config.data.batch, config.data.seq, config.train.steps) == ("stdlib", 8, 32, 3)


def test_problems_of_the_layout_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {family: llama, preset: tiny, layers: 3}\ndata: {source: stdlib, seq: 32}\n")
    text = "parallel_config: {pipeline_stage: 2, micro_batch_num: 2}"
    assert convert(tmp_path, text, "--base", str(base), "--steps", "3") != 0
    error = capsys.readouterr().err
    assert error.startswith(
        f"ConfigError: {tmp_path / 'source.yaml'}: its translation is not a valid run: params/blocks/"
    )
    assert "has size 3, which is not a multiple of pipeline=2" in error and "Remedy: use a number of stages" in error
    assert not (tmp_path / "run.yaml").exists()


def test_a_base_needs_a_built_in_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {factory: mine:make}\n")
    assert convert(tmp_path, PIPELINE, "--base", str(base)) != 0
    assert capsys.readouterr().err == (
        f"ConfigError: --base {base}: model.family must be set. Remedy: the configuration of a built-in model.\n"
    )


@pytest.mark.usefixtures("unchecked")
def test_a_deepspeed_file_builds_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, source, out = tmp_path / "base.yaml", tmp_path / "ds.json", tmp_path / "run.yaml"
    base.write_text(
        "model: {family: llama, preset: tiny, layers: 2}\ndata: {source: stdlib, seq: 32}\n"
        "optimizer: {name: lion}\ntrain: {steps: 7}\nparallel: {remat: dots}\n"
    )
    source.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}'
    )
    run = ["import-deepspeed", str(source), str(out), "--base", str(base)]
    assert main([*run, "--devices", "8"]) == 0
    job = make_job(load_run(out))
    assert job.zero.stage == 3 and job.precision.scale is not None and job.llama.dtype == "float16"
    assert (job.config.optimizer.name, job.config.train.steps, job.config.parallel.remat) == ("lion", 7, "dots")
    assert "&id" not in out.read_text()
    source.write_text("[1]")
    out.unlink()
    assert main(run) != 0
    assert capsys.readouterr().err == f"ConfigError: {source} must be a JSON object, got list.\n"


SCRIPT = """
ARGS=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 64 --swiglu
  --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
  --disable-bias-linear --bf16 --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer)
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py ${ARGS[@]}
"""


@pytest.mark.usefixtures("unchecked")
def test_a_launch_script_builds_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(SCRIPT)
    assert main(["import-megatron", str(script), str(out)]) != 0
    assert capsys.readouterr().err == (
        f"ConfigError: {script}: torchrun does not say the number of devices. Remedy: --devices N, or --variable "
        "NODES=N.\n"
    )
    assert main(["import-megatron", str(script), str(out), "--variable", "NODES=1"]) == 0
    job = make_job(load_run(out))
    assert job.layout_data["mesh"] == {"data": 4, "model": 2} and job.zero.stage == 1


@pytest.mark.usefixtures("unchecked")
def test_arguments_come_from_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = tmp_path / "run.yaml"
    assert main(["import-megatron", str(tmp_path / "run.sh"), str(out), "--variable", "NODES=1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("--lr 1e-3 --wrong 3 --micro-batch-size 1 --train-iters 3"))
    base = ["--base", str(out), "--devices", "1", "--ignore", "wrong"]
    assert main(["import-megatron", "-", str(tmp_path / "second.yaml"), *base]) == 0
    assert load_run(tmp_path / "second.yaml").config.train.steps == 3
    assert main(["import-megatron", "-", str(tmp_path / "third.yaml"), "--variable", "A"]) != 0
    assert capsys.readouterr().err == (
        "ConfigError: --variable must be NAME=VALUE, got 'A'. Remedy: --variable NNODES=4.\n"
    )


def test_files_that_are_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe")
    for command in ("import-megatron", "import-deepspeed"):
        assert main([command, str(file), str(tmp_path / "out.yaml")]) != 0
        assert capsys.readouterr().err == (f"ConfigError: {file}: must be text in UTF-8. Remedy: another file.\n")
    assert main(["import-megatron", str(tmp_path / "none"), str(tmp_path / "out.yaml")]) != 0
    assert capsys.readouterr().err == (
        f"ConfigError: {tmp_path / 'none'}: cannot be read: No such file or directory. Remedy: the path of a file, or "
        "- for standard input.\n"
    )
    file.write_text("{")
    assert main(["import-deepspeed", str(file), str(tmp_path / "out.yaml")]) != 0
    assert capsys.readouterr().err.startswith(f"ConfigError: {file} must be JSON, got JSONDecodeError")
    with file.open("wb") as opened:
        opened.truncate(_MOST_BYTES + 1)
    assert main(["import-megatron", str(file), str(tmp_path / "out.yaml")]) != 0
    assert capsys.readouterr().err == (
        f"ConfigError: {file}: cannot be read: it has more than {_MOST_BYTES:,} bytes. Remedy: the path of a file, or "
        "- for standard input.\n"
    )


def test_a_base_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, source, out = tmp_path / "base.yaml", tmp_path / "ds.json", tmp_path / "run.yaml"
    source.write_text('{"train_batch_size": 8}')
    run = ["import-deepspeed", str(source), str(out), "--base", str(base), "--devices", "8"]
    base.write_text("model: {family: llama}\ntrain: [1]\n")
    assert main(run) != 0
    assert capsys.readouterr().err == f"ConfigError: --base {base}: train must be a mapping, got [1].\n"
    base.write_text("model: {family: llama, preset: tny}\n")
    assert main(run) != 0
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: {source}: its translation is not a valid run: ") and "tny" in error
    assert not out.exists()


def test_a_terminal_shows_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert convert(tmp_path, "parallel_config: {data_parallel: 2}" + MODEL % "hidden_act: '[gelu]'") != 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    (refused,) = [line for line in lines if "hidden_act" in line]
    cells = [cell.strip() for cell in re.split("[│┃]", refused)[1:-1]]
    assert cells == ["model.model_config.hidden_act", "[gelu]", "refused", "the MLP is a SwiGLU"]
    assert lines[-1].endswith("1 refused")
