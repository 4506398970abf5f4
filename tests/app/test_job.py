"""Tests how the keys of a run become a layout, an optimizer and the options of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from error_texts import raises
from rich.console import Console
from run_keys import BOTH, CONFIGS, LLAMA_16

import jaxpar as jp
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job
from jaxpar.app.train.verify import verify
from jaxpar.data import eval_batches
from jaxpar.errors import ConfigError, MeshError
from jaxpar.sharding.hardware.topology import Topology


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
    with raises(MeshError, "2,097,152 devices"):
        job.abstract_devices()
    with raises(MeshError, "layout", "1,000,000,000,000"):
        job_of().layout(10**12)


@pytest.mark.parametrize(
    "text", ["hunter2", "- hunter2", "a: *hunter2", "a: !!bool hunter2", "a: hunter2\nb: 2024-13-45", "key: hunter2"]
)
def test_no_error_shows_what_stands_in_a_file_that_is_no_layout(text: str, job_of: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text)
    with raises(ConfigError, "/secret") as error:
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
    with raises(ConfigError, "parallel.context", "data.seq"):
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
    with raises(ConfigError, "model: dtype", "dtype is 'float32'"):
        job_of(model={"family": "llama", "dtype": "float32"}, precision="bf16")


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
    with raises(ConfigError, "verify: parallel.pipeline.schedule"):
        verify(job, steps=1, bound=1e-5, console=Console())
    for asked, name in (
        ({"virtual_stages": 2}, "virtual_stages"),
        ({"executor": "independent"}, "executor"),
        ({"embedding": "per_microbatch"}, "embedding"),
        ({"microbatches": 1}, "1 microbatches"),
    ):
        with raises(ConfigError, "parallel.pipeline", name):
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


def test_a_group_that_does_not_divide_is_found_where_the_devices_are_known(job_of: Any) -> None:
    job = job_of(parallel={"optimizer": {"stage": 1, "fsdp_group_size": 3}})
    with raises(MeshError, "fsdp_group_size=3", "size 16"):
        job.layout(16)


PIPELINES = {"1b_pp4_fsdp4": 2802, "8b_pp4_fsdp4_m8": 12937}
"""Peak memory in MiB of the program for v5e:4x4, as the compiler reports it (docs/measured/pipeline.md)."""


BENCH = sorted(file.stem for file in (CONFIGS / "bench").glob("*.yaml"))
TRACED = (*PIPELINES, "1b_fsdp16", *("1b_cp4_hybrid", "1b_fsdp16_int8", "1b_hsdp4x4_sharded", "70b_tp64_3d"))
TRACED += ("8b_1m_hybrid", "8b_fsdp4_tp4_matmuls", "ds_ep4_matmuls", "mix_ep4_capacity", "mix_ep8", "1b_fsdp16_offload")
"""One of each kind of step; a trace takes seconds."""


def devices_of(name: str) -> int:
    return 64 if name == "8b_1m_hybrid" or name.startswith("70b_") else 16


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*BENCH} - {*TRACED}))
def test_every_bench_configuration_fits_its_layout(name: str) -> None:
    job = make_job(load_run(CONFIGS / "bench" / f"{name}.yaml"))
    job.step_options()
    report = jp.explain(job.layout(devices_of(name)), job.make_model, job.tx, batch=job.batch_spec())
    assert report.problems == ()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "1b_fsdp16" else pytest.mark.slow) for name in TRACED]
)
def test_a_bench_configuration_of_each_kind_has_no_problem(name: str) -> None:
    job = make_job(load_run(CONFIGS / "bench" / f"{name}.yaml"))
    report = jp.explain(
        job.layout(Topology.parse("v5e:4x4").devices if name in PIPELINES else devices_of(name)),
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
