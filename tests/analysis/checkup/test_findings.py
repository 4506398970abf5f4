"""Each kind of finding: its cause, its text, its remedy, and cases that must not raise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from by_hand import audited, collective
from stored import held

from jaxpar.analysis.checkup.findings import About, Evidence, Finding, find
from jaxpar.analysis.checkup.footprint import CATEGORIES, Footprint, HeldTensor
from jaxpar.analysis.compile.warnings import Rematerialised
from jaxpar.analysis.hlo.liveness import Buffer
from jaxpar.analysis.roofline import roofline, time_each
from jaxpar.parallel.partitioner.faults import GROUPS
from jaxpar.parallel.partitioner.repair import Repaired

MESH = {"data": 4, "model": 4}
GIB = 2**30
BATCH = held("batch/tokens", (32, 128), (("data",), ()), 4096, category="batch", dims=())
WEIGHT = held("params/up", (512, 256), (("data",), ("model",)), 32_768)


def evidence(*collectives: Any, given: Sequence[HeldTensor] = (BATCH, WEIGHT), **fields: Any) -> Evidence:
    report = audited(MESH, *collectives, matmul_flops=197 * 10**9)
    memory = Footprint(dict.fromkeys(CATEGORIES, 0), 8 * GIB, 0, 0, 16 * GIB, ())
    plain = {"audit": report, "roofline": roofline(report, "v5e:4x4"), "times": time_each(report, "v5e:4x4")}
    return Evidence(**{**plain, "memory": memory, "held": given, **fields})


def only(e: Evidence) -> Finding:
    (found,) = find(e)
    return found


def buffers(*found: Buffer) -> Footprint:
    return Footprint(dict.fromkeys(CATEGORIES, 0), 8 * GIB, 0, 0, 16 * GIB, tuple(("temporaries", b) for b in found))


def test_a_program_without_faults_has_no_findings() -> None:
    hidden = collective("all-gather", ("data",), 1e6, exposed_bytes=0.0, beside_flops=197 * 10**9)
    assert find(evidence(hidden)) == ()


def test_a_gather_of_weights_with_nothing_beside_it() -> None:
    found = only(evidence(collective("all-gather", ("data",), 50e6, tensor="params/up", source="f (m.py:3)", count=2)))
    # On v5e:4x4 an axis of 4 is a line with one link, 50 GB/s.
    assert found.kind == "exposed" and found.seconds == pytest.approx(2e-3) and found.bytes == 100e6
    assert found.text == (
        "2 ms of the step (66.7%) are exposed transfers over data, mostly with no overlapping compute: 2 × "
        "all-gather, 95.37 MiB on the wire"
    )
    assert found.where == "f (m.py:3): params/up" and found.share == pytest.approx(2 / 3)
    assert found.remedy == (
        "data shards parameters that are gathered for use: increase the tokens per device to overlap the gathers "
        "with more compute (data.batch), make data smaller, or, if memory allows, remove it from the rules of "
        "params."
    )


@pytest.mark.parametrize(
    ("chips", "options"),
    [
        ("v6e:4x4", "{PREFIX}all_gather: true"),
        ("v5p:2x2x4", "{PREFIX}all_gather: true, {PREFIX}2d_all_gather: true, {PREFIX}3d_all_gather: true"),
    ],
)
def test_a_gather_that_the_compiler_leaves_alone_unless_told(chips: str, options: str) -> None:
    plain = evidence(collective("all-gather", ("data",), 50e6, tensor="params/up", source="f (m.py:3)"))
    found = only(replace(plain, roofline=roofline(plain.audit, chips), times=time_each(plain.audit, chips)))
    named = options.replace("{PREFIX}", "xla_tpu_enable_sparse_core_collective_offload_")
    assert found.remedy == (
        "data shards parameters that are gathered for use, and this compiler runs gathers beside compute only if it "
        f"is told to: compiler: {{tpu: {{{named}}}}}."
    )


def test_transfers_that_outlast_what_is_beside_them() -> None:
    short = collective("reduce-scatter", ("data",), 50e6, exposed_bytes=0.0, beside_flops=197 * 10**8)
    found = only(evidence(short))
    assert "mostly longer than the compute they overlap with: 1 × reduce-scatter" in found.text
    assert found.seconds == pytest.approx(0.9e-3)
    assert (
        found.remedy
        == "increase the tokens per device to overlap it with more compute (data.batch), or make data smaller."
    )


@pytest.mark.parametrize(
    ("kind", "axes", "op_name", "advice"),
    [
        ("all-gather", ("model",), "", "model shards matmuls and not the batch"),
        ("reduce-scatter", ("model",), "", "make model smaller (mesh.model) and give its devices to data."),
        (
            "all-reduce",
            ("model",),
            "jit(step)/jvp()/dot",
            "shard its result over model too (as residual_seq: model does)",
        ),
        ("all-reduce", ("data",), "jit(step)/transpose(jvp())/dot", "shard its parameter over data (rules: params)"),
        ("all-gather", ("data", "model"), "", "the value is needed replicated over data+model at this line"),
        ("all-to-all", ("data",), "", "the shardings before and after this line differ over data"),
        ("collective-permute", ("data",), "", "the shardings before and after this line differ over data"),
    ],
)
def test_the_advice_fits_the_kind_and_the_axes(kind: str, axes: tuple[str, ...], op_name: str, advice: str) -> None:
    assert advice in only(evidence(collective(kind, axes, 50e6, op_name=op_name))).remedy


def test_the_advice_for_an_exchange_of_rows_by_expert() -> None:
    found = only(evidence(collective("all-to-all", ("data",), 50e6, form="ragged")))
    assert found.remedy == (
        "rows travel over data to the devices of their experts and back: make data smaller (mesh.data), so that a "
        "device has more of the experts."
    )


def test_transfers_with_one_remedy_are_one_finding() -> None:
    several = [collective("all-gather", ("model",), 50e6, source=f"f{i} (m.py:{i})") for i in range(5)]
    assert only(evidence(*several)).where == "f0 (m.py:0), f1 (m.py:1), f2 (m.py:2), and 2 more"


def test_an_all_reduce_where_a_scatter_would_do() -> None:
    c = collective("reduce-scatter", ("data",), 100e6, form="all-reduce + slice", source="g (m.py:4)")
    found = next(f for f in find(evidence(c)) if f.kind == "all-reduce for a scatter")
    assert found.text == (
        "1 × all-reduce over data of which each device keeps a slice: twice the bytes of a reduce-scatter, 47.68 "
        "MiB wasted (1 ms of the step)"
    )
    assert found.where == "g (m.py:4)" and found.remedy.startswith(
        "annotate the value over data directly after it is summed"
    )
    fused = collective("reduce-scatter", ("data",), 100e6, form="all-reduce in a scatter fusion")
    assert {f.kind for f in find(evidence(fused))} == {"exposed"}


def test_a_ring_that_sends_more_than_it_needs() -> None:
    ring = {"group": 4, "result_bytes": 10_000_000, "exposed_bytes": 0.0}
    long = collective("reduce-scatter", ("data",), 50e6, form="ring of 5 permutes", **ring)
    found = only(evidence(long))
    assert found.kind == "long ring" and found.bytes == pytest.approx(20e6) and found.seconds == pytest.approx(0.4e-3)
    assert found.text == (
        "1 × reduce-scatter over data as rings that send more than they need (a ring of 5 permutes among 4 devices): "
        "19.07 MiB too much, 400 µs on the links"
    )
    assert "xla_tpu_enable_windowed_einsum_for_reduce_scatter: false" in found.remedy
    exact = collective("reduce-scatter", ("data",), 30e6, form="ring of 3 permutes", **ring)
    assert find(evidence(exact)) == ()


def test_a_tensor_that_the_compiler_makes_whole() -> None:
    warning = Rematerialised("f32[64,64]", 16_384, "data, ·", "·, model+data", "jit(step)/constraint", "h (m.py:5)")
    found = only(evidence(warnings=[warning]))  # reported whatever its size
    assert (found.kind, found.where) == ("involuntary rematerialisation", "h (m.py:5)")
    assert found.text == (
        "the compiler replicates f32[64,64] on every device (16.00 KiB) to reshard it from [data, ·] to [·, model+data]"
    )
    assert found.remedy.startswith("the two annotations order or split the axes of a dim differently: make them equal")
    gather = collective("all-gather", ("data",), 50e6, op_name="jit(step)/constraint")
    timed = next(f for f in find(evidence(gather, warnings=[warning])) if f.kind != "exposed")
    assert "(16.00 KiB, 1 ms of the step)" in timed.text and timed.share == pytest.approx(0.5)


def buffer(shape: str, size: int, **fields: Any) -> Buffer:
    return Buffer(size, shape, "loss (m.py:6)", fields.pop("op_name", "jit(step)/jvp()/dot"), "", False)


HEAD = held("params/head", (512, 32_000), (("data",), ("model",)), 512 * 32_000 // 16 * 4)


@pytest.mark.parametrize("shape", ["f32[8,128,32000]", "bf16[8,128,8000]", "f32[1024,8000]"])
def test_logits_among_the_largest(shape: str) -> None:
    e = evidence(given=(HEAD,), memory=buffers(buffer(shape, GIB)), about=About(vocab=32_000, seq=128))
    found = only(e)
    assert (
        found.text == f"1.00 GiB of the peak (6.2% of the memory) are logits: {shape}"
        and found.where == "loss (m.py:6)"
    )
    assert found.remedy.startswith("shard the vocabulary over a larger axis (vocab: model)")


@pytest.mark.parametrize("shape", ["f32[512,8000]", "bf16[128,32000]", "f32[8,128,512]", "f32[32000]"])
def test_a_table_is_no_logits(shape: str) -> None:
    assert find(evidence(given=(HEAD,), memory=buffers(buffer(shape, GIB)), about=About(vocab=32_000, seq=128))) == ()


def test_attention_scores_among_the_largest() -> None:
    e = evidence(given=(HEAD,), memory=buffers(buffer("f32[8,4,2048,2048]", GIB)), about=About(vocab=32_000, seq=2048))
    found = only(e)
    assert found.kind == "attention scores" and found.remedy.startswith("use blockwise attention")
    # Where the sequence is as long as the model is wide, the shape alone does not identify scores.
    wide = held("params/up", (2048, 512), ((), ()), 1)
    square = buffer("f32[4,2048,2048]", GIB)
    assert not [
        f
        for f in find(evidence(given=(wide,), memory=buffers(square), about=About(seq=2048)))
        if f.kind != "replicated"
    ]
    named = buffer("f32[4,2048,2048]", GIB, op_name="jit(step)/BTNH,BSNH->BNTS/dot_general")
    assert only(evidence(given=(wide,), memory=buffers(named), about=About(seq=2048))).kind == "attention scores"


def test_a_tensor_that_lies_whole_on_every_device() -> None:
    whole = held("params/up", (4096, 65_536), ((), ()), GIB, copies=16)
    found = only(evidence(given=(BATCH, whole)))
    assert found.text == "params/up [4096, 65536] is replicated on all 16 devices, 1.00 GiB"
    assert found.remedy == "add a rule for one of its dims: rules: {params: {embed: data}}. Saves 768.00 MiB."
    odd = held("opt_state/mu/up", (4095, 65_537), ((), ()), GIB, copies=16, category="optimizer")
    assert (
        only(evidence(given=(odd,))).remedy
        == "none of its dims is divisible by data=4: use another axis or another size."
    )
    assert find(evidence(given=(held("params/scale", (512,), ((),), 2048, copies=16),))) == ()


def test_what_does_not_fit_comes_first_and_names_the_knob() -> None:
    sums = {**dict.fromkeys(CATEGORIES, 0), "activations": 18 * GIB}
    memory = Footprint(sums, 20 * GIB, 2 * GIB, 0, 16 * GIB, ())
    first, second = find(evidence(collective("all-gather", ("data",), 500e6), memory=memory, about=About(remat="none")))
    assert (first.kind, second.kind) == ("does not fit", "exposed")
    assert first.text == (
        "20.00 GiB at the peak, 4.00 GiB more than a device has (16.00 GiB); 18.00 GiB of it is activations"
    )
    assert first.remedy == (
        "recompute activations (model.remat=full, now none); shard the sequence over an axis (residual_seq: "
        "model), or reduce data.batch."
    )


def test_a_ring_of_permutes_over_an_open_line() -> None:
    ways = [tuple((i, (i + step) % 4) for i in range(4)) for step in (1, -1)]
    hops = [
        collective("collective-permute", ("model",), 50e6, exposed_bytes=0.0, beside_flops=197 * 10**8, pairs=pairs)
        for pairs in ways
    ]
    (found,) = (f for f in find(evidence(*hops)) if f.kind == "open line")
    # Each hop takes 1 ms and outlasts the compute beside it by 0.9 ms; a line runs both over the same links.
    assert found.seconds == pytest.approx(0.9e-3) and found.share == pytest.approx(0.9 / 2.8)
    assert (found.where, found.bytes) == ("model", 100e6)
    assert found.text == (
        "the 4 devices of model are an open line of chips, and permutes over it share links in both directions: in a "
        "closed ring the step would take 1.9 ms instead of 2.8 ms"
    )
    assert found.remedy == "place them on a block of chips: rings: [model] beside mesh."
    assert not [f for f in find(evidence(*hops, rings=("model",))) if f.kind == "open line"]
    over_data = [replace(hop, axes=("data",)) for hop in hops]  # between full rows, which leave it no block
    assert not [f for f in find(evidence(*over_data)) if f.kind == "open line"]


def test_what_xla_would_compute_wrongly_is_a_finding_of_any_size() -> None:
    shapes = ((4, 8, 8, 4), (4, 8, 8, 4))
    one = lambda line: Repaired(
        f"Block.__call__ (model.py:{line})", shapes, GROUPS, ("data",), "runs it slice by slice"
    )
    assert str(only(evidence(repaired=(one(7), one(9))))) == (
        f"wrong in XLA: {GROUPS.name}: {GROUPS.what} if {GROUPS.when}. The step runs it slice by slice, and is right\n"
        f"  from {one(7)}; {one(9)}\n"
        "  Remedy: shard the batch over all axes; in a program of your own, call "
        "jp.testing.assert_matches_single_device"
    )
