"""Megatron-LM arguments: what they become."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_runs import STAGES, row, run_of

from jaxpar.models.llama.rope import RopeScaling


def test_arguments_become_a_run() -> None:
    found = run_of()
    found.report.check()
    assert found.devices == 8
    assert {key: value for key, value in found.config.items() if key != "rules"} == {
        "model": {
            "family": "llama",
            "vocab": 256,
            "embed": 64,
            "layers": 8,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 8,
            "mlp": 96,
            "rope_theta": 10000.0,
            "norm_eps": 1e-5,
            "qk_norm": False,
            "qkv_bias": False,
            "tie_embeddings": False,
            "dtype": "bfloat16",
            "param_dtype": "float32",
        },
        "mesh": {"data": 8},
        "parallel": {"optimizer": {"stage": 1}, "remat": "none"},
        "data": {"source": "synthetic", "batch": 16, "seq": 64},
        "train": {"grad_accum_steps": 1, "steps": 100, "seed": 1234},
        "optimizer": {
            "name": "adamw",
            "options": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
            "clip_norm": 1.0,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup": 10,
            "final_lr_ratio": 0.1,
        },
    }


@pytest.mark.parametrize(
    ("changes", "mesh", "parallel"),
    [
        (
            STAGES,
            {"pipeline": 2, "data": 2, "model": 2},
            {
                "pipeline": {"schedule": "1f1b", "microbatches": 4, "activation_checkpointing": "none"},
                "optimizer": {"stage": 1},
                "remat": "none",
            },
        ),
        (
            {**STAGES, "num_layers_per_virtual_pipeline_stage": 2, "recompute_granularity": "full",
             "recompute_method": "block", "recompute_num_layers": 1},
            {"pipeline": 2, "data": 2, "model": 2},
            {
                "pipeline": {
                    "schedule": "interleaved",
                    "microbatches": 4,
                    "activation_checkpointing": "none",
                    "virtual_stages": 2,
                    "recompute": [1, 1],
                },
                "optimizer": {"stage": 1},
                "remat": "none",
            },
        ),
        (
            {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1,
             "decoder_last_pipeline_num_layers": 1},
            {"pipeline": 4, "data": 2},
            {
                "pipeline": {
                    "schedule": "1f1b",
                    "microbatches": 4,
                    "activation_checkpointing": "none",
                    "layers_per_stage": [1, 3, 3, 1],
                },
                "optimizer": {"stage": 1},
                "remat": "none",
            },
        ),
        (
            {"context_parallel_size": 2, "recompute_granularity": "full", "recompute_method": "uniform"},
            {"data": 4, "context": 2},
            {
                "context": {"impl": "ring", "load_balance": "zigzag"},
                "optimizer": {"stage": 1, "axis": ["data", "context"]},
                "remat": "full",
            },
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 2",
             "use_distributed_optimizer": None},
            {"data": 2, "context": 2, "ulysses": 2},
            {"context": {"impl": "hybrid", "load_balance": "zigzag"}, "remat": "none"},
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a", "use_distributed_optimizer": None},
            {"data": 2, "ulysses": 4},
            {"context": {"impl": "ulysses"}, "remat": "none"},
        ),
        (
            {"use_megatron_fsdp": "", "data_parallel_sharding_strategy": "optim_grads_params",
             "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            {"data": 8},
            {"optimizer": {"stage": 3}, "remat": {"policy": "full", "layers": [3]}},
        ),
        (
            {"num_distributed_optimizer_instances": 2, "optimizer_cpu_offload": ""},
            {"data": 8},
            {"optimizer": {"stage": 1, "fsdp_group_size": 4}, "offload": {"optimizer": "host"}, "remat": "none"},
        ),
        (
            {"use_torch_fsdp2": "", "recompute_activations": ""},
            {"data": 8},
            {"optimizer": {"stage": 3}, "remat": "none"},
        ),
        (
            {**STAGES, "use_torch_fsdp2": "", "recompute_granularity": "full", "recompute_method": "uniform",
             "recompute_num_layers": 2, "distribute_saved_activations": ""},
            {"pipeline": 2, "data": 2, "model": 2},
            {
                "pipeline": {
                    "schedule": "1f1b",
                    "microbatches": 4,
                    "activation_checkpointing": "none",
                    "grad_reduction": "per_microbatch",
                },
                "optimizer": {"stage": 1},
                "remat": "full",
            },
        ),
    ],
)  # fmt: skip
def test_parallelism_of_arguments(changes: dict[str, Any], mesh: dict[str, int], parallel: dict[str, Any]) -> None:
    found = run_of(**changes)
    found.report.check()
    assert (found.config["mesh"], found.config["parallel"]) == (mesh, parallel)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"window_size": "4096,0"}, {"sliding_window": 4097}),
        ({"window_size": "'(7, 0)'"}, {"sliding_window": 8}),
        ({"use_rope_scaling": ""}, {"rope_scaling": {"kind": "llama3", "factor": 8.0}}),
        ({"use_rope_scaling": "", "rope_scaling_factor": 4}, {"rope_scaling": {"kind": "llama3", "factor": 4.0}}),
        ({"rope_scaling_factor": 4}, {"rope_scaling": None}),
    ],
)
def test_positions_and_windows_of_arguments(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = run_of(**changes)
    found.report.check()
    model = found.config["model"]
    assert {name: model.get(name) for name in wanted} == wanted
    RopeScaling(**(model.get("rope_scaling") or {}))


def test_experts_of_arguments() -> None:
    found = run_of(
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=64,
        moe_router_score_function="sigmoid",
        moe_layer_freq="'([0]*1+[1]*7)'",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
        moe_router_enable_expert_bias="",
        expert_model_parallel_size=4,
        multi_latent_attention="",
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        mtp_num_layers=1,
    )
    found.report.check()
    model = found.config["model"]
    assert (model["mtp_depth"], model["mtp_weight"]) == (1, 0.1)
    assert found.config["mesh"] == {"data": 2, "expert": 4} and model["family"] == "deepseek_v3"
    assert (model["experts"], model["k"], model["shared_experts"], model["dense_layers"]) == (8, 2, 2, 1)
    assert (model["balance_loss"], model["balance_per"], model["bias_rate"]) == (1e-4, "sequence", 0.001)
    assert model["latent_attention"] == {"kv_latent": 16, "q_latent": None, "rope_dim": 8, "value_dim": 16}


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("pile_document", {"source": "pile_document"}),
        ("1 pile_document", {"source": "pile_document"}),
        (
            "0.3 books 7 code",
            {"blend": [{"source": "books", "weight": 0.3}, {"source": "code", "weight": 7.0}]},
        ),
        ("books code", {"source": "synthetic"}),
        ("$DATA", {"source": "synthetic"}),
    ],
)
def test_token_files(path: str, data: dict[str, Any]) -> None:
    found = run_of(data_path=path, reset_attention_mask="")
    found.report.check()
    assert found.config["data"] == {**data, "batch": 16, "seq": 64, "packing": True}
    assert row(found, "--data-path")[0] == ("ignored" if data == {"source": "synthetic"} else "translated")


def test_precision_of_arguments() -> None:
    half = run_of(bf16=None, fp16="", hysteresis=1).config
    assert half["model"]["dtype"] == "float16"
    assert half["precision"] == {"scale": {"initial": 2.0**32, "interval": 1000, "hysteresis": 1, "minimum": 1.0}}
    e4m3 = run_of(fp8_format="e4m3")
    assert e4m3.config["precision"] == {"matmul": "fp8"}
    assert row(e4m3, "--fp8-format") == ("translated", "gradients are in e5m2")
    assert run_of(fp8_format="hybrid", grad_reduce_in_bf16="").config["precision"] == {
        "reduce": "bf16",
        "matmul": "fp8",
    }


def test_samples_count_in_steps() -> None:
    found = run_of(
        train_iters=None, train_samples=1600, lr_decay_samples=800, lr_warmup_samples=160, lr_warmup_fraction=None
    )
    assert found.config["train"]["steps"] == 100
    assert (found.config["optimizer"]["decay_steps"], found.config["optimizer"]["warmup"]) == (50, 10)


def test_steps_of_the_caller_evaluation_and_checkpoints() -> None:
    found = run_of(steps=7, lr_warmup_fraction=None, eval_interval=5, eval_iters=2, save_interval=3)
    found.report.check()
    assert found.config["train"] == {
        "grad_accum_steps": 1, "steps": 7, "seed": 1234, "eval_every": 5, "eval_batches": 2
    }  # fmt: skip
    assert found.config["checkpoint"] == {"save_interval_steps": 3}
    assert row(found, "--train-iters") == ("ignored", "--steps")
