"""The rules that MindFormers configurations must keep, and the keys that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises
from mindformers_files import EXPERTS, ONE_STAGE, row, run_of

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations.keys import ImportOptions

INTERLEAVED = {
    "parallel__pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"},
    "m__pp_interleave_num": 2,
}
SELECTED = {**ONE_STAGE, "recompute_config__recompute": False}


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"parallel__parallel_mode": 2}, "parallel.parallel_mode", "jaxpar plan searches"),
        ({"load_checkpoint": "w.ckpt"}, "load_checkpoint", "MindSpore checkpoints are not read"),
        ({"m__hidden_act": "gelu"}, "model.model_config.hidden_act", "the MLP is a SwiGLU"),
        ({"m__extend_method": "NTK"}, "model.model_config.extend_method", "scaled by NTK"),
        ({"optimizer__type": "Came"}, "optimizer.type", "only AdamW"),
        ({"optimizer__type": "AdamW", "optimizer__amsgrad": True}, "optimizer.amsgrad", "not built"),
        ({"lr_schedule__warmup_lr_init": 1e-5}, "lr_schedule.warmup_lr_init", "only 0 is built"),
        ({"recompute_config__select_recompute_exclude": ["a"]}, "recompute_config.select_recompute_exclude", "operat"),
        ({"m__fine_grain_interleave": 4}, "model.model_config.fine_grain_interleave", "two halves"),
        ({"swap_config__swap": True, "recompute_config__recompute": False}, "swap_config.swap", "pipeline stages"),
        ({"m__mtp_depth": 1}, "model.model_config.mtp_depth", "only predicted by models with experts"),
        ({"parallel_config__seq_split_num": 2, "m__num_experts": 4,
          "parallel__pipeline_config": {"pipeline_scheduler": "seqpipe"}},
         "parallel_config.seq_split_num", "models with experts"),
        ({**ONE_STAGE, "parallel_config__data_parallel": 3, "parallel_config__expert_parallel": 2,
          "parallel_config__context_parallel": 2, "m__num_experts": 4},
         "parallel_config.expert_parallel", "must divide data_parallel=3: here experts use those ranks only"),
        ({**ONE_STAGE, "parallel_config__context_parallel": 2, "m__n_kv_heads": 4,
          "parallel__parallel_optimizer_config__optimizer_weight_shard_size": 2},
         "parallel.parallel_optimizer_config.optimizer_weight_shard_size", "only formed along data, without context"),
        ({**INTERLEAVED, "recompute_config__recompute": [[2, 1], [1, 1]]},
         "recompute_config.recompute", "all pieces of a stage recompute equally many layers"),
        ({**SELECTED, "recompute_config__select_recompute": [".*matmul"]},
         "recompute_config.select_recompute", "only operators between matmuls are selected, in all layers"),
        ({**SELECTED, "recompute_config__select_recompute": {"feed_forward": 3}},
         "recompute_config.select_recompute", "only operators between matmuls are selected, in all layers"),
        ({**SELECTED, "swap_config": {"swap": True, "layer_swap": [{"layers": [0]}]}},
         "swap_config.layer_swap", "all layers offload the same tensors"),
        ({**SELECTED, "swap_config": {"swap": True, "op_swap": {"op_name": "norm", "layers": True}}},
         "swap_config.op_swap", "no tensor here corresponds to 'norm'"),
        ({**SELECTED, "swap_config": {"swap": True, "op_swap": {"op_name": ["wq", "norm"], "layers": True}}},
         "swap_config.op_swap", "no tensor here corresponds to 'norm'"),
        ({**SELECTED, "recompute_config__recompute": [3], "swap_config": {"swap": True}},
         "recompute_config.recompute", "layers either recompute or offload"),
        ({**INTERLEAVED, "parallel_config__seq_split_num": 2, "recompute_config__recompute": False,
          "parallel__pipeline_config__pipeline_scheduler": "seqpipe"},
         "parallel_config.seq_split_num", "only built for one piece on each stage"),
        ({"micro_batch_interleave_num": 2, "m__num_experts": 4}, "micro_batch_interleave_num", "run on whole batches"),
        ({"micro_batch_interleave_num": 2, "parallel_config__seq_split_num": 2, "recompute_config__recompute": False,
          "parallel__pipeline_config": {"pipeline_scheduler": "seqpipe"}},
         "micro_batch_interleave_num", "sequence chunks run on whole batches"),
        ({"m__num_experts": 4, "m__moe_router_load_balancing_type": "sinkhorn"},
         "model.model_config.moe_router_load_balancing_type", "only aux_loss, seq_aux_loss and none are built"),
        ({**EXPERTS, "moe_config": {"expert_num": 4, "aux_loss_types": ["expert", "comm"],
                                    "aux_loss_factors": [0.1, 0.1]}, "parallel_config__expert_parallel": 1},
         "moe_config.aux_loss_types", "only the balance of experts is built"),
        ({"m__kv_lora_rank": 16}, "model.model_config.kv_lora_rank", "only built for models with experts"),
        ({"m__rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.5, "turns": 3}},
         "model.model_config.rope_scaling", "attention_factor, turns of YARN are not built"),
        ({"runner_wrapper__scale_sense": {"type": "Adaptive"}}, "runner_wrapper.scale_sense", "only numbers, Fixed"),
    ],
)  # fmt: skip
def test_refused_keys(changes: dict[str, Any], key: str, note: str) -> None:
    status, _, found = row(run_of(**changes), key)
    assert status == "refused" and note in found


RULES = [
    ({}, "parallel_config data_parallel"),
    ({"parallel_config__data_parallel": 0}, "parallel_config.data_parallel"),
    ({"parallel_config__micro_batch_num": 1}, "parallel_config.micro_batch_num"),
    ({"parallel_config__seq_split_num": 2}, "1f1b"),
    ({"parallel_config__seq_split_num": 2, **ONE_STAGE}, "be 1"),
    ({"parallel_config__seq_split_num": 3, "parallel__pipeline_config": {"pipeline_scheduler": "seqpipe"}}, "the 32"),
    ({"m__fine_grain_interleave": 2, "parallel_config__use_seq_parallel": False}, "parallel_config.use_seq_parallel"),
    ({"m__fine_grain_interleave": 2, "micro_batch_interleave_num": 2}, "micro_batch_interleave_num"),
    (
        {"parallel_config__context_parallel": 2, "parallel_config__context_parallel_algo": "ulysses_cp"},
        "model.model_config.n_kv_heads",
    ),
    (
        {
            "parallel_config__context_parallel": 6,
            "parallel_config__context_parallel_algo": "hybrid_cp",
            "parallel_config__ulysses_degree_in_cp": 4,
        },
        "parallel_config.ulysses_degree_in_cp",
    ),
    (
        {"parallel_config__context_parallel": 2, "parallel_config__context_parallel_algo": "spiral"},
        "parallel_config.context_parallel_algo",
    ),
    ({"parallel_config__model_parallel": 8}, "model.model_config.num_heads"),
    ({"parallel_config__context_parallel": 3}, "model.model_config.seq_length"),
    ({"parallel_config__expert_parallel": 2}, "parallel_config.expert_parallel is"),
    ({**EXPERTS, "parallel_config__expert_parallel": 3}, "the 8"),
    ({"m__offset": [1, 1]}, "num_layers=8"),
    ({"m__offset": [1, -1, 0]}, "of pipeline_stage=2"),
    (
        {"m__offset": [[1, -1]], "m__pp_interleave_num": 2, "parallel__pipeline_config__pipeline_interleave": True},
        "pp_interleave_num=2",
    ),
    ({"m__num_layers": 9}, "num_layers=9"),
    ({"m__num_layers": 1}, "the 2"),
    ({"m__num_layers": 2**25}, "16,777,216"),
    ({"m__offset": [-4, 4]}, "[-4"),
    ({"recompute_config__recompute": [1]}, "of 2 stages"),
    ({"recompute_config__recompute": [5, 0]}, "0, got 5"),
    ({"recompute_config__select_recompute": [-1, 0]}, "recompute_config.select_recompute must be"),
    ({"recompute_config__recompute": "all"}, "'all'"),
    (
        {"parallel__parallel_optimizer_config__optimizer_weight_shard_size": 3},
        "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
    ),
    (
        {"parallel__parallel_optimizer_config__parallel_optimizer_threshold": -1},
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold",
    ),
    ({"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": 3}]}}, "layers, got 3"),
    (
        {
            "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [8]}]},
            "recompute_config__recompute": False,
        },
        "below 8",
    ),
    (
        {
            "swap_config": {
                "swap": True,
                "layer_swap": [{"backward_prefetch": 1, "layers": True}, {"backward_prefetch": 2, "layers": [1]}],
            }
        },
        "backward_prefetch",
    ),
    ({"moe_config": {"expert_num": 4, "num_experts_chosen": 5}}, "moe_config.num_experts_chosen"),
    ({"moe_config": {"expert_num": 4, "aux_loss_factor": 1.0}}, "moe_config.aux_loss_factor must"),
    ({"parallel__full_batch": False, "parallel__dataset_strategy": [[4, 1]]}, "with data_parallel=2"),
    ({"parallel__parallel_mode": 7}, "7"),
    ({"lr_schedule__warmup_ratio": 1.5}, "lr_schedule.warmup_ratio"),
    ({"lr_schedule__type": "PolynomialWithWarmUpLR", "lr_schedule__lr_end": 1e-3}, "lr_schedule.lr_end"),
    ({"lr_schedule__total_steps": -1}, "lr_schedule.total_steps"),
    ({"runner_wrapper__scale_sense": 0}, "runner_wrapper.scale_sense must"),
    ({"optimizer__betas": [0.9]}, "[0.9]"),
    ({"optimizer__beta2": 0.9}, "optimizer.beta2"),
    ({"optimizer__betas": None, "optimizer__beta1": 1}, "optimizer.beta1"),
    ({"optimizer__betas": [False, 0.9]}, "[False"),
    ({"run_mode": "predict"}, "run_mode"),
    ({"m__num_hidden_layers": 4}, "model.model_config.num_hidden_layers"),
    ({"m__hidden_size": None}, "model.model_config.hidden_size"),
    (
        {"m__tie_word_embeddings": True, "m__untie_embeddings_and_output_weights": True},
        "model.model_config.untie_embeddings_and_output_weights",
    ),
    ({"parallel__parallel_mode": 0}, "parallel.parallel_mode is"),
    ({"m__num_experts": 3, "parallel_config__expert_parallel": 3}, "data_parallel ×"),
    ({"parallel__full_batch": False, "parallel__dataset_strategy": [2, 1]}, "full_batch"),
    (
        {
            "parallel__full_batch": False,
            "parallel__dataset_strategy": [[2, 1]],
            "train_dataset__input_columns": ["input_ids", "labels"],
        },
        "input_columns",
    ),
    (
        {"parallel__pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}},
        "parallel.pipeline_config.pipeline_scheduler",
    ),
    ({"recompute_config__recompute": [[1, 1], [1, 1]]}, "of 1"),
    ({"recompute_config__select_recompute": {1: True}}, "operators'"),
    (
        {"swap_config": {"swap": True, "op_swap": {"op_name": [1], "layers": True}}, **SELECTED},
        "swap_config.op_swap.op_name",
    ),
    ({"runner_wrapper__max_grad_norm": 0}, "runner_wrapper.max_grad_norm"),
    (
        {"runner_wrapper__scale_sense": {"type": "FixedLossScaleUpdateCell", "loss_scale_value": -1}},
        "runner_wrapper.scale_sense.loss_scale_value",
    ),
    (
        {"runner_wrapper__scale_sense": {"type": "DynamicLossScaleUpdateCell", "scale_factor": 0.5}},
        "runner_wrapper.scale_sense.scale_factor",
    ),
    ({"moe_config": {"expert_num": 4, "moe_router_score_function": "tanh"}}, "moe_config.moe_router_score_function"),
    (
        {"moe_config": {"expert_num": 4, "aux_loss_types": ["expert"], "aux_loss_factors": ["x"]}},
        "moe_config.aux_loss_factors",
    ),
    (
        {"moe_config": {"expert_num": 4, "aux_loss_types": ["tokens"], "aux_loss_factors": [0.1]}},
        "moe_config.aux_loss_types",
    ),
    (
        {"m__num_experts": 4, "m__moe_shared_expert_intermediate_size": 100},
        "model.model_config.moe_shared_expert_intermediate_size",
    ),
    ({"m__seq_length": None, "m__rope_scaling": {"type": "yarn", "factor": 2}}, "model.model_config.rope_scaling"),
    ({"m__compute_dtype": "int4"}, "model.model_config.compute_dtype"),
]


@pytest.mark.parametrize(("changes", "name"), RULES, ids=[name.split()[0] for _, name in RULES])
def test_rules(changes: dict[str, Any], name: str) -> None:
    devices = 16 if not changes else None
    with raises(ConfigError, name):
        run_of(ImportOptions("run.yaml", devices=devices), **changes)


def test_without_a_model_stages_are_not_checked() -> None:
    """The number of layers is that of ``--base``, which the import does not read."""
    options = ImportOptions("run.yaml", base="llama")
    found = run_of(options, m__hidden_size=None, m__offset=[1, -1], recompute_config__recompute=[9, 0])
    assert row(found, "model.model_config.offset") == ("refused", "", "the number of layers is not in the file")
    assert found.config["parallel"]["pipeline"]["recompute"] == [9, 0]
    with raises(ConfigError, "run.yaml", "recompute_config.recompute must have"):
        run_of(options, m__hidden_size=None, recompute_config__recompute=[[1, 1], [1, 1]])


def test_one_shard_of_a_matmul_has_nothing_to_overlap() -> None:
    changes = {"parallel_config__model_parallel": 1, "parallel_config__use_seq_parallel": False}
    found = run_of(**changes, m__fine_grain_interleave=2)
    assert "overlap" not in found.config["parallel"]
    note = "model_parallel is 1, so there is no communication to overlap"
    assert row(found, "model.model_config.fine_grain_interleave") == ("ignored", "", note)
