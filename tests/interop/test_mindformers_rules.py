"""The rules that MindFormers configurations must keep, and the keys that are refused."""

from __future__ import annotations

from typing import Any

import pytest
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
    (
        {},
        (
            "parallel_config data_parallel 2 × model_parallel 2 × pipeline_stage 2 = 8 must be the 16 devices. Remedy: "
            "data_parallel: 4, or --devices 8."
        ),
    ),
    ({"parallel_config__data_parallel": 0}, "parallel_config.data_parallel must be a positive integer, got 0."),
    (
        {"parallel_config__micro_batch_num": 1},
        "parallel_config.micro_batch_num must be at least pipeline_stage=2, got 1.",
    ),
    (
        {"parallel_config__seq_split_num": 2},
        (
            "parallel_config.seq_split_num is 2, but pipeline_scheduler '1f1b' does not split sequences. Remedy: "
            "pipeline_interleave: true with pipeline_scheduler: seqpipe, or seq_split_num: 1."
        ),
    ),
    (
        {"parallel_config__seq_split_num": 2, **ONE_STAGE},
        "parallel_config.seq_split_num must be 1 without pipeline stages, got 2. Remedy: pipeline_stage: 2 or more.",
    ),
    (
        {"parallel_config__seq_split_num": 3, "parallel__pipeline_config": {"pipeline_scheduler": "seqpipe"}},
        "parallel_config.seq_split_num must divide the 32 tokens of a device, got 3.",
    ),
    (
        {"m__fine_grain_interleave": 2, "parallel_config__use_seq_parallel": False},
        (
            "model.model_config.fine_grain_interleave is 2, but parallel_config.use_seq_parallel is false. Remedy: "
            "use_seq_parallel: true, or fine_grain_interleave: 1."
        ),
    ),
    (
        {"m__fine_grain_interleave": 2, "micro_batch_interleave_num": 2},
        (
            "model.model_config.fine_grain_interleave is 2, but micro_batch_interleave_num is 2: both interleave. "
            "Remedy: leave one of them out."
        ),
    ),
    (
        {"parallel_config__context_parallel": 2, "parallel_config__context_parallel_algo": "ulysses_cp"},
        "model.model_config.n_kv_heads must be a multiple of model_parallel × the Ulysses degree = 4, got 2.",
    ),
    (
        {
            "parallel_config__context_parallel": 6,
            "parallel_config__context_parallel_algo": "hybrid_cp",
            "parallel_config__ulysses_degree_in_cp": 4,
        },
        "parallel_config.ulysses_degree_in_cp must divide context_parallel=6, got 4. Remedy: use 2.",
    ),
    (
        {"parallel_config__context_parallel": 2, "parallel_config__context_parallel_algo": "spiral"},
        "parallel_config.context_parallel_algo must be one of colossalai_cp, ulysses_cp, hybrid_cp, got 'spiral'.",
    ),
    (
        {"parallel_config__model_parallel": 8},
        "model.model_config.num_heads must be a multiple of model_parallel = 8, got 4.",
    ),
    (
        {"parallel_config__context_parallel": 3},
        "model.model_config.seq_length must be a multiple of context_parallel × model_parallel = 6, got 64.",
    ),
    (
        {"parallel_config__expert_parallel": 2},
        "parallel_config.expert_parallel is 2, but the model has no experts. Remedy: leave it out.",
    ),
    (
        {**EXPERTS, "parallel_config__expert_parallel": 3},
        "parallel_config.expert_parallel must divide the 8 experts, got 3.",
    ),
    (
        {"m__offset": [1, 1]},
        (
            "model.model_config.offset must sum to 0, the model.model_config.num_layers=8 modulo 2 pieces of the "
            "pipeline, got [1, 1]."
        ),
    ),
    (
        {"m__offset": [1, -1, 0]},
        "model.model_config.offset must have one number for each of pipeline_stage=2 stages, got 3.",
    ),
    (
        {"m__offset": [[1, -1]], "m__pp_interleave_num": 2, "parallel__pipeline_config__pipeline_interleave": True},
        "model.model_config.offset must have one list for each of pp_interleave_num=2 pieces, got 1.",
    ),
    (
        {"m__num_layers": 9},
        (
            "model.model_config.offset must be a list that sums to 1, the model.model_config.num_layers=9 modulo 2 "
            "pieces of the pipeline, got 0. Remedy: [1, 0]."
        ),
    ),
    (
        {"m__num_layers": 1},
        "model.model_config.num_layers must be at least the 2 pieces of the pipeline, got 1.",
    ),
    (
        {"m__num_layers": 2**25},
        "model.model_config.num_layers must be at most 16,777,216, got 33554432.",
    ),
    (
        {"m__offset": [-4, 4]},
        "model.model_config.offset must leave every piece of the pipeline a layer, got [-4, 4].",
    ),
    (
        {"recompute_config__recompute": [1]},
        "recompute_config.recompute must have one number for each of 2 stages, got 1.",
    ),
    (
        {"recompute_config__recompute": [5, 0]},
        "recompute_config.recompute must be at most the 4 layers of stage 0, got 5.",
    ),
    (
        {"recompute_config__select_recompute": [-1, 0]},
        "recompute_config.select_recompute must be at most the 4 layers of stage 0, got -1.",
    ),
    (
        {"recompute_config__recompute": "all"},
        "recompute_config.recompute must be true, false or a list with one number for each stage, got 'all'.",
    ),
    (
        {"parallel__parallel_optimizer_config__optimizer_weight_shard_size": 3},
        (
            "parallel.parallel_optimizer_config.optimizer_weight_shard_size must be -1 or divide data_parallel=2, got "
            "3. Remedy: -1, or 2."
        ),
    ),
    (
        {"parallel__parallel_optimizer_config__parallel_optimizer_threshold": -1},
        "parallel.parallel_optimizer_config.parallel_optimizer_threshold must be a non-negative integer, got -1.",
    ),
    (
        {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": 3}]}},
        "swap_config.layer_swap.layers must be true, false or a list of layers, got 3.",
    ),
    (
        {
            "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [8]}]},
            "recompute_config__recompute": False,
        },
        "swap_config.layer_swap.layers must be below 8, the number of layers, got 8.",
    ),
    (
        {
            "swap_config": {
                "swap": True,
                "layer_swap": [{"backward_prefetch": 1, "layers": True}, {"backward_prefetch": 2, "layers": [1]}],
            }
        },
        "swap_config.layer_swap has an entry for all layers, and others with another backward_prefetch.",
    ),
    (
        {"moe_config": {"expert_num": 4, "num_experts_chosen": 5}},
        "moe_config.num_experts_chosen must be at most moe_config.expert_num=4, got 5. Remedy: use 4 or fewer.",
    ),
    (
        {"moe_config": {"expert_num": 4, "aux_loss_factor": 1.0}},
        "moe_config.aux_loss_factor must be at least 0 and less than 1, got 1.",
    ),
    (
        {"parallel__full_batch": False, "parallel__dataset_strategy": [[4, 1]]},
        "parallel.dataset_strategy must begin with data_parallel=2, got 4.",
    ),
    ({"parallel__parallel_mode": 7}, "parallel.parallel_mode must be 0, 1, 2 or 3, got 7."),
    ({"lr_schedule__warmup_ratio": 1.5}, "lr_schedule.warmup_ratio must be from 0 to 1, got 1.5."),
    (
        {"lr_schedule__type": "PolynomialWithWarmUpLR", "lr_schedule__lr_end": 1e-3},
        "lr_schedule.lr_end must be less than learning_rate=0.001, got 0.001.",
    ),
    (
        {"lr_schedule__total_steps": -1},
        (
            "lr_schedule.total_steps must be the number of steps, because the size of the data is not known, got -1. "
            "Remedy: --steps N."
        ),
    ),
    ({"runner_wrapper__scale_sense": 0}, "runner_wrapper.scale_sense must be above 0, got 0."),
    ({"optimizer__betas": [0.9]}, "optimizer.betas must be two numbers from 0 to below 1, got [0.9]."),
    ({"optimizer__beta2": 0.9}, "optimizer.beta2 is 0.9, but optimizer.betas has 0.95. Remedy: leave one of them out."),
    ({"optimizer__betas": None, "optimizer__beta1": 1}, "optimizer.beta1 must be from 0 to below 1, got 1."),
    ({"optimizer__betas": [False, 0.9]}, "optimizer.betas must be two numbers from 0 to below 1, got [False, 0.9]."),
    ({"run_mode": "predict"}, "run_mode must be train or finetune, got 'predict'. Remedy: the file of a training run."),
    (
        {"m__num_hidden_layers": 4},
        (
            "model.model_config.num_hidden_layers is 4, but model.model_config.num_layers, another name for it, is 8. "
            "Remedy: leave one of them out."
        ),
    ),
    (
        {"m__hidden_size": None},
        "model.model_config.hidden_size is missing, so the model is not known. Remedy: --base RUN.yaml.",
    ),
    (
        {"m__tie_word_embeddings": True, "m__untie_embeddings_and_output_weights": True},
        (
            "model.model_config.untie_embeddings_and_output_weights is true, but "
            "model.model_config.tie_word_embeddings is too. Remedy: leave one of them out."
        ),
    ),
    (
        {"parallel__parallel_mode": 0},
        "parallel.parallel_mode is 0, pure data parallelism over all devices. Remedy: --devices N.",
    ),
    (
        {"m__num_experts": 3, "parallel_config__expert_parallel": 3},
        "parallel_config.expert_parallel must divide data_parallel × context_parallel = 2, got 3.",
    ),
    (
        {"parallel__full_batch": False, "parallel__dataset_strategy": [2, 1]},
        "parallel.dataset_strategy must be a list of lists if full_batch is false. Remedy: [[2, 1]].",
    ),
    (
        {
            "parallel__full_batch": False,
            "parallel__dataset_strategy": [[2, 1]],
            "train_dataset__input_columns": ["input_ids", "labels"],
        },
        "parallel.dataset_strategy must have one list for each of 2 input_columns, got 1.",
    ),
    (
        {"parallel__pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"}},
        "parallel.pipeline_config.pipeline_scheduler zero_bubble_v requires pp_interleave_num: 2, got 1.",
    ),
    (
        {"recompute_config__recompute": [[1, 1], [1, 1]]},
        "recompute_config.recompute must have one list for each of 1 pieces of a stage, got 2.",
    ),
    (
        {"recompute_config__select_recompute": {1: True}},
        "recompute_config.select_recompute must have patterns of operators' names, got 1.",
    ),
    (
        {"swap_config": {"swap": True, "op_swap": {"op_name": [1], "layers": True}}, **SELECTED},
        "swap_config.op_swap.op_name must be a text or a list of texts, got [1].",
    ),
    ({"runner_wrapper__max_grad_norm": 0}, "runner_wrapper.max_grad_norm must be above 0, got 0."),
    (
        {"runner_wrapper__scale_sense": {"type": "FixedLossScaleUpdateCell", "loss_scale_value": -1}},
        "runner_wrapper.scale_sense.loss_scale_value must be above 0, got -1.",
    ),
    (
        {"runner_wrapper__scale_sense": {"type": "DynamicLossScaleUpdateCell", "scale_factor": 0.5}},
        "runner_wrapper.scale_sense.scale_factor must be at least 1, got 0.5.",
    ),
    (
        {"moe_config": {"expert_num": 4, "moe_router_score_function": "tanh"}},
        "moe_config.moe_router_score_function must be softmax or sigmoid, got 'tanh'.",
    ),
    (
        {"moe_config": {"expert_num": 4, "aux_loss_types": ["expert"], "aux_loss_factors": ["x"]}},
        "moe_config.aux_loss_factors must be numbers, got ['x'].",
    ),
    (
        {"moe_config": {"expert_num": 4, "aux_loss_types": ["tokens"], "aux_loss_factors": [0.1]}},
        "moe_config.aux_loss_types must be of expert, device and comm, got 'tokens'.",
    ),
    (
        {"m__num_experts": 4, "m__moe_shared_expert_intermediate_size": 100},
        (
            "model.model_config.moe_shared_expert_intermediate_size must be a multiple of the width 96 of an expert, "
            "got 100."
        ),
    ),
    (
        {"m__seq_length": None, "m__rope_scaling": {"type": "yarn", "factor": 2}},
        "model.model_config.rope_scaling must have original_max_position_embeddings for the method YARN.",
    ),
    (
        {"m__compute_dtype": "int4"},
        "model.model_config.compute_dtype must be float32, float16 or bfloat16, got 'int4'.",
    ),
]


@pytest.mark.parametrize(("changes", "text"), RULES, ids=[text.split()[0] for _, text in RULES])
def test_rules(changes: dict[str, Any], text: str) -> None:
    devices = 16 if not changes else None
    with pytest.raises(ConfigError) as error:
        run_of(ImportOptions("run.yaml", devices=devices), **changes)
    assert str(error.value) == f"run.yaml: {text}"


def test_without_a_model_stages_are_not_checked() -> None:
    """The number of layers is that of ``--base``, which the import does not read."""
    options = ImportOptions("run.yaml", base="llama")
    found = run_of(options, m__hidden_size=None, m__offset=[1, -1], recompute_config__recompute=[9, 0])
    assert row(found, "model.model_config.offset") == ("refused", "", "the number of layers is not in the file")
    assert found.config["parallel"]["pipeline"]["recompute"] == [9, 0]
    with pytest.raises(ConfigError) as error:
        run_of(options, m__hidden_size=None, recompute_config__recompute=[[1, 1], [1, 1]])
    assert str(error.value) == (
        "run.yaml: recompute_config.recompute must have one list for each of an unknown number of pieces of a stage, "
        "got 2."
    )


def test_one_shard_of_a_matmul_has_nothing_to_overlap() -> None:
    changes = {"parallel_config__model_parallel": 1, "parallel_config__use_seq_parallel": False}
    found = run_of(**changes, m__fine_grain_interleave=2)
    assert "overlap" not in found.config["parallel"]
    note = "model_parallel is 1, so there is no communication to overlap"
    assert row(found, "model.model_config.fine_grain_interleave") == ("ignored", "", note)
