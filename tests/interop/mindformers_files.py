"""A MindFormers configuration for tests, and its import with changes."""

from __future__ import annotations

import copy
from typing import Any

from jaxpar.interop.configurations.keys import ImportOptions
from jaxpar.interop.configurations.mindformers.translate import import_mindformers
from jaxpar.interop.configurations.report import ImportedRun
from jaxpar.utils.yaml_config import parse_yaml

DENSE = """
runner_config: {epochs: 2, batch_size: 2}
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.1}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-3, lr_end: 1.e-4, warmup_ratio: 0.1, total_steps: 100}
parallel:
  parallel_mode: 1
  enable_parallel_optimizer: true
  parallel_optimizer_config: {gradient_accumulation_shard: false, parallel_optimizer_threshold: 4}
parallel_config: {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 4, use_seq_parallel: true}
recompute_config: {recompute: [2, 1], mp_comm_recompute: true}
model:
  model_config:
    hidden_size: 64
    num_layers: 8
    num_heads: 4
    n_kv_heads: 2
    vocab_size: 256
    seq_length: 64
    compute_dtype: bfloat16
    param_init_type: float32
    intermediate_size: 96
runner_wrapper: {scale_sense: 1.0, use_clip_grad: true}
"""
MODEL = "model.model_config."


def changed(**changes: Any) -> dict[str, Any]:
    """``DENSE`` with values at paths, whose dots are written ``__``; ``None`` removes a key."""
    data = copy.deepcopy(parse_yaml(DENSE))
    for path, value in changes.items():
        *parents, last = path.replace("m__", MODEL.replace(".", "__"), 1).split("__")
        at = data
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
        if value is None:
            del at[last]
    return data


def run_of(options: ImportOptions | None = None, **changes: Any) -> ImportedRun:
    return import_mindformers(changed(**changes), options or ImportOptions("run.yaml"))


def row(found: ImportedRun, key: str) -> tuple[str, str, str]:
    """Status, target and note of a key."""
    (it,) = [row for row in found.report.rows if row.key == key]
    return it.status, it.target, it.note


ONE_STAGE = {"parallel_config__pipeline_stage": 1, "recompute_config__recompute": True}
EXPERTS = {
    "moe_config": {
        "expert_num": 8,
        "num_experts_chosen": 2,
        "capacity_factor": 1.1,
        "aux_loss_factor": 0.05,
        "shared_expert_num": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "use_gating_sigmoid": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "aux_loss_types": ["expert"],
        "aux_loss_factors": [0.0001],
        "balance_via_topk_bias": True,
        "topk_bias_update_rate": 0.001,
        "comp_comm_parallel": False,
        "use_gmm": True,
    },
    "parallel_config__expert_parallel": 2,
    **ONE_STAGE,
}
