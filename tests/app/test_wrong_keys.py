"""Keys of a run that are wrong or contradict each other: the errors name them and their remedies."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises
from run_keys import BOTH, STAGES

from jaxpar.errors import ConfigError, JaxparError, RulesError


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        ({"parallel": {"optimizer": {"stage": 4}}}, RulesError, "parallel.optimizer: stage"),
        ({"parallel": {"optimizer": {}}}, ConfigError, "'stage'"),
        ({"parallel": {"optimiser": {"stage": 1}}}, ConfigError, "'optimizer'?"),
        ({"parallel": {"context": {"impl": "rings"}}}, ConfigError, "parallel.context: impl"),
        ({"parallel": {"context": {"load_balance": "balanced"}}}, ConfigError, "data.packing"),
        (STAGES, ConfigError, "is 4"),
        (
            {**STAGES, "mesh": {"pipeline": -1, "data": 2}, "parallel": {"pipeline": {"microbatches": 8}}},
            ConfigError,
            "is -1",
        ),
        (
            {
                **STAGES,
                "parallel": {"pipeline": {"microbatches": 8}, "remat": {"policy": "full", "layers": [2, 1, 0, 0]}},
            },
            ConfigError,
            "pipeline: remat.layers",
        ),
        (
            {
                **STAGES,
                "parallel": {
                    "pipeline": {"microbatches": 8},
                    "remat": {"policy": "save_names", "offload_names": ["block_output"]},
                },
            },
            ConfigError,
            "pipeline: remat.offload_names",
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"microbatches": 8}, "reshard_after_forward": False}},
            ConfigError,
            "pipeline: reshard_after_forward",
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"schedule": "interleaved", "microbatches": 6, "virtual_stages": 2}}},
            ConfigError,
            "interleaved",
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"microbatches": 8, "layers_per_stage": [5, 4, 4, 4]}}},
            ConfigError,
            "parallel.pipeline: layers_per_stage",
        ),
        (
            {
                **STAGES,
                "parallel": {"pipeline": {"microbatches": 8, "grad_reduction": "per_chunk", "executor": "independent"}},
            },
            ConfigError,
            "pipeline: executor",
        ),
        (
            {"parallel": {"context": {"impl": "ring", "keep_gathered_kv": True}}},
            ConfigError,
            "parallel.context: keep_gathered_kv",
        ),
        ({"parallel": {"context": {"block": 0}}}, ConfigError, "parallel.context: block"),
        ({"precision": "bf61"}, ConfigError, "precision: compute"),
        ({"parallel": {"fusion": {"reduce": "many"}}}, ConfigError, "parallel.fusion: reduce"),
        ({"parallel": {"offload": {"parameters": "host"}}}, ConfigError, "parallel.offload"),
        ({"parallel": {"offload": BOTH, "reshard_after_forward": 4}}, ConfigError, "layers'"),
        (
            {"parallel": {"offload": BOTH, "remat": {"policy": "full", "layers": [1]}}},
            ConfigError,
            "parallel.offload",
        ),
        ({"parallel": {"offload": BOTH, "optimizer": {"stage": 2}}}, ConfigError, "parallel.optimizer.stage"),
        ({"parallel": {"offload": {"optimizer": "tape"}}}, ConfigError, "tape"),
        (
            {"parallel": {"offload": {"parameters": "host", "optimizer": "disk", "path": "moments"}}},
            ConfigError,
            "parallel.offload",
        ),
        ({"parallel": {"offload": {"optimizer": "disk"}}}, ConfigError, "parallel.offload: optimizer"),
        ({"parallel": {"offload": {"path": "moments"}}}, ConfigError, "parallel.offload: path"),
        ({"parallel": {"offload": {"optimizer": "host", "min_bytes": "big"}}}, ConfigError, "offload: min_bytes"),
        (
            {"optimizer": {"name": "one_bit_adam", "clip_norm": None}, "train": {"steps": 50}},
            ConfigError,
            "options.warmup",
        ),
        (
            {"optimizer": {"name": "one_bit_adam", "clip_norm": None, "options": {"warmup": 9, "momentum": 1}}},
            ConfigError,
            "weight_decay",
        ),
        *(
            ({"model": {"family": "llama", name: value}}, ConfigError, "model")
            for name, value, text in (
                ("embed", -1, "16,777,216"),
                ("embed", 2**63, "16,777,216"),
                ("kv_heads", -1, "16,384"),
                ("rope_theta", 0, "1e+12"),
            )
        ),
        *(({"model": {"family": "llama", name: "bf17"}}, ConfigError, "float32") for name in ("dtype", "param_dtype")),
        ({"model": {"family": "llama", "preset": {}}}, ConfigError, "llama: unknown"),
        ({"data": {"batch": 2**63}}, ConfigError, "data: batch"),
        ({"mesh": {"pipeline": ""}}, ConfigError, "''"),
        ({"mesh": {"data": 2**63}}, ConfigError, "mesh: data"),
        (STAGES | {"parallel": {"pipeline": {"microbatches": 2**20}}}, ConfigError, "virtual_stages"),
        ({"optimizer": {"options": {"b1": "x"}}}, ConfigError, "'x'"),
        ({"optimizer": {"options": {"b1": float("nan")}}}, ConfigError, "optimizer: options"),
        ({"train": {"grad_accum_steps": 0}}, ConfigError, "train: grad_accum_steps"),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], kind: type[JaxparError], text: str, job_of: Any) -> None:
    with raises(kind, text):
        job_of(**keys)


ONE_BIT = {"name": "one_bit_adam", "clip_norm": None, "options": {"warmup": 9, "weight_decay": 0.1}}


def test_signs_are_an_optimizer_of_a_run(job_of: Any) -> None:
    job = job_of(optimizer=ONE_BIT)
    assert (job.tx.settings.warmup, job.tx.settings.weight_decay) == (9, 0.1)
    assert float(job.tx.settings.learning_rate(20)) == pytest.approx(1e-3)
    assert job.step_options()["clip_norm"] is None


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"optimizer": ONE_BIT | {"clip_norm": 1.0}}, "optimizer.clip_norm"),
        ({"parallel": {"optimizer": {"stage": 1}}}, "parallel.optimizer"),
        ({"parallel": {"offload": {"optimizer": "host"}}}, "parallel.offload"),
        ({"precision": {"reduce": "int8"}}, "precision.reduce"),
        ({"parallel": {"fusion": {"reduce": [1]}}}, "parallel.fusion.reduce"),
    ],
)
def test_keys_that_contradict_signs_are_named_both(keys: dict[str, Any], text: str, job_of: Any) -> None:
    with raises(ConfigError, text):
        job_of(**({"optimizer": ONE_BIT} | keys))
