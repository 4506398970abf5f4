"""The models of MindFormers configurations: experts, latent attention, rotary positions, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from error_texts import raises
from mindformers_files import EXPERTS, ONE_STAGE, row, run_of

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.errors import ConfigError
from jaxpar.models.llama.rope import RopeScaling
from jaxpar.sharding.layout import tracing_under
from jaxpar.training.model.parts import Tagged


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


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"moe_router_load_balancing_type": "none"}, {"balance_loss": 0.0, "balance_per": "batch"}),
        ({"moe_router_load_balancing_type": "aux_loss"}, {"balance_loss": 0.05, "balance_per": "batch"}),
        ({"first_k_dense_replace": True}, {"dense_layers": 0}),
        ({"moe_shared_expert_intermediate_size": 96, "moe_intermediate_size": 48}, {"shared_experts": 2}),
        ({"use_sliding_window": False, "sliding_window": 32}, {"sliding_window": None}),
        ({"sliding_window": 32}, {"sliding_window": 32}),
    ],
)
def test_fields_of_a_model_with_experts(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = run_of(**ONE_STAGE, m__num_experts=4, **{f"m__{name}": value for name, value in changes.items()})
    found.report.check()
    assert {name: found.config["model"].get(name) for name in wanted} == wanted


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
    assert found.config["rules"]["kv_heads"] == "model" and found.config["rules"]["latent"] is None


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "embed_dropout_prob", "attention_dropout_rate", "any_dropout"])
def test_a_dropout_of_zero_changes_nothing(name: str) -> None:
    for off in (0, 0.0, False):
        assert row(run_of(**{f"m__{name}": off}), f"model.model_config.{name}")[0] == "ignored"
    for on in (0.1, True):
        assert row(run_of(**{f"m__{name}": on}), f"model.model_config.{name}")[::2] == (
            "refused",
            "there is no dropout",
        )


@pytest.mark.parametrize(
    ("changes", "exclude"),
    [
        ({}, ["vectors"]),
        ({"m__qkv_has_bias": True}, ["vectors", "bias"]),
        ({"optimizer__weight_decay": 0.0}, None),
        ({"m__pet_config": {"pet_type": "lora"}}, None),
    ],
)
def test_norms_and_biases_do_not_decay(changes: dict[str, Any], exclude: list[str] | None) -> None:
    assert run_of(**changes).config["optimizer"].get("decay") == (None if exclude is None else {"exclude": exclude})


SMALL = {**ONE_STAGE, "m__num_layers": 2, "parallel_config__data_parallel": 4, "m__seq_length": 32}
MIXTURE = {"m__num_experts": 4, "m__num_experts_per_tok": 2, "m__moe_grouped_gemm": True}
LATENT = {"m__n_kv_heads": 4, "m__kv_lora_rank": 16, "m__qk_rope_head_dim": 8, "m__qk_nope_head_dim": 16}
LATENT |= {"m__v_head_dim": 16, "m__num_experts": 4, "m__moe_grouped_gemm": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"m__qk_layernorm": True, "m__qkv_has_bias": True},
        MIXTURE,
        pytest.param(MIXTURE | {"m__n_shared_experts": 1, "m__first_k_dense_replace": 1}, marks=pytest.mark.slow),
        pytest.param(LATENT, marks=pytest.mark.slow),
        LATENT | {"m__q_lora_rank": 24, "m__first_k_dense_replace": 1, "m__mtp_depth": 1},
    ],
    ids=["dense", "experts", "shared", "latent", "further"],
)
def test_the_rules_name_every_dim_of_a_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """Of weights and of activations, which only a trace of the loss meets."""
    found = run_of(**SMALL, **changes)
    found.report.check()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(found.config))
    job = make_job(load_run(tmp_path / "run.yaml"))
    layout, batch = (
        job.layout(8),
        jax.tree.map(lambda leaf: leaf.value, job.batch_spec(), is_leaf=lambda leaf: isinstance(leaf, Tagged)),
    )
    assert jp.explain(layout, job.make_model, job.tx).problems == ()
    with tracing_under(layout):
        jax.eval_shape(lambda key, batch: job.loss_fn(job.make_model(key), batch), jax.random.key(0), batch)


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
    ("values", "name"),
    [
        ({"factor": 40.0}, "beta_slow"),
        (None, "rope_scaling"),
        (YARN | {"factor": 0.5}, "scaling_factor.factor"),
        (YARN | {"beta_fast": 1}, "got 1"),
        (YARN | {"original_max_position_embeddings": 8192}, "scaling_factor.original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_yarn_is_checked_as_in_mindformers(values: dict[str, Any] | None, name: str) -> None:
    with raises(ConfigError, name):
        stretched = {"m__extend_method": "YARN", "m__scaling_factor": values}
        stretched = {"m__rope_scaling": {"type": "yarn", "beta_fast": 16}} if values is None else stretched
        run_of(**ONE_STAGE, **stretched, m__max_position_embedding=8192)


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
    other = run_of(m__pet_config={"pet_type": "prefixtuning"})
    key = "model.model_config.pet_config"
    assert row(other, key) == ("refused", "", "only the pet_type lora is translated") and "lora" not in other.config
