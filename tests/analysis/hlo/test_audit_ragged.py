"""Ragged exchanges and grouped matmuls against formulas by hand: balanced, imbalanced and worst routing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective
from jaxpar.errors import AuditError

PROGRAMS = ("tpu_experts", "gpu_experts")
EXCHANGES = 6
"""Of one layer: two of the forward pass, as many of the recomputed layer, and as many gradients."""

GROUPED = 8
"""Grouped matmuls of one layer: two of the forward pass, two recomputed, and two gradients of each."""

GROUP = 4


@pytest.fixture(scope="module")
def audited(stored_text: Callable[[str], str], facts: Callable[[str], dict[str, Any]]) -> Callable[..., Audit]:
    """``audited(name, stated=True, imbalance=1.0)``: the audit of a fixture, on request without its expected rows."""

    def of(name: str, *, stated: bool = True, imbalance: float = 1.0) -> Audit:
        text = stored_text(name) if stated else re.sub(r"expected_rows_\d+", "experts", stored_text(name))
        return jp.audit(text, mesh=facts(name)["mesh"], imbalance=imbalance)

    return of


def exchanges(report: Audit) -> list[Collective]:
    return [c for c in report.select("all-to-all", "data") if c.form == "ragged"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("stated", [True, False])
def test_an_exchange_sends_the_balanced_rows_and_at_worst_its_buffers(name, stated, audited, facts):
    known, found = facts(name), exchanges(audited(name, stated=stated))
    row = known["embed"] * 2
    assert sum(c.count for c in found) == EXCHANGES * known["layers"]
    rows = known["stated"] if stated else known["tokens"]
    assert {c.wire_bytes for c in found} == {rows * row * (GROUP - 1) / GROUP}
    # A device sends all of its rows away, and one device receives a full buffer.
    assert {c.worst_wire_bytes for c in found} == {known["buffer"] * row}
    assert {c.result_bytes for c in found} == {known["buffer"] * row, known["tokens"] * row}
    assert {(c.axes, c.group, c.dtype, c.arrays) for c in found} == {(("data",), GROUP, "bf16", 1)}


def test_exchanges_that_the_compiler_starts_early_are_found(stored_text, audited):
    forms = re.findall(r" (ragged-all-to-all(?:-start)?)\(", stored_text("tpu_experts"))
    assert set(forms) == {"ragged-all-to-all", "ragged-all-to-all-start"} and len(forms) == EXCHANGES
    assert {c.overlapped for c in exchanges(audited("tpu_experts"))} == {True, False}


# The form that the compiler for GPUs gives an exchange that it starts early.
_ASYNCHRONOUS = """HloModule early, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[256,64], out: bf16[512,64], n: s64[8], a: f32[64,64]) -> (bf16[512,64], f32[64,64]) {
  %x = bf16[256,64]{1,0} parameter(0)
  %out = bf16[512,64]{1,0:S(7)} parameter(1)
  %n = s64[8]{0} parameter(2)
  %a = f32[64,64]{1,0} parameter(3)
  %begin = ((bf16[256,64]{1,0}, bf16[512,64]{1,0:S(7)}, s64[8]{0}, s64[8]{0}, s64[8]{0}, /*index=5*/s64[8]{0}), \
bf16[512,64]{1,0:S(7)}) ragged-all-to-all-start(%x, %out, %n, %n, %n, /*index=5*/%n), replica_groups=[2,4]<=[8]
  %product = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %end = bf16[512,64]{1,0:S(7)} ragged-all-to-all-done(%begin)
  ROOT %both = (bf16[512,64]{1,0:S(7)}, f32[64,64]{1,0}) tuple(%end, %product)
}
"""


def test_an_exchange_that_a_gpu_starts_early_overlaps_with_what_follows():
    report = jp.audit(_ASYNCHRONOUS, mesh={"data": 2, "model": 4})
    (found,) = report.collectives
    assert (found.axes, found.wire_bytes, found.worst_wire_bytes) == (("model",), 256 * 128 * 3 / 4, 512 * 128)
    assert found.overlapped and found.beside_flops == 2 * 64**3
    assert report.hbm_bytes == 2 * 256 * 128 + 3 * 64 * 64 * 4


def test_the_compiler_for_gpus_drops_the_names_of_exchanges(stored_text):
    """The audit therefore uses the only number of rows that the computation around an exchange states."""
    lines = re.findall(r"^.* ragged-all-to-all(?:-start)?\(.*$", stored_text("gpu_experts"), re.MULTILINE)
    assert len(lines) == EXCHANGES and not any("op_name" in line for line in lines)


@pytest.mark.parametrize("stated", [True, False])
def test_grouped_matmuls_count_the_balanced_rows_and_at_worst_their_buffers(stated, audited, stored_text, facts):
    known, report = facts("tpu_experts"), audited("tpu_experts", stated=stated)
    assert len(re.findall("ragged_dot_tiling", stored_text("tpu_experts"))) == GROUPED
    of_a_row = GROUPED * known["layers"] * 2 * known["embed"] * known["mlp"]
    rows = known["stated"] if stated else known["buffer"]
    assert report.grouped_flops == report.matmul_flops == of_a_row * rows
    assert report.worst_grouped_flops == report.worst_matmul_flops == of_a_row * known["buffer"]
    assert report.kernel_flops == 0 and not report.silent_kernels


def test_a_gpu_multiplies_every_row_with_every_expert(audited, facts):
    known, report = facts("gpu_experts"), audited("gpu_experts")
    experts = known["experts"] // GROUP
    dense = GROUPED * known["layers"] * 2 * known["embed"] * known["mlp"] * known["buffer"] * experts
    assert report.matmul_flops == report.worst_matmul_flops == dense and report.grouped_flops == 0


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 2.0, 2.625, 3.0, 100.0, math.inf])
def test_the_busiest_device_has_as_much_more_until_its_buffers_are_full(imbalance, audited, facts):
    known, report = facts("tpu_experts"), audited("tpu_experts", imbalance=imbalance)
    rows = min(known["stated"] * imbalance, known["buffer"])
    assert report.matmul_flops == round(GROUPED * known["layers"] * 2 * known["embed"] * known["mlp"] * rows)
    row = known["embed"] * 2
    sent = min(known["stated"] * imbalance * row * (GROUP - 1) / GROUP, known["buffer"] * row)
    assert {c.wire_bytes for c in exchanges(report)} == {sent}
    balanced = audited("tpu_experts")
    assert report.worst_wire_bytes() == balanced.worst_wire_bytes()
    assert report.worst_matmul_flops == balanced.worst_matmul_flops
    others = report.wire_bytes() - sum(c.total_wire_bytes for c in exchanges(report))
    assert others == balanced.wire_bytes() - sum(c.total_wire_bytes for c in exchanges(balanced))


_MATMUL = """HloModule grouped, is_scheduled=true

ENTRY %main (sizes: s32[4], x: bf16[512,256], w: bf16[4,256,384]) -> bf16[512,384] {
  %sizes = s32[4]{0} parameter(0)
  %x = bf16[512,256]{1,0} parameter(1)
  %w = bf16[4,256,384]{2,1,0} parameter(2)
  ROOT %out = bf16[512,384]{1,0} custom-call(%sizes, %x, %w), custom_call_target="tpu_custom_call", \
frontend_attributes={ragged_dot_tiling="128,256,384"}, metadata={op_name="expected_rows_128/ragged-dot-none"}
}
"""


def test_a_grouped_matmul_reads_all_weights_once_and_the_rows_in_use():
    row, weights = 2 * (256 + 384), 2 * 4 * 256 * 384
    assert jp.audit(_MATMUL).hbm_bytes == weights + 128 * row
    assert jp.audit(_MATMUL, imbalance=2).hbm_bytes == weights + 256 * row
    assert jp.audit(_MATMUL, imbalance=math.inf).hbm_bytes == weights + 512 * row
    on_chip = _MATMUL.replace("bf16[512,384]{1,0} custom", "bf16[512,384]{1,0:S(1)} custom")
    assert jp.audit(on_chip).hbm_bytes == weights + 128 * 2 * 256


_EXCHANGE = """HloModule exchange, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[96,64], out: bf16[{rows},64], n: s32[8]) -> bf16[{rows},64] {{
  %x = bf16[96,64]{{1,0}} parameter(0)
  %out = bf16[{rows},64]{{1,0}} parameter(1)
  %n = s32[8]{{0}} parameter(2)
  ROOT %y = bf16[{rows},64]{{1,0}} ragged-all-to-all(%x, %out, %n, %n, %n, %n), replica_groups={{{{0,1,2,3,4,5,6,7}}}}
}}
"""


@pytest.mark.parametrize(
    ("rows", "balanced", "worst"),
    [(48, 48, 96), (96, 96, 96), (400, 96, 400), (768, 96, 7 * 96), (8, 8, 7 * 8)],
)
def test_the_worst_routing_is_what_both_buffers_and_the_other_devices_allow(rows, balanced, worst):
    (found,) = jp.audit(_EXCHANGE.format(rows=rows)).collectives
    assert (found.wire_bytes, found.worst_wire_bytes) == (balanced * 128 * 7 / 8, worst * 128)


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["f/mul"], 96),
        (["f/expected_rows_40/ragged_dot_general"], 40),
        (["f/expected_rows_40/broadcast_in_dim"], 40),
        (["f/expected_rows_40/ragged_dot_general", "f/expected_rows_64/broadcast_in_dim"], 64),
        (["f/expected_rows_40/while", "f/expected_rows_64/expected_rows_40/while/mul", "f/expected_rows_64/mul"], 64),
        (["f/expected_rows_64/while/body/expected_rows_40/mul", "f/expected_rows_64/dot_general"], 40),
        (["f/expected_rows_40/mul", "f/expected_rows_64/mul"], 96),
        (["f/expected_rows_40/dot_general", "f/expected_rows_64/while"], 96),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_nameless_exchange_takes_the_rows_stated_around_it(names, rows, elsewhere):
    """Of several numbers, it takes the only one that no matmul states."""
    lines = [f'  %a{i} = s32[8]{{0}} add(%n, %n), metadata={{op_name="{name}"}}\n' for i, name in enumerate(names)]
    text = _EXCHANGE.format(rows=400)
    if elsewhere:
        called = "%other (n: s32[8]) -> s32[8] {\n  %n = s32[8]{0} parameter(0)\n" + "".join(lines)
        called += "  ROOT %z = s32[8]{0} add(%n, %n)\n}\n\n"
        text = text.replace("ENTRY", f"{called}ENTRY")
    else:
        text = text.replace("  ROOT", f"{''.join(lines)}  ROOT")
    (found,) = jp.audit(text).collectives
    assert found.wire_bytes == rows * 128 * 7 / 8


def test_an_exchange_reads_and_writes_the_rows_that_it_moves():
    text = _EXCHANGE.format(rows=400)
    assert [jp.audit(text, imbalance=f).hbm_bytes for f in (1, 2, math.inf)] == [
        128 * rows for rows in (2 * 96, 96 + 2 * 96, 96 + 400)
    ]


def test_the_text_and_the_json_have_both_figures(audited):
    report = audited("tpu_experts")
    assert (
        str(report)
        .splitlines()[0]
        .endswith("; with balanced routing; the worst routing has 2.416e+09 matmul FLOPs and 8.06 MiB on the wire")
    )
    (line,) = [line for line in str(report).splitlines() if "ragged" in line and "overlapped" in line]
    assert re.match(
        r"all-to-all \(ragged\)  data +6 +bf16 +1.12 MiB +432.00 KiB +overlapped, worst routing 1.50 MiB", line
    )
    told = json.loads(report.to_json())
    assert told["worst_routing"] == {"matmul_flops": report.worst_matmul_flops, "wire_bytes": report.worst_wire_bytes()}
    assert "; with an imbalance of 2.5; " in audited("tpu_experts", imbalance=2.5).headline()


def test_other_programs_have_no_worst_routing(stored):
    report = stored("tpu_fsdp")
    assert not report.ragged and "routing" not in str(report)
    assert report.worst_wire_bytes() == report.wire_bytes() and report.worst_matmul_flops == report.matmul_flops
    assert json.loads(report.to_json())["worst_routing"] is None


@pytest.mark.parametrize("imbalance", [0.5, 0, -1, math.nan])
def test_an_imbalance_below_one_is_refused(imbalance):
    with raises(AuditError, "imbalance"):
        jp.audit(_MATMUL, imbalance=imbalance)
