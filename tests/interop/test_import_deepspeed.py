"""DeepSpeed configurations: what they become, and the rules that they must keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from error_texts import raises
from mutations import mutated

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations import ImportedRun, ImportOptions, import_deepspeed

PLAIN: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "warmup_type": "linear", "total_num_steps": 100},
    },
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
    "steps_per_print": 10,
}


def run_of(devices: int | None = None, steps: int | None = None, **changes: Any) -> ImportedRun:
    """The import of ``PLAIN`` with values at paths, whose dots are written ``__``; ``None`` removes a key."""
    data = copy.deepcopy(PLAIN)
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = data
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
        if value is None:
            del at[last]
    return import_deepspeed(data, ImportOptions("ds.json", devices=devices, steps=steps, base="llama"))


def row(found: ImportedRun, key: str) -> tuple[str, str]:
    (it,) = [row for row in found.report.rows if row.key == key]
    return it.status, it.note


def test_a_configuration_becomes_a_run() -> None:
    found = run_of()
    found.report.check()
    assert found.devices == 8
    assert {key: value for key, value in found.config.items() if key != "rules"} == {
        "mesh": {"data": 8},
        "parallel": {"optimizer": {"stage": 2}},
        "model": {"dtype": "bfloat16", "param_dtype": "float32"},
        "data": {"batch": 64},
        "train": {"grad_accum_steps": 2, "steps": 100},
        "optimizer": {
            "clip_norm": 0.5,
            "name": "adamw",
            "options": {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1},
            "schedule": "linear",
            "warmup": 10,
            "final_lr_ratio": 0.0,
            "learning_rate": 1e-3,
        },
    }
    assert found.config["rules"]["batch"] == ["replica", "data"]
    assert found.report.headline() == "ds.json: 15 translated, 2 ignored, 0 refused"


@pytest.mark.parametrize(
    ("devices", "changes", "batch", "steps"),
    [
        (8, {"gradient_accumulation_steps": None}, 64, 2),
        (8, {"train_micro_batch_size_per_gpu": None}, 64, 2),
        (8, {"train_batch_size": None}, 64, 2),
        (8, {"train_batch_size": None, "gradient_accumulation_steps": None}, 32, 1),
        (4, {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}, 64, 1),
    ],
)
def test_missing_batch_sizes_are_computed(devices: int, changes: dict[str, Any], batch: int, steps: int) -> None:
    config = run_of(devices, **changes).config
    assert (config["data"]["batch"], config["train"]["grad_accum_steps"]) == (batch, steps)


@pytest.mark.parametrize(
    ("zero", "parallel"),
    [
        ({"stage": 0}, {}),
        (
            {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            {"optimizer": {"stage": 3}, "offload": {"parameters": "host", "optimizer": "host"}},
        ),
        (
            {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}},
            {"optimizer": {"stage": 1}, "offload": {"optimizer": "disk", "path": "/disk"}},
        ),
        ({"stage": 2, "cpu_offload": True}, {"optimizer": {"stage": 2}, "offload": {"optimizer": "host"}}),
        ({"stage": 3, "mics_shard_size": 4}, {"optimizer": {"stage": 3, "fsdp_group_size": 4}}),
        ({"stage": 3, "zero_hpz_partition_size": 2}, {"optimizer": {"stage": 3}, "reshard_after_forward": 2}),
        ({"stage": 3, "stage3_param_persistence_threshold": 1000}, {"optimizer": {"stage": 3, "min_bytes": 4000}}),
    ],
)
def test_zero(zero: dict[str, Any], parallel: dict[str, Any]) -> None:
    found = run_of(zero_optimization=zero)
    found.report.check()
    assert found.config["parallel"] == parallel


def test_quantized_collectives() -> None:
    quantized = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    assert run_of(zero_optimization={"stage": 3, **quantized}).config["precision"] == {
        "gather": "int8",
        "reduce": "int8",
    }


@pytest.mark.parametrize(
    ("half", "scale"),
    [
        ({}, {"initial": 65536.0, "interval": 1000, "hysteresis": 2, "minimum": 1}),
        ({"loss_scale": 128}, {"initial": 128.0, "minimum": 128.0, "interval": 2**31 - 1}),
    ],
)
def test_fp16(half: dict[str, Any], scale: dict[str, Any]) -> None:
    config = run_of(bf16=None, fp16={"enabled": True, **half}).config
    assert config["model"]["dtype"] == "float16" and config["precision"] == {"scale": scale}


def test_without_16_bits_all_is_fp32() -> None:
    assert run_of(bf16=None).config["model"] == {"dtype": "float32", "param_dtype": "float32"}


@pytest.mark.parametrize(("name", "dtype"), [("torch.float16", "float16"), ("bf16", "bfloat16"), (None, "bfloat16")])
def test_autocast_sets_the_dtype(name: str | None, dtype: str) -> None:
    cast = {"enabled": True} if name is None else {"enabled": True, "dtype": name}
    found = run_of(bf16=None, torch_autocast=cast)
    assert found.config["model"] == {"dtype": dtype, "param_dtype": "float32"}
    assert row(found, "torch_autocast") == ("translated", "")
    off = run_of(bf16=None, torch_autocast=cast | {"enabled": False})
    assert off.config["model"]["dtype"] == "float32" and row(off, "torch_autocast") == ("ignored", "enabled is false")


@pytest.mark.parametrize(("wire", "reduce"), [("fp32", "fp32"), ("bfp16", "bf16")])
def test_the_dtype_of_reductions(wire: str, reduce: str) -> None:
    assert run_of(communication_data_type=wire).config["precision"] == {"reduce": reduce}


def test_a_cosine_ends_at_its_ratio_and_the_steps_of_the_caller() -> None:
    params = {"warmup_num_steps": 5, "cos_min_ratio": 0.1, "total_num_steps": 100}
    found = run_of(steps=40, scheduler={"type": "WarmupCosineLR", "params": params})
    found.report.check()
    optimizer, key = found.config["optimizer"], "scheduler.params.total_num_steps"
    assert (optimizer["schedule"], optimizer["warmup"], optimizer["final_lr_ratio"]) == ("cosine", 5, 0.1)
    assert found.config["train"]["steps"] == 40 and row(found, key) == ("ignored", "--steps")


def test_partitioned_activations_are_sliced() -> None:
    tensor = {"tensor_parallel": {"autotp_size": 2}, "activation_checkpointing": {"partition_activations": True}}
    found = run_of(16, **tensor)
    found.report.check()
    assert found.config["parallel"]["remat"] == {"policy": "full", "slice_activation": True}


def test_other_parallelism() -> None:
    found = run_of(16, tensor_parallel={"autotp_size": 2}, train_batch_size=32, sequence_parallel_size=2)
    assert found.config["mesh"] == {"data": 4, "ulysses": 2, "model": 2}
    assert found.config["parallel"]["optimizer"] == {"stage": 2, "axis": ["data", "ulysses"]}


@pytest.mark.parametrize(
    ("kind", "params", "optimizer"),
    [
        ("Adam", {}, ("adamw", {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0})),
        ("Adam", {"adam_w_mode": False}, ("adam", {"b1": 0.9, "b2": 0.999, "eps": 1e-8})),
        ("Lion", {"weight_decay": 0.1}, ("lion", {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1})),
        ("SGD", {"momentum": 0.9}, ("sgd", {"momentum": 0.9, "nesterov": False})),
        (
            "OneBitAdam",
            {"freeze_step": 20},
            ("one_bit_adam", {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "warmup": 20, "weight_decay": 0.0}),
        ),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], optimizer: tuple[str, dict[str, Any]]) -> None:
    found = run_of(optimizer={"type": kind, "params": {"lr": 1e-3, **params}}, zero_optimization={"stage": 0})
    found.report.check()
    assert (found.config["optimizer"]["name"], found.config["optimizer"]["options"]) == optimizer


def test_a_logarithmic_warmup_becomes_a_linear_one() -> None:
    found = run_of(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 5}})
    assert found.config["optimizer"]["schedule"] == "constant" and found.config["optimizer"]["learning_rate"] == 2e-3
    key = "scheduler.params.warmup_num_steps"
    assert row(found, key) == ("translated", "grows linearly instead of logarithmically")


def test_without_an_optimizer_that_of_the_base_is_kept() -> None:
    assert run_of(optimizer=None, scheduler=None).config["optimizer"] == {"clip_norm": 0.5}


@pytest.mark.parametrize(
    ("changes", "key", "note"),
    [
        ({"optimizer": {"type": "Muon", "params": {"lr": 1}}}, "optimizer.type", "only Adam"),
        ({"scheduler": {"type": "OneCycle", "params": {"a": 1}}}, "scheduler.type", "only WarmupLR"),
        ({"amp": {"enabled": True}}, "amp", "set fp16 or bf16"),
        ({"zero_optimization__offload_optimizer": {"ratio": 0.5}}, "zero_optimization.offload_optimizer.ratio", "all"),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "sequence_parallel_size": 2},
            "zero_optimization.mics_shard_size",
            "only formed along data, without sequence parallelism",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "weights are stored on the devices or in host memory",
        ),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation.stage", "an unknown key"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "activation_checkpointing.cpu_checkpointing",
            "inputs of layers stay",
        ),
    ],
)
def test_refused_keys(changes: dict[str, Any], key: str, note: str) -> None:
    status, found = row(run_of(**changes), key)
    assert status == "refused" and note in found


RULES: list[tuple[int | None, dict[str, Any], str]] = [
    (None, {"train_batch_size": 60}, "60"),
    (4, {}, "64"),
    (None, {"gradient_accumulation_steps": None}, "gradient_accumulation_steps"),
    (8, {"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, "train_micro_batch_size_per_gpu"),
    (None, {"train_batch_size": "auto"}, "'auto'"),
    (None, {"fp16": {"enabled": True}}, "fp16.enabled"),
    (None, {"zero_optimization__stage": 4}, "zero_optimization.stage"),
    (None, {"zero_optimization__offload_param": {"device": "cpu"}}, "zero_optimization.offload_param.device"),
    (None, {"zero_optimization__offload_optimizer": {"device": "tape"}}, "zero_optimization.offload_optimizer.device"),
    (
        None,
        {"zero_optimization__offload_optimizer": {"device": "nvme"}},
        "zero_optimization.offload_optimizer.nvme_path",
    ),
    (None, {"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "zero_optimization.mics_shard_size"),
    (None, {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
    (None, {"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype"),
    (None, {"communication_data_type": "int4"}, "communication_data_type"),
    (6, {"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size"),
    (None, {"optimizer__params__betas": [True, 0.95]}, "optimizer.params.betas"),
]


@pytest.mark.parametrize(("devices", "changes", "name"), RULES)
def test_rules_of_deepspeed(devices: int | None, changes: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        run_of(devices, **changes)


def test_a_base_is_required() -> None:
    with raises(ConfigError, "ds.json", "configuration"):
        import_deepspeed(PLAIN, ImportOptions("ds.json"))


def test_any_value_of_deepspeed_is_translated_refused_or_an_error() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {}, "mics_shard_size": 4}
    texts = []
    for seed in range(300):
        data = mutated(PLAIN | {"zero_optimization": zero, "tensor_parallel": {"autotp_size": 1}}, seed)
        try:
            assert import_deepspeed(data, ImportOptions("ds.json", devices=8, base="llama")).report.to_text()
        except ConfigError as error:
            texts.append(str(error))
    assert len({*texts}) > 20 and all(text.startswith("ds.json: ") for text in texts)
