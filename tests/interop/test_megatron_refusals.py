"""Megatron-LM arguments that are refused, conditional or wrong, and the rules that they must keep."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises
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
    ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3"),
    ({"global_batch_size": 24}, "24"),
    ({"micro_batch_size": None}, "--micro-batch-size"),
    ({"num_layers": "$L"}, "$L"),
    ({"vocab_size": None}, "--vocab-size"),
    ({"devices": "$G"}, "run.sh: torchrun"),
    ({"tensor_model_parallel_size": 8, "num_query_groups": 3, "num_attention_heads": 8}, "--num-query-groups"),
    ({"context_parallel_size": 4, "seq_length": 60}, "--seq-length"),
    ({"context_parallel_size": 2, "cp_comm_type": "ring"}, "--cp-comm-type"),
    ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p"}, "--hierarchical-context-parallel-sizes"),
    ({"pipeline_model_parallel_size": 2, "num_layers": 7}, "7"),
    ({"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 1}, "--num-layers 8"),
    (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
        "--pipeline-model-parallel-size",
    ),
    ({"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2, "global_batch_size": 8}, "of 4"),
    ({"fp16": ""}, "--fp16"),
    ({"min_lr": 1}, "--min-lr"),
    ({"train_samples": 5}, "--train-iters"),
    ({"train_iters": None}, "--train-iters"),
    ({"lr": None}, "--lr"),
    ({"hidden_size": 60}, "--hidden-size"),
    ({"window_size": "8 0"}, "--window-size"),
    ({"num_experts": 8, "expert_model_parallel_size": 3}, "--expert-model-parallel-size"),
    (
        {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 40},
        "--moe-shared-expert-intermediate-size",
    ),
    ({"num_experts": 8, "moe_router_score_function": "tanh"}, "--moe-router-score-function"),
    (
        {
            "pipeline_model_parallel_size": 2,
            "num_layers_per_virtual_pipeline_stage": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
        },
        "--num-virtual-stages-per-pipeline-rank",
    ),
    ({"fp8_format": "e5m2"}, "--fp8-format"),
    ({"recompute_granularity": "some"}, "--recompute-granularity"),
    ({"recompute_granularity": "full", "recompute_method": "block"}, "--recompute-num-layers"),
    ({"data_parallel_sharding_strategy": "all"}, "--data-parallel-sharding-strategy"),
    ({"recompute_granularity": "full"}, "--recompute-method"),
    ({"num_experts": 4, "moe_router_topk": 5}, "--moe-router-topk"),
    ({"num_distributed_optimizer_instances": 3}, "--num-distributed-optimizer-instances"),
]


@pytest.mark.parametrize(("changes", "name"), RULES, ids=[name.split()[0] for _, name in RULES])
def test_rules_of_megatron(changes: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        run_of(**changes)


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
