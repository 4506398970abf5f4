"""The compute and communication of one tiny Llama in each layout of ``configs/layouts``, by hand."""

from __future__ import annotations

import math
from functools import cache

import audit_programs as programs
import jax
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.models.llama import LlamaConfig

CONFIG = LlamaConfig(vocab=208, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=96)
BATCH, SEQ = 8, 32
MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 8},
    "hsdp": {"replica": 2, "data": 4},
    "tp": {"data": 4, "model": 2},
    "tp_sp": {"data": 4, "model": 2},
    "fsdp_tp": {"data": 4, "model": 2},
}
NORMS = (2 * CONFIG.layers + 1) * CONFIG.embed
HEAD = CONFIG.vocab * CONFIG.embed
BLOCKS = CONFIG.params - NORMS - 2 * HEAD
# A device has fewer tokens than the table has words, so the program gathers tokens and exchanges rows instead of the
# table.
TOKENS = BATCH * SEQ


@cache
def audited(name: str) -> Audit:
    devices = jax.devices() if name != "one device" else jax.devices()[:1]
    layout = programs.layout_on(name if name in MESHES else "dp", devices, **MESHES.get(name, {}))
    return jp.audit(programs.llama_step(layout, CONFIG, BATCH, SEQ).compile(), mesh=layout.mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(MESHES, 1))
def test_the_devices_of_a_layout_share_the_flops_of_one_device(name):
    devices = math.prod(MESHES[name].values())
    assert audited(name).matmul_flops * devices == pytest.approx(audited("one device").matmul_flops, rel=5e-5)
    assert audited(name).certain
    # The mesh also has jaxpar's axes of size 1; no collective runs over them.
    assert {axis for c in audited(name).collectives for axis in c.axes} <= set(MESHES[name])


def test_data_parallelism_reduces_each_gradient_once():
    report = audited("dp")
    loss = 1
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    assert report.wire_bytes("all-reduce", "data") == 2 * 7 / 8 * 4 * (CONFIG.params + loss)


@pytest.mark.slow
def test_fully_sharded_gathers_each_layer_twice_and_scatters_it_once():
    report = audited("fsdp")
    assert report.wire_bytes("all-gather", "data") == 7 / 8 * 4 * (2 * BLOCKS + HEAD + TOKENS)
    assert report.wire_bytes("all-to-all", "data") == 7 / 8 * 4 * 2 * TOKENS / 8 * CONFIG.embed
    # The CPU compiler has no reduce-scatter: it all-reduces a gradient and keeps a slice.
    scatters = report.select("reduce-scatter", "data")
    assert {c.form for c in scatters} == {"all-reduce + slice"}
    assert sum(c.result_bytes * c.count for c in scatters) == 4 * (BLOCKS + HEAD) / 8
    assert report.wire_bytes("reduce-scatter", "data") == 2 * 7 / 8 * 4 * (BLOCKS + HEAD)
    # Norms are not sharded. The loss, and the norms of the nine sharded gradients, are scalars.
    assert report.wire_bytes("all-reduce", "data") == 2 * 7 / 8 * 4 * (NORMS + 1 + 9)


@pytest.mark.slow
def test_hybrid_sharding_gathers_within_a_group_only():
    report = audited("hsdp")
    assert {c.axes for c in report.select("all-gather")} == {("data",)}
    assert report.wire_bytes("all-gather", "data") == 3 / 4 * 4 * (2 * BLOCKS + HEAD + TOKENS / 2)
    assert {c.kind for c in report.collectives if c.axes == ("replica", "data")} == {"all-reduce"}
    # Only the shards that the scatter within a group leaves cross groups.
    between = [c for c in report.select("all-reduce", "replica") if c.axes == ("replica",)]
    assert sum(c.result_bytes * c.count for c in between) == 4 * (BLOCKS + 2 * HEAD) / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["tp", "tp_sp", "fsdp_tp"], 2))
def test_tensor_parallelism_never_gathers_logits(name):
    logits = BATCH // 4 * SEQ * CONFIG.vocab * 4
    over_model = audited(name).select(axis="model")
    assert over_model and max(c.result_bytes / c.arrays for c in over_model) < logits / 2
    residual = BATCH // 4 * SEQ * CONFIG.embed * 4
    gathered = {c.result_bytes for c in audited(name).select("all-gather", "model")}
    assert gathered == ({residual} if name == "tp_sp" else set())


@pytest.mark.slow
def test_fully_sharded_tensor_parallelism_gathers_half_of_each_weight():
    assert audited("fsdp_tp").wire_bytes("all-gather", "data") == 3 / 4 * 4 * (BLOCKS + HEAD / 2 + TOKENS)
