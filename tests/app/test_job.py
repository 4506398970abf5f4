"""Tests how the keys of a run become a layout, an optimizer and the options of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from profiles import few
from rich.console import Console

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import Job, make_job
from jaxpar.app.train.verify import verify
from jaxpar.data import eval_batches
from jaxpar.errors import ConfigError, JaxparError, MeshError, RulesError
from jaxpar.sharding.hardware.topology import Topology

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def job_of(tmp_path: Path) -> Any:
    def make(**keys: Any) -> Job:
        file = tmp_path / "run.yaml"
        run = {"model": {"family": "llama", "layers": 1}, "layout": str(CONFIGS / "layouts" / "dp.yaml")}
        file.write_text(yaml.safe_dump(run | keys))
        return make_job(load_run(file))

    return make


BOTH = {"parameters": "host", "optimizer": "host"}
LLAMA_16 = {"family": "llama", "layers": 16}
STAGES = {"layout": str(CONFIGS / "layouts" / "pp.yaml"), "model": LLAMA_16}


def test_a_stage_shards_the_layout_and_tells_the_step(job_of: Any) -> None:
    job = job_of(
        parallel={"optimizer": {"stage": 1, "min_bytes": "1KiB", "fsdp_group_size": 4}}, train={"grad_accum_steps": 2}
    )
    layout = job.layout(16)
    assert (layout.sizes["replica"], layout.sizes["data"]) == (4, 4)
    state = jp.abstract_state(layout, job.make_model, job.tx)
    assert str(state.params["embedding"].sharding.spec) == "P('data', None)"
    options = job.step_options()
    assert (options["grad_accum_steps"], options["weight_gather"], options["grad_reduction"]) == (
        2,
        "per_step",
        "per_step",
    )


@pytest.mark.parametrize("stage", [0, 1])
def test_an_unknown_key_of_the_layout_is_named_at_every_stage(stage: int, job_of: Any, tmp_path: Path) -> None:
    layout = tmp_path / "layout.yaml"
    layout.write_text("mesh: {data: -1}\nrules: {batch: data}\nrulse: {}\n")
    with pytest.raises(ConfigError, match="unknown key 'rulse'"):
        job_of(layout=str(layout), parallel={"optimizer": {"stage": stage}})


def test_a_mesh_beyond_any_machine_is_refused(job_of: Any) -> None:
    """XLA raises ``std::bad_cast`` for such a mesh."""
    job = job_of(mesh={"data": 2**20, "model": 2})
    text = r"^a mesh of 2,097,152 devices exceeds 1,048,576\. Remedy: use smaller sizes\.$"
    with pytest.raises(MeshError, match=text):
        job.abstract_devices()
    with pytest.raises(MeshError, match=text.replace("2,097,152", "1,000,000,000,000").replace("^", "")):
        job_of().layout(10**12)


@pytest.mark.parametrize(
    "text", ["hunter2", "- hunter2", "a: *hunter2", "a: !!bool hunter2", "a: hunter2\nb: 2024-13-45", "key: hunter2"]
)
def test_no_error_shows_what_stands_in_a_file_that_is_no_layout(text: str, job_of: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/secret") as error:
        job_of(layout="secret")
    assert "hunter2" not in str(error.value)


def test_packed_documents_come_in_an_order_that_suits_the_ring(job_of: Any) -> None:
    keys = {
        "layout": str(CONFIGS / "layouts" / "ring.yaml"),
        "parallel": {"context": {"impl": "ring", "load_balance": "balanced"}},
    }
    job = job_of(**keys, data={"packing": True, "batch": 2, "seq": 64})
    assert list(job.batch_spec()) == ["tokens", "targets", "segment_ids", "order"]
    text = np.where(np.arange(1000) % 9 == 8, 0, 1)
    (first, *_) = eval_batches(text, batch=2, seq=64, max_batches=1, **job.reading(job.layout()))
    assert first["segment_ids"][0].tolist() == [i // 9 for i in range(64)]
    order = jp.context.balanced_packing(first["segment_ids"], 4, chunks=8)
    np.testing.assert_array_equal(first["order"], [order, order])
    plain = job_of(data={"packing": True})
    assert plain.reading(plain.layout(1)) == {"separator": 0} and "order" not in plain.batch_spec()
    text = (
        "parallel.context: load_balance: balanced splits the sequence into 2 pieces for each of the ring's 4 devices, "
        "but data.seq=12 is not a multiple of 8. Remedy: set data.seq to a multiple of 8."
    )
    short = job_of(**keys, data={"packing": True, "batch": 2, "seq": 12})
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        short.reading(short.layout())


def test_weights_are_gathered_as_the_model_computes_unless_told_otherwise(job_of: Any) -> None:
    model = {"family": "llama", "layers": 1, "dtype": "bfloat16"}
    stage = {"optimizer": {"stage": 1}}
    assert job_of(model=model, parallel=stage).step_options()["precision"] == jp.Precision(gather="bfloat16")
    told = job_of(model=model, parallel=stage, precision={"gather": "fp32"}).step_options()["precision"]
    assert told == jp.Precision(gather="float32")
    assert job_of(model=model).step_options()["precision"] == jp.Precision()


def test_precision_is_the_models_too(job_of: Any) -> None:
    job = job_of(precision="bf16")
    assert (job.model.dtype, job.model.param_dtype) == ("bfloat16", "float32")
    with pytest.raises(ConfigError) as error:
        job_of(model={"family": "llama", "dtype": "float32"}, precision="bf16")
    assert str(error.value) == (
        "model: dtype is 'float32', but precision sets compute: bfloat16. Remedy: leave model.dtype out."
    )


def test_weights_that_are_kept_are_the_models_matter(job_of: Any) -> None:
    assert job_of().model.reshard_after_forward
    assert not job_of(parallel={"reshard_after_forward": False}).model.reshard_after_forward


def test_collectives_and_the_hosts_memory_have_keys(job_of: Any) -> None:
    fusion = {"reduce": "1MiB", "scatter": [1, 2]}
    job = job_of(
        parallel={"fusion": fusion, "offload": {"optimizer": "host", "min_bytes": "1KiB"}, "reshard_after_forward": 4}
    )
    assert job.step_options()["fusion"] == jp.overlap.CollectiveFusion(reduce=1 << 20, scatter=(1, 2))
    assert job.tx.min_bytes == 1024
    assert job.model.reshard_after_forward == 4
    assert job_of().step_options()["fusion"] == jp.overlap.CollectiveFusion()


def test_parameters_wait_beside_the_optimizers_state(job_of: Any) -> None:
    assert job_of(parallel={"offload": BOTH}).tx.parameters
    assert not job_of(parallel={"offload": {"optimizer": "host"}}).tx.parameters


def test_attention_over_a_split_sequence_has_keys(job_of: Any) -> None:
    asked = {"impl": "ring", "grad_dtype": "bfloat16"}
    assert job_of(parallel={"context": asked}).model.context == jp.context.Context("ring", grad_dtype="bfloat16")
    kept = {"impl": "gather", "keep_gathered_kv": True}
    assert job_of(parallel={"context": kept}).model.context == jp.context.Context("gather", keep_gathered_kv=True)
    assert job_of().model.context == jp.context.Context()


def test_layers_go_over_stages(job_of: Any) -> None:
    keys = {"layout": str(CONFIGS / "layouts" / "pp_fsdp.yaml"), "mesh": {"pipeline": 2, "data": 4}, "model": LLAMA_16}
    asked = {
        "schedule": "interleaved",
        "microbatches": 4,
        "virtual_stages": 2,
        "activation_checkpointing": "none",
        "layers_per_stage": [5, 4, 4, 3],
    }
    job = job_of(**keys, parallel={"pipeline": asked})
    options = job.step_options()
    pipeline = options["pipeline"]
    assert (pipeline.schedule.name, pipeline.activation_checkpointing, pipeline.layers_per_stage) == (
        "interleaved",
        "none",
        (5, 4, 4, 3),
    )
    assert isinstance(job.loss_fn, jp.pipeline.PipelineLoss) and options["precision"].gather == "float32"
    assert job.eval_options() == {name: options[name] for name in ("precision", "pipeline")}
    assert job.layout(8).spec(("embed", "vocab"), (128, 256)) == jax.sharding.PartitionSpec(None, "pipeline")


def test_a_pipeline_that_is_not_emptied_has_its_name(job_of: Any) -> None:
    keys = {"layout": str(CONFIGS / "layouts" / "pp_fsdp.yaml"), "mesh": {"pipeline": 2, "data": 4}, "model": LLAMA_16}
    job = job_of(
        **keys, parallel={"pipeline": {"schedule": "pipedream_2bw", "microbatches": 4, "layers_per_stage": [9, 7]}}
    )
    pipeline = jp.pipeline.Asynchronous("pipedream_2bw", stages=2, microbatches=4, layers_per_stage=(9, 7))
    assert job.step_options()["pipeline"] == pipeline and isinstance(job.loss_fn, jp.pipeline.PipelineLoss)
    text = (
        "verify: parallel.pipeline.schedule is 'pipedream_2bw', whose gradients are computed with weights of earlier "
        "steps, so no step equals that of one device. Remedy: --set parallel.pipeline.schedule=1f1b."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        verify(job, steps=1, bound=1e-5, console=Console())
    for asked, text in (
        (
            {"virtual_stages": 2},
            "parallel.pipeline: virtual_stages is 2, but under 'pipedream' each stage has one piece of the model",
        ),
        ({"executor": "independent"}, "parallel.pipeline: executor is 'independent', but under 'pipedream' each stage"),
        (
            {"embedding": "per_microbatch"},
            (
                "parallel.pipeline: embedding is 'per_microbatch', but under 'pipedream' each stage has one piece of "
                "the model"
            ),
        ),
        (
            {"microbatches": 1},
            "parallel.pipeline: schedule 'pipedream': 1 microbatches are fewer than 2: with 2 stages",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
            job_of(**keys, parallel={"pipeline": {"schedule": "pipedream", "microbatches": 4, **asked}})


def test_eight_bits_have_keys(job_of: Any) -> None:
    assert job_of(precision="fp8").model.dtype == "bfloat16"
    told = job_of(precision={"gather": "int8", "reduce": "int8", "matmul": "fp8"}).precision
    assert (told.compute, told.gather, told.reduce, told.matmul) == (None, "int8", "int8", "fp8")


def test_what_layers_keep_is_split_over_model_unless_a_rule_says_otherwise(job_of: Any) -> None:
    remat = {"policy": "full", "slice_activation": True}
    rules = job_of(parallel={"remat": remat}).layout(16).rules
    assert rules.to_dict()["saved_embed"] == "model"
    told = job_of(parallel={"remat": remat}, rules={"saved_embed": None}).layout(16).rules
    assert told.to_dict()["saved_embed"] is None
    assert "saved_embed" not in job_of().layout(16).rules.table


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
                "parallel.pipeline: layers_per_stage is [5, 4, 4, 4], 4 numbers that sum to 17, but the model has 16 "
                "layers and the schedule 4 pieces of at least one layer each. Remedy: 4 numbers that sum to 16, such "
                "as [4, 4, 4, 4]."
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
            (
                "optimizer: adamw fails with the options {'b1': 'x'}: TypeError: unsupported operand type(s) for -: "
                "'int' and 'str'. Remedy: correct or leave out the options, or use another optimizer."
            ),
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


def test_a_group_that_does_not_divide_is_found_where_the_devices_are_known(job_of: Any) -> None:
    job = job_of(parallel={"optimizer": {"stage": 1, "fsdp_group_size": 3}})
    with pytest.raises(
        MeshError, match=r"fsdp_group_size=3 does not divide the axis data of size 16 \(on 16 devices\)"
    ):
        job.layout(16)


PIPELINES = {"1b_pp4_fsdp4": 2802, "8b_pp4_fsdp4_m8": 12937}
"""Peak memory in MiB of the program for v5e:4x4, as the compiler reports it (docs/measured/pipeline.md)."""


@pytest.mark.parametrize("name", few(sorted(file.stem for file in (CONFIGS / "bench").glob("*.yaml")), 1))
def test_every_bench_configuration_has_no_problem(name: str) -> None:
    job, devices = (
        make_job(load_run(CONFIGS / "bench" / f"{name}.yaml")),
        64 if name == "8b_1m_hybrid" or name.startswith("70b_") else 16,
    )
    report = jp.explain(
        job.layout(Topology.parse("v5e:4x4").devices if name in PIPELINES else devices),
        job.make_model,
        job.tx,
        batch=job.batch_spec(),
        loss_fn=job.loss_fn,
        step=job.step_options(),
    )
    assert report.problems == ()
    assert report.memory is not None
    assert report.memory.unknown == ()
    if name in PIPELINES:
        assert report.memory.total == pytest.approx(PIPELINES[name] * 2**20, rel=0.1)
