"""MindFormers configurations: what they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import raises
from mindformers_files import EXPERTS, ONE_STAGE, changed, row, run_of
from mutations import mutated

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError
from jaxpar.interop.configurations.keys import ImportOptions
from jaxpar.interop.configurations.mindformers.translate import import_mindformers


def test_a_dense_configuration_becomes_a_run() -> None:
    found = run_of()
    assert found.devices == 8
    assert found.config["mesh"] == {"pipeline": 2, "data": 2, "model": 2}
    assert found.config["rules"]["residual_seq"] == ["context", "ulysses", "model"]
    assert found.config["rules"]["vocab"] == ["pipeline", "model"]
    assert found.config["parallel"] == {
        "pipeline": {
            "schedule": "1f1b",
            "microbatches": 4,
            "activation_checkpointing": "none",
            "recompute": [2, 1],
        },
        "optimizer": {"stage": 1, "min_bytes": "4KiB"},
        "remat": "none",
    }
    assert found.config["data"] == {"source": "synthetic", "batch": 16, "seq": 64}
    assert found.config["optimizer"] == {
        "name": "adamw",
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 10,
        "final_lr_ratio": 0.1,
        "options": {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        "decay": {"exclude": ["vectors"]},
        "clip_norm": 1.0,
    }
    assert found.config["train"] == {"seed": 1, "steps": 100}
    assert found.config["model"]["family"] == "llama" and found.config["model"]["param_dtype"] == "float32"
    found.report.check()


def test_every_key_of_the_file_has_a_row() -> None:
    data = changed(surprise=3, m__surprise=4, profile=True)
    found = import_mindformers(data, ImportOptions("run.yaml"))
    rows = {row.key: row for row in found.report.rows}
    leaves = {f"parallel_config.{key}" for key in data["parallel_config"]}
    leaves |= {f"model.model_config.{key}" for key in data["model"]["model_config"]}
    assert leaves <= rows.keys()
    assert rows["profile"].status == "ignored" and rows["profile"].note == "for the profiler"
    assert rows["surprise"].status == rows["model.model_config.surprise"].status == "refused"
    assert [row.key for row in found.report.rows][:2] == ["runner_config.epochs", "runner_config.batch_size"]
    with raises(ConfigError, "run.yaml", "model.model_config.surprise"):
        found.report.check()
    ignoring = ImportOptions("run.yaml", ignore=frozenset(["surprise", "model.model_config.surprise"]))
    import_mindformers(data, ignoring).report.check()


def test_a_report_is_text_and_json() -> None:
    report = run_of(seed=5).report
    text = report.to_text()
    assert "seed                                                             5" in text
    assert text.splitlines()[-1] == report.headline() == "run.yaml: 33 translated, 1 ignored, 0 refused"
    rows = json.loads(report.to_json())["rows"]
    assert rows[-1] == {
        "key": "seed",
        "value": 5,
        "status": "translated",
        "target": "train.seed",
        "note": "",
    }


def test_the_70b_practice_of_llama() -> None:
    found = run_of(
        parallel_config__data_parallel=1,
        parallel_config__model_parallel=8,
        parallel_config__pipeline_stage=8,
        parallel_config__micro_batch_num=256,
        runner_config__batch_size=1,
        recompute_config__recompute=False,
        recompute_config__select_recompute=[10, 8, 6, 4, 2, 0, 0, 0],
        recompute_config__recompute_slice_activation=True,
        m__hidden_size=8192,
        m__num_layers=80,
        m__num_heads=64,
        m__n_kv_heads=8,
        m__intermediate_size=None,
        m__ffn_dim_multiplier=1.3,
        m__seq_length=8192,
        m__fine_grain_interleave=2,
    )
    assert found.devices == 64
    assert found.config["model"]["mlp"] == jp.models.preset("llama3_1_70b").mlp == 28672
    assert found.config["parallel"]["pipeline"]["recompute"] == [10, 8, 6, 4, 2, 0, 0, 0]
    assert found.config["parallel"]["overlap"] == {"ways": 2, "dim": "seq"}
    assert found.config["data"]["batch"] == 256
    assert row(found, "recompute_config.select_recompute") == (
        "translated",
        "parallel.pipeline.recompute",
        "the nearest: these layers keep only their input",
    )


PLAIN = {"parallel__enable_parallel_optimizer": False, "recompute_config__recompute": False}


@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        pytest.param(
            {"parallel__parallel_optimizer_config__gradient_accumulation_shard": True},
            {"optimizer": {"stage": 2, "min_bytes": "4KiB"}, "remat": "full"},
            id="gradients-are-sharded",
        ),
        pytest.param(
            {"recompute_config__parallel_optimizer_comm_recompute": True},
            {"optimizer": {"stage": 3, "min_bytes": "4KiB"}, "remat": "full"},
            id="weights-are-gathered-again",
        ),
        pytest.param(
            {
                "parallel_config__data_parallel": 4,
                "parallel__parallel_optimizer_config__optimizer_weight_shard_size": 2,
            },
            {"optimizer": {"stage": 1, "min_bytes": "4KiB", "fsdp_group_size": 2}, "remat": "full"},
            id="weights-are-sharded-in-groups",
        ),
        pytest.param(
            {"parallel__enable_parallel_optimizer": False, "recompute_config__mp_comm_recompute": False},
            {"remat": "save_outputs"},
            id="collectives-do-not-recompute",
        ),
        pytest.param(
            {
                "parallel__enable_parallel_optimizer": False,
                "parallel_config__use_seq_parallel": False,
                "recompute_config__recompute_slice_activation": True,
            },
            {"remat": {"policy": "full", "slice_activation": True}},
            id="activations-are-sliced",
        ),
        pytest.param(
            {"parallel__enable_parallel_optimizer": False, "recompute_config__recompute": [3]},
            {"remat": {"policy": "full", "layers": [3]}},
            id="three-layers-recompute",
        ),
        pytest.param(
            {
                "parallel__enable_parallel_optimizer": False,
                "recompute_config__recompute": False,
                "recompute_config__select_recompute": True,
            },
            {"remat": "dots"},
            id="operators-recompute",
        ),
        pytest.param(
            {
                "parallel__enable_parallel_optimizer": False,
                "recompute_config__recompute": False,
                "swap_config__swap": True,
                "swap_config__op_swap": [{"op_name": ".*.flash_attention", "layers": True, "backward_prefetch": 1}],
            },
            {
                "remat": {
                    "policy": "save_names",
                    "save_names": ["attention_keys", "block_output", "qkv", "mlp_hidden"],
                    "offload_names": ["attention"],
                }
            },
            id="attention-is-offloaded",
        ),
        pytest.param(
            {
                "parallel__enable_parallel_optimizer": False,
                "recompute_config__recompute": False,
                "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [*range(8)]}]},
            },
            {
                "remat": {
                    "policy": "save_names",
                    "save_names": [],
                    "offload_names": ["attention", "attention_keys", "block_output", "qkv", "mlp_hidden"],
                }
            },
            id="all-layers-are-offloaded",
        ),
        pytest.param(
            {
                "parallel__enable_parallel_optimizer": False,
                "parallel_config__context_parallel": 2,
                "m__use_ring_attention": True,
            },
            {"remat": "full", "context": {"impl": "ring"}},
            id="ring",
        ),
        pytest.param(
            {"parallel_config__context_parallel": 2},
            {
                "optimizer": {"stage": 1, "min_bytes": "4KiB", "axis": ["data", "context"]},
                "remat": "full",
                "context": {"impl": "gather"},
            },
            id="gather",
        ),
        pytest.param(
            {"parallel__enable_parallel_optimizer": False, "micro_batch_interleave_num": 2},
            {"remat": "full", "overlap": {"ways": 2, "dim": "batch"}},
            id="two-copies",
        ),
        pytest.param(
            {**PLAIN, "recompute_config__select_recompute": [r"feed_forward\.mul"]}, {"remat": "dots"}, id="patterns"
        ),
        pytest.param(
            {**PLAIN, "recompute_config__select_recompute": {r"feed_forward\.mul": True}},
            {"remat": "dots"},
            id="mapping",
        ),
        pytest.param({**PLAIN, "recompute_config__select_recompute": {}}, {"remat": "none"}, id="no-patterns"),
        pytest.param(
            {**PLAIN, "recompute_config__select_recompute": [3]},
            {"remat": {"policy": "dots", "layers": [3]}},
            id="operators-of-three-layers-recompute",
        ),
        pytest.param(
            {**PLAIN, "recompute_config__recompute": [True]}, {"remat": {"policy": "full"}}, id="all-layers-recompute"
        ),
    ],
)
def test_parallelism_without_stages(changes: dict[str, Any], parallel: dict[str, Any]) -> None:
    found = run_of(**(ONE_STAGE | changes))
    found.report.check()
    assert found.config["parallel"] == parallel


@pytest.mark.parametrize(
    ("algorithm", "degree", "mesh", "impl"),
    [
        ("ulysses_cp", 1, {"ulysses": 2}, "ulysses"),
        ("hybrid_cp", 2, {"context": 2, "ulysses": 2}, "hybrid"),
        ("hybird_cp", 2, {"context": 2, "ulysses": 2}, "hybrid"),
    ],
)
def test_context_parallelism(algorithm: str, degree: int, mesh: dict[str, int], impl: str) -> None:
    found = run_of(
        **ONE_STAGE,
        parallel_config__context_parallel=2 * degree,
        parallel_config__context_parallel_algo=algorithm,
        parallel_config__ulysses_degree_in_cp=degree,
        m__n_kv_heads=4,
    )
    assert found.config["mesh"] == {"data": 2, **mesh, "model": 2}
    assert found.config["parallel"]["context"] == {"impl": impl}


@pytest.mark.parametrize(
    ("interleave", "scheduler", "virtual", "chunks", "pipeline"),
    [
        (False, "seqpipe", 1, 2, {"schedule": "seq1f1b", "sequence_chunks": 2}),
        (True, "seqpipe", 2, 1, {"schedule": "interleaved", "virtual_stages": 2}),
        (True, "1f1b", 2, 1, {"schedule": "interleaved", "virtual_stages": 2}),
        (True, "gpipe", 1, 1, {"schedule": "gpipe"}),
        (True, "zero_bubble_v", 2, 1, {"schedule": "zb_v", "virtual_stages": 2}),
        (False, "gpipe", 2, 1, {"schedule": "1f1b"}),
        (True, "seqsmartvpp", 2, 1, {"schedule": "interleaved", "virtual_stages": 2}),
    ],
)
def test_schedules(interleave: bool, scheduler: str, virtual: int, chunks: int, pipeline: dict[str, Any]) -> None:
    found = run_of(
        parallel__pipeline_config={"pipeline_interleave": interleave, "pipeline_scheduler": scheduler},
        parallel_config__seq_split_num=chunks,
        m__pp_interleave_num=virtual,
        recompute_config__recompute=True,
    )
    found.report.check()
    assert found.config["parallel"]["remat"] == "full"
    assert found.config["parallel"]["pipeline"] == {
        "microbatches": 4,
        "activation_checkpointing": "none",
        **pipeline,
    }


@pytest.mark.parametrize(
    ("virtual", "experts", "pipeline"),
    [(2, 1, {"schedule": "interleaved", "virtual_stages": 2}), (1, 4, {"schedule": "1f1b"})],
)
def test_sequence_chunks_that_are_left_out_leave_a_schedule_without_them(
    virtual: int, experts: int, pipeline: dict[str, Any], tmp_path: Path
) -> None:
    key = "parallel_config.seq_split_num"
    found = run_of(
        ImportOptions("run.yaml", ignore=frozenset([key])),
        parallel__pipeline_config={"pipeline_interleave": virtual > 1, "pipeline_scheduler": "seqpipe"},
        parallel_config__seq_split_num=2,
        recompute_config__recompute=False,
        m__pp_interleave_num=virtual,
        m__num_experts=experts,
    )
    found.report.check()
    assert row(found, key)[0] == "ignored"
    fixed = {"microbatches": 4, "activation_checkpointing": "none"}
    assert found.config["parallel"]["pipeline"] == fixed | pipeline
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(found.config), encoding="utf-8")
    make_job(load_run(tmp_path / "run.yaml"))


def test_sequence_chunks_recompute_whole_stages() -> None:
    found = run_of(
        parallel__pipeline_config={"pipeline_scheduler": "seqpipe"},
        parallel_config__seq_split_num=2,
    )
    pipeline = found.config["parallel"]["pipeline"]
    assert pipeline["activation_checkpointing"] == "full" and "recompute" not in pipeline
    assert row(found, "recompute_config.recompute")[2].endswith("all layers of every stage recompute")


def test_offsets_move_layers_between_stages() -> None:
    assert run_of(m__offset=[-1, 1]).config["parallel"]["pipeline"]["layers_per_stage"] == [3, 5]
    found = run_of(
        m__num_layers=9,
        m__offset=[[0, 1], [1, -1]],
        m__pp_interleave_num=2,
        recompute_config__recompute=[[2, 1], [2, 1]],
        parallel__pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "1f1b"},
    )
    assert found.config["parallel"]["pipeline"]["layers_per_stage"] == [2, 3, 3, 1]
    assert found.config["parallel"]["pipeline"]["recompute"] == [2, 1]


def test_stages_whose_weights_are_gathered_once() -> None:
    found = run_of(
        parallel__parallel_optimizer_config__gradient_accumulation_shard=True,
        recompute_config__parallel_optimizer_comm_recompute=True,
        recompute_config__recompute=[True, False],
    )
    found.report.check()
    pipeline = found.config["parallel"]["pipeline"]
    assert (pipeline["grad_reduction"], pipeline["recompute"]) == ("per_microbatch", [4, 0])
    assert found.config["parallel"]["optimizer"] == {"stage": 1, "min_bytes": "4KiB"}
    key = "recompute_config.parallel_optimizer_comm_recompute"
    assert row(found, key) == ("ignored", "", "a pipeline gathers weights once per step")


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        ({"type": "Adam", "eps": 1e-6}, {"name": "adam", "options": {"b1": 0.9, "b2": 0.999, "eps": 1e-6}}),
        (
            {"type": "SGD", "momentum": 0.9, "use_nesterov": True},
            {"name": "sgd", "options": {"momentum": 0.9, "nesterov": True}},
        ),
        ({"type": "SGD", "nesterov": False}, {"name": "sgd", "options": {"momentum": None, "nesterov": False}}),
        (
            {"type": "FP32StateAdamWeightDecay", "beta1": 0.8, "beta2": 0.95, "eps": 1e-8},
            {"name": "adamw", "options": {"b1": 0.8, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0}},
        ),
    ],
)
def test_other_optimizers(optimizer: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = run_of(optimizer=optimizer)
    found.report.check()
    assert {key: found.config["optimizer"][key] for key in wanted} == wanted


def test_a_checkpoint_monitor_sets_the_checkpoints() -> None:
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": 50, "keep_checkpoint_max": 3}
    found = run_of(callbacks=[{"type": "MFLossMonitor"}, monitor])
    assert found.config["checkpoint"] == {"save_interval_steps": 50, "keep": 3}
    target = "checkpoint.save_interval_steps, checkpoint.keep"
    assert row(found, "callbacks") == ("translated", target, "of CheckpointMonitor")
    found = run_of(callbacks=[monitor | {"save_checkpoint_steps": 0}])
    assert "checkpoint" not in found.config and row(found, "callbacks")[0] == "ignored"


def test_rows_of_a_dataset_strategy_are_the_data_axis() -> None:
    columns = ["input_ids", "labels"]
    strategy = {"parallel__full_batch": False, "parallel__dataset_strategy": [[2, 1], [2, 1]]}
    found = run_of(**strategy, train_dataset={"input_columns": columns})
    assert row(found, "parallel.dataset_strategy") == ("ignored", "", "rows are sharded over data")


@pytest.mark.parametrize(
    ("sense", "scale"),
    [
        (1024.0, {"initial": 1024.0, "minimum": 1024.0, "interval": 2**31 - 1}),
        (
            {"type": "FixedLossScaleUpdateCell", "loss_scale_value": 128},
            {"initial": 128.0, "minimum": 128.0, "interval": 2**31 - 1},
        ),
        (
            {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 4096, "scale_factor": 4, "scale_window": 500},
            {"initial": 4096.0, "growth": 4.0, "backoff": 0.25, "interval": 500},
        ),
        (
            {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 4096, "scale_factor": 1, "scale_window": 100000},
            {"initial": 4096.0, "minimum": 4096.0, "interval": 2**31 - 1},
        ),
    ],
)
def test_loss_scales(sense: Any, scale: dict[str, float]) -> None:
    found = run_of(runner_wrapper__scale_sense=sense, runner_wrapper__use_clip_grad=False)
    assert found.config["precision"] == {"scale": scale}
    assert found.config["optimizer"]["clip_norm"] is None
    assert jp.Precision.of(found.config["precision"]).scale is not None


def test_steps_follow_from_the_data_or_the_caller() -> None:
    sized = {"lr_schedule__total_steps": -1, "train_dataset": {"data_loader": {"sizes": [800, 0, 0]}}}
    assert run_of(**sized).config["train"]["steps"] == 2 * (800 // 16)
    assert run_of(ImportOptions("run.yaml", steps=7), **sized).config["train"]["steps"] == 7


def test_a_megatron_data_set_is_read() -> None:
    config = {"data_path": ["1", "wiki_document"]}
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": config}
    found = run_of(train_dataset={"data_loader": loader})
    assert found.config["data"] == {"source": "wiki_document", "batch": 16, "seq": 64}
    packed = {"data_loader": {**loader, "config": config | {"reset_attention_mask": True}}}
    assert run_of(train_dataset=packed).config["data"]["packing"] is True
    assert row(found, "train_dataset")[0] == "translated"


def test_one_device_and_data_parallelism() -> None:
    assert run_of(use_parallel=False, recompute_config__recompute=True).config["mesh"] == {"data": 1}
    options = ImportOptions("run.yaml", devices=4)
    found = run_of(options, parallel__parallel_mode=0, recompute_config__recompute=True)
    assert (found.config["mesh"], found.devices, found.config["data"]["batch"]) == ({"data": 4}, 4, 8)


@pytest.mark.parametrize("experts", [False, True])
def test_any_value_is_translated_refused_or_an_error(experts: bool) -> None:
    data = changed(
        recompute_config__select_recompute={"feed_forward": True},
        swap_config={"swap": True, "layer_swap": [{"layers": [0], "backward_prefetch": 1}], "op_swap": []},
        parallel__pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "1f1b"},
        m__pp_interleave_num=2,
        m__offset=[[0, 0], [0, 0]],
        **(EXPERTS if experts else {}),
    )
    texts = []
    for seed in range(300):
        try:
            found = import_mindformers(mutated(data, seed), ImportOptions("run.yaml"))
            assert found.report.to_text() and json.loads(found.report.to_json())
        except ConfigError as error:
            texts.append(str(error))
    assert len({*texts}) > 30 and all(text.startswith("run.yaml: ") for text in texts)
