"""Kinds, bytes on the wire, sources and overlap of collectives, in every form that a compiler gives them."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import audit_programs as programs
import pytest
from profiles import few

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit

SOURCE = Path(programs.__file__).read_text(encoding="utf-8").splitlines()
WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")


def table(report: Audit) -> dict[str, tuple[tuple[str, ...], int, int, float]]:
    """Axes, executions, result bytes and bytes on the wire of one execution by kind, for programs with one collective
    of each kind."""
    assert len({c.kind for c in report.collectives}) == len(report.collectives)
    return {c.kind: (c.axes, c.count, c.result_bytes, c.wire_bytes) for c in report.collectives}


def by_hand(n: int) -> dict[str, tuple[tuple[str, ...], int, int, float]]:
    """The traffic of :func:`audit_programs.every_collective`: every array is [n, 256] fp32, scattered [1, 256]."""
    whole, part = n * 256 * 4, (n - 1) / n
    return {
        "reduce-scatter": (("data",), 1, whole // n, part * whole),
        "all-gather": (("data",), 1, whole, part * whole),
        "all-to-all": (("data",), 1, whole, part * whole),
        "collective-permute": (("data",), 1, whole, float(whole)),
        "all-reduce": (("data",), 1, whole, 2 * part * whole),
    }


def test_each_kind_from_a_shard_map(line_mesh, text_of):
    text = text_of(programs.every_collective(line_mesh))
    assert re.search(r"= \(f32\S+, .*\) all-to-all\(", text), "the CPU compiler makes an all-to-all of tuples"
    assert table(jp.audit(text, mesh=line_mesh)) == by_hand(8)


def test_each_kind_over_one_of_two_axes(grid_mesh):
    assert table(jp.audit(programs.every_collective(grid_mesh).compile(), mesh=grid_mesh)) == by_hand(4)


def test_each_kind_compiled_for_gpu(stored):
    assert table(stored("gpu_every_collective")) == by_hand(4)


def test_each_kind_compiled_for_tpu(stored):
    """The TPU compiler turns a small scatter into an all-reduce and a slice: the kind is a scatter, the bytes are the
    all-reduce's."""
    report, expected = stored("tpu_every_collective"), by_hand(4)
    axes, count, result, wire = expected["reduce-scatter"]
    assert table(report) == {**expected, "reduce-scatter": (axes, count, result, 2 * wire)}
    assert [c.form for c in report.select("reduce-scatter")] == ["all-reduce + slice"]


def test_each_kind_over_slices(stored, stored_text):
    """On four slices of 2 × 2 ``data`` crosses two slices. Each array is [4, 256] fp32; only the necessary bytes cross
    slices."""
    report, whole = stored("tpu_slices_every_collective"), 4 * 256 * 4
    assert {c.axes for c in report.collectives} == {("data",)}
    between = {c.kind: (c.group, c.result_bytes, c.wire_bytes) for c in report.collectives if c.between_slices}
    assert between == {
        # Between slices the scatter gets half of the array, after the scatter inside; the gather sends a quarter,
        # before the gather inside.
        "reduce-scatter": (2, whole // 4, whole / 4),
        "all-gather": (2, whole // 2, whole / 4),
        "all-reduce": (2, whole // 2, whole / 2),
        "all-to-all": (4, whole, 3 / 4 * whole),
        "collective-permute": (2, whole, whole),
    }
    inside = [c for c in report.collectives if not c.between_slices]
    assert {c.group for c in inside} == {2} and {c.between_slices for c in inside} == {False}
    assert sum(c.wire_bytes for c in inside if c.kind == "all-gather") == 2 * whole / 2
    assert not report.silent_kernels  # the kernel that returns the slice's number does not count
    # Without a mesh, all four slices are one axis.
    assert jp.audit(stored_text("tpu_slices_every_collective")).mesh == {"devices": 16}


def test_a_gather_over_slices_sends_what_any_gather_must(stored, facts):
    """FSDP over two slices of four sends one piece of a weight between slices, then three pieces of two inside a
    slice."""
    report, config = stored("tpu_slices_fsdp"), facts("tpu_slices_fsdp")["config"]
    size = 2 * config["embed"] * config["heads"] * config["head_dim"]
    for name in ("q", "k", "v"):
        same = [c for c in report.select("all-gather") if c.tensor.endswith(f"['{name}']")]
        assert sum(c.total_wire_bytes for c in same if c.between_slices) == 2 * config["layers"] * size / 8
        assert sum(c.total_wire_bytes for c in same if not c.between_slices) == 2 * config["layers"] * size * 6 / 8
        # All of the transfer between slices overlaps compute, up to its ``recv-done``.
        assert all(c.overlapped for c in same if c.between_slices)
    assert report.certain and not report.silent_kernels


def test_the_source_is_the_line_of_the_model(line_mesh):
    report = jp.audit(programs.every_collective(line_mesh).compile(), mesh=line_mesh)
    calls = {
        "all-reduce": "psum(",
        "reduce-scatter": "psum_scatter(",
        "all-gather": "all_gather(",
        "all-to-all": "all_to_all(",
        "collective-permute": "ppermute(",
    }
    for c in report.collectives:
        found = re.fullmatch(r"every_collective\.<locals>\.body \(audit_programs\.py:(\d+)\)", c.source)
        assert found, c.source
        assert calls[c.kind] in SOURCE[int(found[1]) - 1]


@pytest.mark.parametrize(
    "name", few(["tpu_fsdp", "tpu_fsdp_tp", "tpu_tp_sp", "tpu_unrolled", "gpu_fsdp", "gpu_tp_sp"], 2)
)
def test_no_source_is_a_library_or_a_verb_of_jaxpar(name, stored):
    for c in stored(name).collectives:
        assert c.source or c.op_name.startswith("state.params["), c
        assert not re.search(r"iteration\.py|graphlib\.py|_tree_math\.py|layout\.py|^hint|_constrain", c.source), c


def test_the_module_and_the_tensor_of_a_gather(stored):
    found = {c.tensor: c.module for c in stored("tpu_fsdp").select("all-gather")}
    assert found["state.params['blocks']['attention']['q']"] == "Llama/Block/Attention"
    assert found["state.params['blocks']['mlp']['down']"] == "Llama/Block/SwiGLU"
    assert len(found) == 9  # seven weights of a layer, embedding, head


def test_a_users_ring_is_no_windowed_einsum(line_mesh, stored):
    """A custom permute next to a matmul that consumes its value stays a permute."""
    shard = 64 * 128
    here = jp.audit(programs.permute_beside_a_matmul(line_mesh).compile(), mesh=line_mesh)
    for report, item in ((here, 4), (stored("tpu_permute"), 2)):  # the TPU compiler sends the weight in bf16
        assert {(c.kind, c.form, c.axes, c.wire_bytes) for c in report.collectives} == {
            ("collective-permute", "", ("data",), shard * item)
        }
        assert report.count() == 2


def test_a_roll_of_rows_is_no_windowed_einsum(line_mesh, text_of):
    text = text_of(programs.rolled(line_mesh))
    assert re.search(r"collective-permute\(.*is_spmd_generated", text)
    (permute,) = jp.audit(text, mesh=line_mesh).collectives
    assert (permute.kind, permute.axes, permute.wire_bytes) == ("collective-permute", ("data",), 8 * 32 * 4)


def test_an_all_reduce_of_which_each_device_keeps_its_slice(line_mesh):
    """The slice is found through a fusion and arithmetic; the bytes are those of the all-reduce that the program
    runs."""
    (scatter,) = jp.audit(programs.sliced_after(line_mesh, own=True).compile(), mesh=line_mesh).collectives
    whole = 64 * 32 * 4
    assert (scatter.kind, scatter.form) == ("reduce-scatter", "all-reduce + slice")
    assert (scatter.result_bytes, scatter.wire_bytes) == (whole // 8, 2 * 7 / 8 * whole)


def test_slices_that_make_no_scatter(line_mesh, grid_mesh):
    """The cases are a slice that the data select, and a slice along another axis than the sum's."""
    for lowered, mesh in (
        (programs.sliced_after(line_mesh, own=False), line_mesh),
        (programs.sliced_over_another_axis(grid_mesh), grid_mesh),
    ):
        (reduce,) = jp.audit(lowered.compile(), mesh=mesh).collectives
        assert (reduce.kind, reduce.form, reduce.axes, reduce.result_bytes) == (
            "all-reduce",
            "",
            ("data",),
            64 * 32 * 4,
        )


def rings(report: Audit) -> collections.Counter[str]:
    """The number of executions of each kind as a ring of permutes."""
    found: collections.Counter[str] = collections.Counter()
    for c in report.collectives:
        found[c.kind] += c.count if c.form.startswith("ring of") else 0
    return found


def test_windowed_einsums_in_loops(stored, facts):
    """In the forward pass the partitioner gathers seven weights of each layer in rings; in the backward pass it
    scatters their gradients."""
    report, layers = stored("tpu_fsdp"), facts("tpu_fsdp")["config"]["layers"]
    assert rings(report) == {"all-gather": 8 * layers, "reduce-scatter": 7 * layers + 1, "all-reduce": 0}
    assert {c.form for c in report.collectives if "ring" in c.form} == {"ring of 17 permutes"}
    # Each weight is gathered twice per layer, in any form; a ring of 17 sends 17/16 of it, a gather 15/16.
    config = facts("tpu_fsdp")["config"]
    for name in WEIGHTS:
        same = [c for c in report.select("all-gather") if c.tensor.endswith(f"['{name}']")]
        size = 2 * config["embed"] * (config["mlp"] if name in WEIGHTS[4:] else config["heads"] * config["head_dim"])
        assert sum(c.count for c in same) == 2 * layers
        assert {c.result_bytes for c in same} == {size}
        assert {c.wire_bytes for c in same} <= {17 / 16 * size, 15 / 16 * size}
    assert {c.result_bytes * 16 for c in report.select("reduce-scatter") if c.count == layers} == {
        2 * 512 * 1024,
        2 * 512 * 1536,
    }


def test_windowed_einsums_without_loops(stored, facts):
    """Over four devices the compiler unrolls the rings fully: n − 1 permutes to gather, and some more of zeros to
    scatter."""
    report, layers = stored("tpu_fsdp_tp"), facts("tpu_fsdp_tp")["config"]["layers"]
    gathers = [c for c in report.select("all-gather", "data") if c.form]
    assert {c.form for c in gathers} == {"ring of 3 permutes"}
    assert all(c.wire_bytes == 3 / 4 * c.result_bytes and c.group == 4 for c in gathers)
    scatters = [c for c in report.select("reduce-scatter", "data") if "ring" in c.form]
    assert sum(c.count for c in scatters) == 7 * layers + 1
    # Seven weights and the head. A scatter can share with the next one the permutes of zeros that a ring starts with.
    assert {c.form for c in scatters} == {"ring of 3 permutes", "ring of 5 permutes"}
    for name in WEIGHTS:
        same = [c for c in report.select("all-gather", "data") if c.tensor.endswith(f"['{name}']")]
        assert sum(c.count for c in same) == 2 * layers


def test_scatter_fusions(stored, stored_text):
    """Sequence parallelism scatters twice per layer in the forward pass, once recomputed, twice in the backward pass,
    and once each for lookup and head."""
    report = stored("tpu_tp_sp")
    fused = [c for c in report.select("reduce-scatter", "model") if c.form == "all-reduce in a scatter fusion"]
    assert " reduce-scatter(" not in stored_text("tpu_tp_sp")
    assert sum(c.count for c in fused) == report.count("reduce-scatter") == (2 + 1 + 2) * 3 + 2
    residual = 8 * 256 * 512 * 2
    assert {(c.result_bytes, c.wire_bytes) for c in fused} == {(residual // 4, 3 / 4 * residual)}
    assert report.wire_bytes("reduce-scatter") == 17 * 3 / 4 * residual
    assert "SwiGLU.__call__" in " ".join(c.source for c in fused)


def test_an_async_collective_counts_once_where_it_starts(stored, stored_text):
    """Sequence parallelism gathers twice per layer in the forward, recomputed and backward pass, and once each at the
    head and the lookup."""
    report = stored("tpu_tp_sp")
    assert len(re.findall(r" all-gather\(", stored_text("tpu_tp_sp"))) > len(report.select("all-gather"))
    assert report.count("all-gather", "model") == (2 + 2 + 2) * 3 + 2
    residual = 8 * 256 * 512 * 2
    assert {c.result_bytes for c in report.select("all-gather")} == {residual}
    assert report.wire_bytes("all-gather") == 20 * 3 / 4 * residual


def test_unrelated_collectives_that_share_a_channel_all_count(stored, stored_text, facts):
    """Collectives in a shard_map get equal channels: one that overlaps compute must not hide another."""
    known, text = facts("tpu_gathered_by_hand"), stored_text("tpu_gathered_by_hand")
    channels = re.findall(r" all-gather\(.*?channel_id=(\d+).*?(chain_id)?", text)
    assert len({c for c, _ in channels}) < len(channels)
    report = stored("tpu_gathered_by_hand")
    equal = jp.audit(re.sub(r"channel_id=\d+", "channel_id=1", text), mesh=known["mesh"])
    assert equal.collectives == report.collectives
    assert report.count("all-gather", "data") == 2 * 2 * known["layers"]
    weight = 2 * known["embed"] * known["mlp"]
    assert report.wire_bytes("all-gather") == 2 * 2 * known["layers"] * 15 / 16 * weight
    assert collections.Counter({c.tensor: c.count for c in report.select("all-gather")}).keys() == {"up", "down"}
    # The transposed gather is a scatter; this compiler all-reduces full gradients and slices them.
    assert report.wire_bytes("reduce-scatter") == 2 * known["layers"] * 2 * 15 / 16 * weight


def test_overlap_of_async_fusions(stored):
    """A collective that fusions repeat next to matmuls is overlapped; a plain all-gather or scatter fusion is not."""
    report = stored("tpu_tp_sp")
    assert 0 < report.exposed("all-gather") < report.wire_bytes("all-gather")
    assert report.exposed("reduce-scatter") == report.wire_bytes("reduce-scatter")
    overlapped = [c for c in report.collectives if c.overlapped and c.kind == "all-gather"]
    assert overlapped and all(c.beside_flops > 0 for c in overlapped)


def test_overlap_of_async_starts(stored, stored_text):
    """A matmul stands between a start and its end exactly where the audit reports overlap."""
    text = stored_text("gpu_tp_sp")
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    for name, kind, start in re.findall(r"%(\S+) = .* (all-gather|all-reduce|reduce-scatter)(-start)?\(", text):
        between = text[text.index(f"%{name} = ") : text.index(f"-done(%{name})")] if start else ""
        found[kind, "\n  %gemm_fusion" in between[: between.rfind("\n")]] += 1
    report = stored("gpu_tp_sp")
    assert collections.Counter((c.kind, c.beside_flops > 0) for c in report.collectives) == found
    (beside,) = (c for c in report.collectives if c.beside_flops)
    # The gradient of the residual stream is gathered during the weight gradient of the head: tokens × embed × vocab.
    assert beside.kind == "all-gather" and beside.beside_flops == 2 * (32 * 256 // 4) * 512 * 2048 // 2


def test_overlap_in_loops(stored):
    """The loop of a windowed einsum multiplies one shard during the transfer of the next."""
    rings_in_loops = [c for c in stored("tpu_fsdp").collectives if c.form == "ring of 17 permutes"]
    assert all(c.exposed_bytes < c.wire_bytes / 2 and c.beside_flops > 0 for c in rings_in_loops)


@pytest.mark.parametrize("name", ["here", "tpu_branches", "gpu_branches"])
def test_a_conditional_counts_with_its_worst_arm(name, stored, line_mesh):
    report = jp.audit(programs.branches(line_mesh).compile(), mesh=line_mesh) if name == "here" else stored(name)
    n, array = (8 if name == "here" else 4), 64 * 32 * 4
    assert [(c.kind, c.conditional, c.wire_bytes) for c in report.collectives] == [
        ("all-reduce", True, 2 * (n - 1) / n * array)
    ]
    assert [(c.kind, c.conditional, c.wire_bytes) for c in report.other_arms] == [("collective-permute", True, array)]
    assert report.matmul_flops == 2 * 64 * 32 * 32
    assert "in a branch" in str(report)
    assert (
        f"; other arms of branches, not counted, send {array // 1024}.00 KiB (f32 {array // 1024}.00 KiB)"
        in report.headline()
    )
    other = report.through_other_arms()
    assert (other.collectives, other.other_arms) == (report.other_arms, report.collectives)
    assert other.wire_bytes() == array


SPARSECORE = """HloModule offloaded, is_scheduled=true, num_partitions=8

%called (p: f32[4]) -> f32[32] {
  %p = f32[4]{0} parameter(0)
  ROOT %gathered = f32[32]{0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, \
use_global_device_ids=true
}

ENTRY %main (x: f32[4]) -> f32[32] {
  %x = f32[4]{0} parameter(0)
  %start = s32[1]{0:S(2)} call-start(), async_execution_thread="sparsecore", to_apply=%called
  ROOT %done = f32[32]{0} call-done(%start)
}
"""


def test_a_collective_on_the_sparsecore_has_no_operands_but_counts():
    report = jp.audit(SPARSECORE)
    assert [c.kind for c in report.collectives] == ["all-gather"] and report.certain
    assert report.wire_bytes() == 7 / 8 * 32 * 4


def updated(*beside: str) -> str:
    """The same gather, which an update gives its operand; the instructions are before the update, or beside it."""
    square = "f32[64,64]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    compute = {name: f"  %{name} = {square}\n" if name in beside else "" for name in ("before", "within")}
    return (
        SPARSECORE.replace("(x: f32[4])", "(x: f32[4], m: f32[64,64])")
        .replace("  %start", "  %m = f32[64,64]{1,0} parameter(1)\n  %start")
        .replace(
            "  ROOT %done = f32[32]{0} call-done(%start)\n",
            f"{compute['before']}  %update = (f32[4]{{0}}, f32[32]{{0}}) call-update(%start, %x)\n{compute['within']}"
            "  %done = f32[32]{0} call-done(%update)\n"
            "  %last = f32[64,64]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
            "  ROOT %both = (f32[32]{0}, f32[64,64]{1,0}) tuple(%done, %last)\n",
        )
    )


def test_a_collective_on_the_sparsecore_is_in_flight_from_its_update() -> None:
    square, gather = 3 * 4 * 64 * 64, 4 * (4 + 32)
    for beside, flops in (((), 0), (("before",), 0), (("within",), 2 * 64**3)):
        report = jp.audit(updated(*beside))
        (found,) = report.collectives
        assert found.beside_flops == flops and found.exposed_bytes == (0 if flops else found.wire_bytes)
        assert report.hbm_bytes == gather + square * (1 + len(beside))


SHIFT = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
BOTH_WAYS = f"""HloModule ring, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %up = (f32[4]{{0}}, f32[4]{{0}}, u32[], u32[]) collective-permute-start(%x), {SHIFT}
  %down = (f32[4]{{0}}, f32[4]{{0}}, u32[], u32[]) collective-permute-start(%x), channel_id=2, \
source_target_pairs={{{{1,0}},{{5,4}}}}
  %a = f32[4]{{0}} collective-permute-done(%up)
  %b = f32[4]{{0}} collective-permute-done(%down)
  %on = (f32[4]{{0}}, f32[4]{{0}}, u32[], u32[]) collective-permute-start(%a), {SHIFT}
  ROOT %c = f32[4]{{0}} collective-permute-done(%on)
}}
"""


def test_permutes_say_who_sends_to_whom_and_which_are_on_their_way_together() -> None:
    up, down, on = jp.audit(BOTH_WAYS, mesh={"data": 2, "model": 4}).collectives
    assert up.pairs == on.pairs == ((0, 1), (1, 2), (2, 3), (3, 0)) and down.pairs == ((1, 0),)
    assert up.flight is not None and up.flight == down.flight != on.flight
