"""Megatron-LM arguments that are refused, conditional or wrong, and the rules that they must keep."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_runs import LLAMA, row, run_of
from mutations import mutated

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations import ImportOptions, import_megatron, read_script
from jaxpar.interop.configurations.megatron.script import ScriptArguments


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
