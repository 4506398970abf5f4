"""Keys of a run that are wrong or contradict each other: the errors name them and their remedies."""

from __future__ import annotations

from typing import Any

import pytest
from run_keys import BOTH, STAGES

from jaxpar.errors import ConfigError, JaxparError, RulesError


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (
            {"parallel": {"optimizer": {"stage": 4}}},
            RulesError,
            "parallel.optimizer: stage must be 0 (none), 1 (optimizer state), 2 (and gradients) or 3",
        ),
        ({"parallel": {"optimizer": {}}}, ConfigError, "the key 'stage' is missing"),
        ({"parallel": {"optimiser": {"stage": 1}}}, ConfigError, "Did you mean 'optimizer'?"),
        (
            {"parallel": {"context": {"impl": "rings"}}},
            ConfigError,
            (
                "parallel.context: impl must be one of auto, dense, flash, gather, ring, ring_self_attention, ulysses, "
                "hybrid, got 'rings'. Did you mean 'ring'?"
            ),
        ),
        (
            {"parallel": {"context": {"load_balance": "balanced"}}},
            ConfigError,
            (
                "parallel.context: load_balance: balanced distributes packed documents, but data.packing is false. "
                "Remedy: data: {packing: true}, or load_balance: zigzag."
            ),
        ),
        (
            STAGES,
            ConfigError,
            (
                "mesh: pipeline is 4, but parallel.pipeline, which assigns layers to the stages, is not set. Remedy: "
                "parallel.pipeline: {schedule: 1f1b, microbatches: 8}."
            ),
        ),
        (
            {**STAGES, "mesh": {"pipeline": -1, "data": 2}, "parallel": {"pipeline": {"microbatches": 8}}},
            ConfigError,
            (
                "mesh: pipeline is -1, but a schedule requires a fixed number of stages. Remedy: set pipeline to a "
                "number, and data: -1."
            ),
        ),
        (
            {
                **STAGES,
                "parallel": {"pipeline": {"microbatches": 8}, "remat": {"policy": "full", "layers": [2, 1, 0, 0]}},
            },
            ConfigError,
            (
                "pipeline: remat.layers is [2, 1, 0, 0], but under a pipeline all layers share one program, so all of "
                "them recompute alike. Remedy: leave remat.layers out."
            ),
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
            (
                "pipeline: remat.offload_names is ['block_output'], but a pipeline keeps the activations of its "
                "microbatches in a loop, whose buffers cannot be in host memory. Remedy: move these names to "
                "save_names, or leave them out, so that they are recomputed."
            ),
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"microbatches": 8}, "reshard_after_forward": False}},
            ConfigError,
            (
                "pipeline: reshard_after_forward is False, but under a pipeline weights are gathered once per step and "
                "kept. Remedy: leave reshard_after_forward out."
            ),
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"schedule": "interleaved", "microbatches": 6, "virtual_stages": 2}}},
            ConfigError,
            (
                "parallel.pipeline: schedule 'interleaved': 6 microbatches cannot be split into groups of 4, one "
                "microbatch per stage. Remedy: use a multiple of 4, such as 8, or 'breadth_first', which accepts any "
                "number from 4."
            ),
        ),
        (
            {**STAGES, "parallel": {"pipeline": {"microbatches": 8, "layers_per_stage": [5, 4, 4, 4]}}},
            ConfigError,
            (
                "parallel.pipeline: layers_per_stage is [5, 4, 4, 4], 4 numbers that sum to 17, but 16 layers run in "
                "stages and the schedule has 4 pieces of at least one layer each. Remedy: 4 numbers that sum to 16, "
                "such as [4, 4, 4, 4]."
            ),
        ),
        (
            {
                **STAGES,
                "parallel": {"pipeline": {"microbatches": 8, "grad_reduction": "per_chunk", "executor": "independent"}},
            },
            ConfigError,
            (
                "pipeline: executor is 'independent', which allows no collectives in a stage's layers, but "
                "grad_reduction is 'per_chunk', which scatters gradients layer by layer. Remedy: set "
                "grad_reduction='per_step' or executor='lockstep'."
            ),
        ),
        (
            {"parallel": {"context": {"impl": "ring", "keep_gathered_kv": True}}},
            ConfigError,
            (
                "parallel.context: keep_gathered_kv is true, but only impl gather gathers keys and values, and impl is "
                "'ring'. Remedy: set impl: gather, or leave keep_gathered_kv out."
            ),
        ),
        (
            {"parallel": {"context": {"block": 0}}},
            ConfigError,
            "parallel.context: block must be a number of tokens >= 1, got 0.",
        ),
        (
            {"precision": "bf61"},
            ConfigError,
            "precision: compute must be a floating dtype, got 'bf61'. Did you mean 'bf16'?",
        ),
        (
            {"parallel": {"fusion": {"reduce": "many"}}},
            ConfigError,
            "parallel.fusion: reduce must be 'auto', a size such as '64MiB', or a list of layers, got 'many'.",
        ),
        (
            {"parallel": {"offload": {"parameters": "host"}}},
            ConfigError,
            (
                "parallel.offload: parameters: host requires optimizer: host, because the update reads both, got "
                "optimizer: null. Remedy: {parameters: host, optimizer: host}."
            ),
        ),
        (
            {"parallel": {"offload": BOTH, "reshard_after_forward": 4}},
            ConfigError,
            (
                "parallel.offload: parameters are stored in host memory, but reshard_after_forward: 4 keeps all "
                "layers' weights on the device for the backward pass. Remedy: leave reshard_after_forward out, or "
                "parallel.offload.parameters."
            ),
        ),
        (
            {"parallel": {"offload": BOTH, "remat": {"policy": "full", "layers": [1]}}},
            ConfigError,
            (
                "parallel.offload: parameters are stored in host memory, where a stack of layers cannot be sliced, but "
                "remat.layers selects some of its layers. Remedy: leave remat.layers out, or "
                "parallel.offload.parameters."
            ),
        ),
        (
            {"parallel": {"offload": BOTH, "optimizer": {"stage": 2}}},
            ConfigError,
            (
                "parallel.offload: parameters are stored in host memory and copied to the device one layer at a time, "
                "but parallel.optimizer.stage 2 gathers all of them before the step. Remedy: parallel.optimizer.stage: "
                "3, or leave parallel.offload.parameters out."
            ),
        ),
        (
            {"parallel": {"offload": {"optimizer": "tape"}}},
            ConfigError,
            "parallel: offload: optimizer must be 'host' or 'disk', got 'tape'",
        ),
        (
            {"parallel": {"offload": {"parameters": "host", "optimizer": "disk", "path": "moments"}}},
            ConfigError,
            (
                "parallel.offload: parameters: host requires optimizer: host, because the update reads both, got "
                "optimizer: disk. Remedy: {parameters: host, optimizer: host}."
            ),
        ),
        (
            {"parallel": {"offload": {"optimizer": "disk"}}},
            ConfigError,
            (
                "parallel.offload: optimizer: disk requires path, the folder of its files. Remedy: path: DIR, on a "
                "fast disk."
            ),
        ),
        (
            {"parallel": {"offload": {"path": "moments"}}},
            ConfigError,
            "parallel.offload: path is only valid with optimizer: disk. Remedy: leave path out.",
        ),
        (
            {"parallel": {"offload": {"optimizer": "host", "min_bytes": "big"}}},
            ConfigError,
            "offload: min_bytes must be a size such as '64KiB', got 'big'.",
        ),
        (
            {"optimizer": {"name": "one_bit_adam", "clip_norm": None}, "train": {"steps": 50}},
            ConfigError,
            (
                "requires options.warmup, the number of steps of ordinary Adam at the start. Remedy: options: "
                "{warmup: 10}, a fifth of train.steps."
            ),
        ),
        (
            {"optimizer": {"name": "one_bit_adam", "clip_norm": None, "options": {"warmup": 9, "momentum": 1}}},
            ConfigError,
            (
                "optimizer: one_bit_adam has no option 'momentum'. Options: b1, b2, eps, weight_decay, "
                "warmup, block, min_bytes."
            ),
        ),
        *(
            (
                {"model": {"family": "llama", name: value}},
                ConfigError,
                f"model: {name} must be {text}, got {value}. Remedy: use a number in this range, or leave the key out.",
            )
            for name, value, text in (
                ("embed", -1, "from 1 to 16,777,216"),
                ("embed", 2**63, "from 1 to 16,777,216"),
                ("kv_heads", -1, "from 1 to 16,384"),
                ("rope_theta", 0, "above 0, at most 1e+12"),
            )
        ),
        *(
            (
                {"model": {"family": "llama", name: "bf17"}},
                ConfigError,
                f"model: {name} must be 'float32' or 'bfloat16' or 'float16' or 'float64', got 'bf17'.",
            )
            for name in ("dtype", "param_dtype")
        ),
        ({"model": {"family": "llama", "preset": {}}}, ConfigError, "llama: unknown preset {}. Presets: tiny, "),
        (
            {"data": {"batch": 2**63}},
            ConfigError,
            f"data: batch must be from 1 to 1,048,576, got {2**63}. Remedy: use a number in this range, or leave the",
        ),
        ({"mesh": {"pipeline": ""}}, ConfigError, "mesh: pipeline must be an integer, got '' (str)."),
        (
            {"mesh": {"data": 2**63}},
            ConfigError,
            f"mesh: data must be from -1 to 1,048,576, got {2**63}. Remedy: use a number in this range, or leave the",
        ),
        (
            STAGES | {"parallel": {"pipeline": {"microbatches": 2**20}}},
            ConfigError,
            (
                "parallel.pipeline: 4 stages, microbatches: 1048576, virtual_stages: 1 and sequence_chunks: 1 are "
                "4,194,304 forward passes, more than 32,768, the limit. Remedy: use fewer and larger microbatches."
            ),
        ),
        (
            {"optimizer": {"options": {"b1": "x"}}},
            ConfigError,
            "optimizer: options: b1 must be a number, got 'x' (str).",
        ),
        (
            {"optimizer": {"options": {"b1": float("nan")}}},
            ConfigError,
            "optimizer: options: b1 must be true or false or an integer or a number or a string, got nan (float).",
        ),
        (
            {"train": {"grad_accum_steps": 0}},
            ConfigError,
            "train: grad_accum_steps must be from 1 to 1,048,576, got 0.",
        ),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], kind: type[JaxparError], text: str, job_of: Any) -> None:
    with pytest.raises(kind) as error:
        job_of(**keys)
    assert text in str(error.value)


ONE_BIT = {"name": "one_bit_adam", "clip_norm": None, "options": {"warmup": 9, "weight_decay": 0.1}}


def test_signs_are_an_optimizer_of_a_run(job_of: Any) -> None:
    job = job_of(optimizer=ONE_BIT)
    assert (job.tx.settings.warmup, job.tx.settings.weight_decay) == (9, 0.1)
    assert float(job.tx.settings.learning_rate(20)) == pytest.approx(1e-3)
    assert job.step_options()["clip_norm"] is None


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"optimizer": ONE_BIT | {"clip_norm": 1.0}},
            (
                "optimizer.clip_norm: the norm of the gradient over all devices is not known. Remedy: "
                "optimizer.clip_norm: null."
            ),
        ),
        (
            {"parallel": {"optimizer": {"stage": 1}}},
            (
                "parallel.optimizer: weights and moments must be replicated (stage 0). Remedy: leave "
                "parallel.optimizer out."
            ),
        ),
        (
            {"parallel": {"offload": {"optimizer": "host"}}},
            "parallel.offload: its state stays on the devices. Remedy: leave parallel.offload out.",
        ),
        (
            {"precision": {"reduce": "int8"}},
            (
                "precision.reduce: it reduces gradients in fp32 during its warm-up, and sends signs afterwards. "
                "Remedy: leave precision.reduce out."
            ),
        ),
        (
            {"parallel": {"fusion": {"reduce": [1]}}},
            "parallel.fusion.reduce: it sends all signs together. Remedy: leave parallel.fusion.reduce out.",
        ),
    ],
)
def test_keys_that_contradict_signs_are_named_both(keys: dict[str, Any], text: str, job_of: Any) -> None:
    with pytest.raises(ConfigError) as error:
        job_of(**({"optimizer": ONE_BIT} | keys))
    assert str(error.value) == f"optimizer.name: one_bit_adam does not support {text}"
