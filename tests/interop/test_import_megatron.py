"""Megatron-LM arguments: what they become, and the rules that they must keep."""

from __future__ import annotations

from typing import Any

import pytest
from mutations import mutated

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations import ImportedRun, ImportOptions, import_megatron, read_script
from jaxpar.interop.configurations.megatron.script import Conditions, ScriptArguments
from jaxpar.models.llama.rope import RopeScaling

LLAMA: dict[str, Any] = {
    "num-layers": 8,
    "hidden-size": 64,
    "ffn-hidden-size": 96,
    "num-attention-heads": 8,
    "group-query-attention": "",
    "num-query-groups": 4,
    "vocab-size": 256,
    "seq-length": 64,
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "swiglu": "",
    "disable-bias-linear": "",
    "untie-embeddings-and-output-weights": "",
    "bf16": "",
    "micro-batch-size": 2,
    "global-batch-size": 16,
    "train-iters": 100,
    "lr": 1e-3,
    "min-lr": 1e-4,
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": 0.1,
    "use-distributed-optimizer": "",
}
STAGES = {"pipeline-model-parallel-size": 2, "tensor-model-parallel-size": 2, "sequence-parallel": ""}


def run_of(
    *,
    devices: int = 8,
    steps: int | None = None,
    conditional: str = "",
    conditions: Conditions = "refuse",
    **changes: Any,
) -> ImportedRun:
    """The import of ``LLAMA`` with changed arguments, whose dashes are written ``_``; ``None`` removes one."""
    values = LLAMA | {name.replace("_", "-"): value for name, value in changes.items()}
    text = " ".join(f"--{name} {value}" for name, value in values.items() if value is not None)
    script = f"A=()\nif x; then\nA=({conditional})\nfi\ntorchrun --nproc_per_node {devices} train.py {text} ${{A[@]}}"
    options = ImportOptions("run.sh", steps=steps)
    return import_megatron(read_script(script, "run.sh", {}), options, conditions=conditions)


def row(found: ImportedRun, key: str) -> tuple[str, str]:
    (it,) = [row for row in found.report.rows if row.key == key]
    return it.status, it.note


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


def test_conditional_arguments() -> None:
    refused = run_of(conditional="--log-interval 1 --clip-grad 2.0")
    reason = "line 3 gives it only under a condition: --conditions take, or drop"
    assert row(refused, "--clip-grad") == ("refused", reason)
    assert row(refused, "--log-interval")[0] == "ignored"
    taken = run_of(conditional="--clip-grad 2.0", conditions="take")
    taken.report.check()
    assert taken.config["optimizer"]["clip_norm"] == 2.0
    dropped = run_of(conditional="--clip-grad 2.0", conditions="drop")
    assert dropped.config["optimizer"]["clip_norm"] == 1.0
    assert row(dropped, "--clip-grad") == ("ignored", "--conditions drop; line 3")


def test_a_model_of_another_kind_is_refused_or_taken_from_the_base() -> None:
    script = "python train.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 64 --lr 1e-3"
    script += " --micro-batch-size 1 --train-iters 5"
    found = import_megatron(read_script(script, "run.sh", {}), ImportOptions("run.sh", devices=1))
    refused = {row.key: row.note for row in found.report.rows if row.status == "refused"}
    assert refused["--normalization"] == "norms are RMSNorms; the default of Megatron is LayerNorm"
    assert refused["--hidden-dropout"] == "there is no dropout; the default of Megatron is 0.1"
    assert len(refused) == 6
    options = ImportOptions("run.sh", devices=1, base="llama")
    based = import_megatron(read_script(script, "run.sh", {}), options)
    based.report.check()
    assert based.config["model"] == {"dtype": "float32", "param_dtype": "float32"}
    stages = " --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --global-batch-size 2"
    options = ImportOptions("run.sh", devices=2, base="llama")
    uneven = import_megatron(read_script(script + stages, "run.sh", {}), options)
    reason = "the number of layers is not in the arguments"
    assert row(uneven, "--decoder-first-pipeline-num-layers") == ("refused", reason)


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"rampup_batch_size": "2 2 100"}, "--rampup-batch-size", "the batch size is constant"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style", "only constant, linear and cosine"),
        ({"optimizer": "muon"}, "--optimizer", "only adam and sgd"),
        (
            {"tensor_model_paralel_size": 2},
            "--tensor-model-paralel-size",
            "Did you mean '--tensor-model-parallel-size'",
        ),
        (
            {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "--moe-router-load-balancing-type",
            "only aux_loss, seq_aux_loss and none are built",
        ),
        ({"multi_latent_attention": ""}, "--multi-latent-attention", "only built for models with experts"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers", "only predicted by models with experts"),
        ({"recompute_granularity": "selective", "recompute_modules": "mlp"}, "--recompute-modules", "only core_attn"),
        (
            {"context_parallel_size": 2, "num_distributed_optimizer_instances": 2},
            "--num-distributed-optimizer-instances",
            "groups of devices are only formed along data",
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
             "decoder_last_pipeline_num_layers": 1},
            "--decoder-last-pipeline-num-layers",
            "uneven stages with virtual stages are not translated",
        ),
        ({"num_experts": 6, "expert_model_parallel_size": 3}, "--expert-model-parallel-size", "must divide the 8"),
    ],
)  # fmt: skip
def test_refused_arguments(changes: dict[str, Any], key: str, note: str) -> None:
    status, found = row(run_of(**changes), key)
    assert status == "refused" and note in found


RULES = [
    (
        {"tensor_model_parallel_size": 3},
        "--tensor-model-parallel-size 3 × pipeline 1 × context 1 = 3 must divide 8 devices.",
    ),
    (
        {"global_batch_size": 24},
        "--global-batch-size must be a multiple of --micro-batch-size 2 × 8 data-parallel ranks, got 24.",
    ),
    ({"micro_batch_size": None}, "--micro-batch-size is missing. Remedy: --micro-batch-size N."),
    ({"num_layers": "$L"}, "--num-layers must be a positive integer, got '$L'. Remedy: --variable L=VALUE."),
    (
        {"vocab_size": None},
        "--vocab-size is missing, so the model is not known. Remedy: --vocab-size N, or --base RUN.yaml.",
    ),
    (
        {"devices": "$G"},
        "torchrun does not say the number of devices. Remedy: --devices N, or --variable G=N.",
    ),
    (
        {"tensor_model_parallel_size": 8, "num_query_groups": 3, "num_attention_heads": 8},
        "--num-query-groups must be a multiple of --tensor-model-parallel-size = 8, got 3.",
    ),
    (
        {"context_parallel_size": 4, "seq_length": 60},
        "--seq-length must be a multiple of 8 for these sizes, got 60.",
    ),
    (
        {"context_parallel_size": 2, "cp_comm_type": "ring"},
        "--cp-comm-type must be p2p, a2a, allgather or a2a+p2p, the same in all layers, got 'ring'.",
    ),
    (
        {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"},
        (
            "--hierarchical-context-parallel-sizes must be two numbers whose product is --context-parallel-size=4, got "
            "None."
        ),
    ),
    (
        {"pipeline_model_parallel_size": 2, "num_layers": 7},
        "--num-layers must be a multiple of 2 pieces of the pipeline, got 7.",
    ),
    (
        {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1},
        "--num-layers 8 without 1 cannot be split over 3 other stages.",
    ),
    (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        (
            "--num-layers-per-virtual-pipeline-stage × --pipeline-model-parallel-size must divide --num-layers=8, got "
            "3 × 2."
        ),
    ),
    (
        {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8},
        "--global-batch-size must give a multiple of 4 microbatches for virtual stages, got 2.",
    ),
    ({"fp16": ""}, "--fp16 and --bf16 are both given. Remedy: leave one of them out."),
    ({"min_lr": 1}, "--min-lr must be at most --lr=0.001, got 1."),
    ({"train_samples": 5}, "--train-iters and --train-samples are both given. Remedy: leave one of them out."),
    ({"train_iters": None}, "--train-iters is missing, and so is --train-samples. Remedy: --steps N."),
    ({"lr": None}, "--lr is missing. Remedy: --lr RATE."),
    ({"hidden_size": 60}, "--hidden-size must be a multiple of 8 heads, got 60."),
    (
        {"window_size": "8 0"},
        "--window-size must be tokens before and after, such as 4096,0, got [8, 0].",
    ),
    (
        {"num_experts": 8, "expert_model_parallel_size": 3},
        "--expert-model-parallel-size must divide --num-experts=8, got 3.",
    ),
    (
        {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 40},
        "--moe-shared-expert-intermediate-size must be a multiple of 32, got 40.",
    ),
    (
        {"num_experts": 8, "moe_router_score_function": "tanh"},
        "--moe-router-score-function must be softmax or sigmoid, got 'tanh'.",
    ),
    (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
        },
        (
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank are both given. "
            "Remedy: leave one of them out."
        ),
    ),
    ({"fp8_format": "e5m2"}, "--fp8-format must be hybrid or e4m3, got 'e5m2'."),
    ({"recompute_granularity": "some"}, "--recompute-granularity must be full or selective, got 'some'."),
    (
        {"recompute_granularity": "full", "recompute_method": "block"},
        "--recompute-num-layers is missing for the method block.",
    ),
    (
        {"data_parallel_sharding_strategy": "all"},
        (
            "--data-parallel-sharding-strategy must be one of no_shard, optim, optim_grads, optim_grads_params, got "
            "'all'."
        ),
    ),
    (
        {"recompute_granularity": "full"},
        "--recompute-method must be uniform or block, got None.",
    ),
    ({"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk must be at most --num-experts=4, got 5."),
    (
        {"num_distributed_optimizer_instances": 3},
        "--num-distributed-optimizer-instances must divide the 8 ranks, got 3.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), RULES, ids=[text.split()[0] for _, text in RULES])
def test_rules_of_megatron(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_of(**changes)
    assert str(error.value) == f"run.sh: {text}"


def test_any_value_of_an_argument_is_translated_refused_or_an_error() -> None:
    more = {"pipeline-model-parallel-size": 2, "context-parallel-size": 2, "num-experts": 4, "moe-layer-freq": 1}
    data = {f"--{name}": value if value != "" else True for name, value in (LLAMA | more).items()}
    texts = []
    for seed in range(300):
        arguments = ScriptArguments(mutated(data, seed), {}, {"--nproc-per-node": 8})
        try:
            assert import_megatron(arguments, ImportOptions("run.sh")).report.to_text()
        except ConfigError as error:
            texts.append(str(error))
    assert len({*texts}) > 20 and all(text.startswith("run.sh: ") for text in texts)
