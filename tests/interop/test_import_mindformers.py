"""MindFormers configurations: what they become, and the rules that they must keep."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from mutations import mutated

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.interop.configurations.keys import ImportOptions
from jaxpar.interop.configurations.mindformers.translate import import_mindformers
from jaxpar.interop.configurations.report import ImportedRun
from jaxpar.models.llama.rope import RopeScaling
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
    with pytest.raises(ConfigError) as error:
        found.report.check()
    assert str(error.value) == (
        "run.yaml: 2 keys cannot be translated:\n"
        "- model.model_config.surprise: 4: an unknown key.\n"
        "- surprise: 3: an unknown key.\n"
        "Remedy: change or remove them, or import without them: --ignore KEY."
    )
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
    ],
)
def test_parallelism_without_stages(changes: dict[str, Any], parallel: dict[str, Any]) -> None:
    found = run_of(**(ONE_STAGE | changes))
    found.report.check()
    assert found.config["parallel"] == parallel


@pytest.mark.parametrize(
    ("algorithm", "degree", "mesh", "impl"),
    [("ulysses_cp", 1, {"ulysses": 2}, "ulysses"), ("hybrid_cp", 2, {"context": 2, "ulysses": 2}, "hybrid")],
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


def test_experts() -> None:
    found = run_of(**EXPERTS)
    found.report.check()
    assert found.config["mesh"] == {"data": 1, "expert": 2, "model": 2}
    assert found.config["rules"]["experts"] == "expert" and found.config["rules"]["dense_layers"] is None
    assert found.config["rules"]["batch"] == ["replica", "data", "expert"]
    model = found.config["model"]
    wanted = {
        "family": "mixtral",
        "experts": 8,
        "k": 2,
        "expert_mlp": 48,
        "score": "sigmoid",
        "dense_layers": 1,
        "scale": 2.5,
        "groups": 4,
        "groups_per_token": 2,
        "normalize": True,
        "shared_experts": 1,
        "z_loss": 0.0,
        "balance_loss": 0.0001,
        "balance_per": "sequence",
        "bias_rate": 0.001,
        "capacity_factor": None,
    }
    assert {key: model[key] for key in wanted} == wanted
    alone = {key: EXPERTS["moe_config"][key] for key in ("expert_num", "num_experts_chosen")}
    rules = run_of(**(EXPERTS | {"moe_config": alone})).config["rules"]
    assert not {"mlp", "dense_layers", "latent"} & rules.keys()  # the model has no such dims


def test_latent_attention_and_keys_of_hugging_face() -> None:
    found = run_of(
        **ONE_STAGE,
        m__num_layers=None,
        m__num_hidden_layers=3,
        m__n_kv_heads=None,
        m__num_experts=8,
        m__num_experts_per_tok=2,
        m__moe_intermediate_size=32,
        m__moe_router_load_balancing_type="seq_aux_loss",
        m__router_aux_loss_coef=0.001,
        m__moe_grouped_gemm=True,
        m__kv_lora_rank=16,
        m__q_lora_rank=24,
        m__qk_rope_head_dim=8,
        m__qk_nope_head_dim=16,
        m__v_head_dim=16,
    )
    found.report.check()
    model = found.config["model"]
    assert model["family"] == "deepseek_v3" and model["layers"] == 3 and model["kv_heads"] == 4
    assert model["latent_attention"] == {"kv_latent": 16, "q_latent": 24, "rope_dim": 8, "value_dim": 16}
    assert (model["balance_loss"], model["balance_per"], model["capacity_factor"]) == (0.001, "sequence", None)
    assert "kv_heads" not in found.config["rules"] and found.config["rules"]["latent"] is None


YARN = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_slow": 1.0, "beta_fast": 32.0}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
YARN_HERE = {"kind": "yarn", "factor": 40.0, "original_seq": 4096, "slow_turns": 1.0, "fast_turns": 32.0}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"extend_method": "YARN", "scaling_factor": YARN}, {**YARN_HERE, "mscale": 1.0, "mscale_all_dim": 1.0}),
        ({"extend_method": "YARN", "scaling_factor": YARN | {"mscale_all_dim": 0.0}}, {**YARN_HERE, "mscale": 1.0}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 16}, "max_position_embeddings": 4096},
            {**YARN_HERE, "factor": 4.0, "fast_turns": 16.0},
        ),
        ({"extend_method": "LINEAR", "scaling_factor": {"factor": 4}}, {"kind": "linear", "factor": 4.0}),
        (
            {"extend_method": "LLAMA3", "scaling_factor": {"low_freq_factor": 2, "high_freq_factor": 8}},
            {"kind": "llama3", "factor": 8.0, "original_seq": 8192, "slow_turns": 2.0, "fast_turns": 8.0},
        ),
    ],
)
def test_stretched_rotary_positions(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = run_of(**ONE_STAGE, **{f"m__{name}": value for name, value in changes.items()})
    found.report.check()
    assert found.config["model"]["rope_scaling"] == wanted
    RopeScaling(**wanted)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"factor": 40.0}, ("scaling_factor must have original_max_position_embeddings, beta_slow, beta_fast, mscale, "
                           "mscale_all_dim for the method YARN")),
        (YARN | {"factor": 0.5}, "scaling_factor.factor must be at least 1, got 0.5"),
        (YARN | {"beta_fast": 1}, "scaling_factor must blend from fewer to more turns, got 1 and 1"),
        (YARN | {"original_max_position_embeddings": 8192}, ("scaling_factor.original_max_position_embeddings must be "
                                                            "less than max_position_embedding=8192, got 8192")),
    ],
)  # fmt: skip
def test_yarn_is_checked_as_in_mindformers(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_of(**ONE_STAGE, m__extend_method="YARN", m__scaling_factor=values, m__max_position_embedding=8192)
    assert f"model.model_config.{text}" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"m__mtp_depth": 1}, {"mtp_depth": 1, "mtp_weight": 0.3}),
        ({"m__num_nextn_predict_layers": 2, "m__mtp_loss_factor": 0.2}, {"mtp_depth": 2, "mtp_weight": 0.2}),
        ({"m__mtp_num_layers": 1}, {"mtp_depth": 1, "mtp_weight": 0.1}),
        ({"m__mtp_depth": 0, "m__mtp_loss_factor": 0.3}, {}),
    ],
)
def test_further_tokens_of_models_with_experts(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    found = run_of(**ONE_STAGE, m__num_experts=4, **changes)
    found.report.check()
    own = {key: value for key, value in found.config["model"].items() if key.startswith("mtp_")}
    assert own == fields


def test_adapters() -> None:
    lora = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    found = run_of(**ONE_STAGE, m__pet_config=lora | {"target_modules": ".*wq|.*wk|.*wv|.*linear_fc1"})
    found.report.check()
    targets = ["attention/q", "attention/k", "attention/v", "mlp/gate", "mlp/up"]
    assert found.config["model"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": targets}
    staged = run_of(m__pet_config=lora)
    assert staged.config["model"]["lora"]["rank"] == 4
    assert staged.config["parallel"]["pipeline"]["microbatches"] == 4
    unknown = run_of(**ONE_STAGE, m__pet_config=lora | {"target_modules": ".*dense"})
    key = "model.model_config.pet_config.target_modules"
    assert row(unknown, key) == ("refused", "", "no weight here corresponds to '.*dense'")


@pytest.mark.parametrize(
    ("sense", "scale"),
    [
        (1024.0, {"initial": 1024.0, "minimum": 1024.0, "interval": 2**31 - 1}),
        (
            {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 4096, "scale_factor": 4, "scale_window": 500},
            {"initial": 4096.0, "growth": 4.0, "backoff": 0.25, "interval": 500},
        ),
    ],
)
def test_loss_scales(sense: Any, scale: dict[str, float]) -> None:
    found = run_of(runner_wrapper__scale_sense=sense, runner_wrapper__use_clip_grad=False)
    assert found.config["precision"] == {"scale": scale}
    assert found.config["optimizer"]["clip_norm"] is None
    assert jp.Precision.of(found.config["precision"]).scale is not None


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


def test_steps_follow_from_the_data_or_the_caller() -> None:
    sized = {"lr_schedule__total_steps": -1, "train_dataset": {"data_loader": {"sizes": [800, 0, 0]}}}
    assert run_of(**sized).config["train"]["steps"] == 2 * (800 // 16)
    assert run_of(ImportOptions("run.yaml", steps=7), **sized).config["train"]["steps"] == 7


def test_a_megatron_data_set_is_read() -> None:
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": {"data_path": ["1", "wiki_document"]}}
    found = run_of(train_dataset={"data_loader": loader})
    assert found.config["data"] == {"source": "wiki_document", "batch": 16, "seq": 64}
    assert row(found, "train_dataset")[0] == "translated"


def test_one_device_and_data_parallelism() -> None:
    assert run_of(use_parallel=False, recompute_config__recompute=True).config["mesh"] == {"data": 1}
    options = ImportOptions("run.yaml", devices=4)
    found = run_of(options, parallel__parallel_mode=0, recompute_config__recompute=True)
    assert (found.config["mesh"], found.devices, found.config["data"]["batch"]) == ({"data": 4}, 4, 8)


@pytest.mark.parametrize("experts", [False, True])
def test_any_value_is_translated_refused_or_an_error(experts: bool) -> None:
    data = changed(
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
