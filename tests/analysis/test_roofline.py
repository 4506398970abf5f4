"""The roofline: steps computed by hand, reported unknowns, and the property that more work never takes less time."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from by_hand import audited, collective
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from profiles import few

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.roofline import roofline
from jaxpar.errors import MeshError, PlanError

FIXTURES = Path(__file__).parents[1] / "analysis" / "hlo" / "fixtures"
LINE = {"data": 16, "model": 1}  # on v5e:4x4 an axis of 16 gets two links, 100 GB/s


def stored(name: str) -> Audit:
    facts = json.loads((FIXTURES / "index.json").read_text(encoding="utf-8"))[name]
    return jp.audit(gzip.decompress((FIXTURES / f"{name}.hlo.gz").read_bytes()).decode(), mesh=facts["mesh"])


def gather(sent: float, **fields: Any) -> Any:
    return collective("all-gather", ("data",), sent, **fields)


def test_a_program_of_matmuls_is_bound_by_compute() -> None:
    found = roofline(audited(LINE, matmul_flops=197 * 10**9, kernel_flops=197 * 10**9, hbm_bytes=819), "v5e:4x4")
    assert (found.compute, found.hbm, found.step) == (pytest.approx(2e-3), pytest.approx(1e-9), pytest.approx(2e-3))
    assert (found.bound, found.mfu) == ("compute", pytest.approx(1.0))
    assert roofline(audited(LINE, matmul_flops=393 * 10**9), "v5e:4x4", dtype="int8").step == pytest.approx(1e-3)


def test_a_program_of_traffic_is_bound_by_memory() -> None:
    found = roofline(audited(LINE, matmul_flops=197 * 10**9, hbm_bytes=4 * 819 * 10**6), "v5e:4x4")
    assert (found.step, found.bound, found.mfu) == (pytest.approx(4e-3), "HBM", pytest.approx(0.25))


def test_what_is_exposed_adds_up() -> None:
    # 1 ms of compute, then 2 exposed gathers of 1 ms each.
    found = roofline(audited(LINE, gather(100e6, count=2), matmul_flops=197 * 10**9), "v5e:4x4")
    assert (found.exposed, found.overlapped, found.stalled) == (pytest.approx(2e-3), 0, 0)
    assert (found.step, found.bound) == (pytest.approx(3e-3), "links over data")


def test_of_permutes_on_their_way_together_the_busiest_link_counts() -> None:
    mesh, line = {"data": 4, "model": 4}, [(0, 1), (1, 2), (2, 3)]
    up, down = tuple(line), tuple((b, a) for a, b in line)
    send = lambda pairs, flight: collective("collective-permute", ("model",), 50e6, pairs=pairs, flight=flight, count=3)
    exposed = lambda *flights: roofline(audited(mesh, *(send(*one) for one in flights)), "v5e:4x4").exposed
    assert exposed((up, 1), (down, 1)) == pytest.approx(3e-3)
    assert exposed((up, 1), (down, 2)) == exposed((up, 1), (up, 1)) == pytest.approx(6e-3)
    assert exposed((up, 1), (down, 1), (up, 1)) == pytest.approx(6e-3)


def test_what_is_overlapped_hides_under_the_compute_beside_it() -> None:
    hidden = gather(40e6, exposed_bytes=0.0, beside_flops=197 * 10**9 // 2)
    found = roofline(audited(LINE, hidden, matmul_flops=197 * 10**9), "v5e:4x4")
    assert (found.overlapped, found.stalled, found.exposed) == (pytest.approx(0.4e-3), 0, 0)
    assert (found.step, found.bound) == (pytest.approx(1e-3), "compute")


def test_what_outlasts_the_compute_beside_it_stalls() -> None:
    # 0.9 ms on the links during a fifth of the 1 ms of compute.
    short = gather(90e6, exposed_bytes=0.0, beside_flops=197 * 10**9 // 5)
    report = audited(LINE, short, matmul_flops=197 * 10**9)
    found = roofline(report, "v5e:4x4")
    assert (found.overlapped, found.stalled) == (pytest.approx(0.9e-3), pytest.approx(0.7e-3))
    assert found.step == pytest.approx(1.7e-3)
    # If memory slows the program down, the same matmul hides more.
    slower = roofline(dataclasses.replace(report, hbm_bytes=2 * 819 * 10**6), "v5e:4x4")
    assert (slower.stalled, slower.step) == (pytest.approx(0.5e-3), pytest.approx(2.5e-3))


def test_beside_work_without_flops_a_transfer_hides_whole() -> None:
    found = roofline(audited(LINE, gather(100e6, exposed_bytes=0.0), hbm_bytes=2 * 819 * 10**6), "v5e:4x4")
    assert (found.step, found.stalled, found.bound) == (pytest.approx(2e-3), 0, "HBM")


def test_half_exposed_is_half_added() -> None:
    half = gather(100e6, exposed_bytes=50e6, beside_flops=197 * 10**9)
    found = roofline(audited(LINE, half, matmul_flops=197 * 10**9), "v5e:4x4")
    assert (found.exposed, found.step) == (pytest.approx(0.5e-3), pytest.approx(1.5e-3))


def test_transfers_queue_on_a_link_and_run_side_by_side_on_two() -> None:
    mesh, work = {"data": 4, "model": 4}, 197 * 10**9

    def over(axis: str) -> Any:  # 0.8 ms on one link, during all of the compute
        return collective("all-gather", (axis,), 40e6, exposed_bytes=0.0, beside_flops=work)

    apart = roofline(audited(mesh, over("data"), over("model"), matmul_flops=work), "v5e:4x4")
    assert (apart.overlapped, apart.step, apart.bound) == (pytest.approx(0.8e-3), pytest.approx(1e-3), "compute")
    queued = roofline(audited(mesh, over("data"), over("data"), matmul_flops=work), "v5e:4x4")
    assert (queued.overlapped, queued.step) == (pytest.approx(1.6e-3), pytest.approx(1.6e-3))


def test_over_slices_a_sum_waits_for_the_network() -> None:
    report = audited({"data": 2, "model": 16}, collective("all-reduce", ("data",), 3.125e6))
    found = roofline(report, "v5e:4x4*2")
    assert found.step == pytest.approx(1e-3)
    assert [(t.axes, t.levels) for t in found.transfers] == [(("data",), ("DCN",))]


def test_mfu_is_of_the_models_flops_if_they_are_known() -> None:
    report = audited(LINE, gather(100e6), matmul_flops=197 * 10**9)
    assert roofline(report, "v5e:4x4").mfu == pytest.approx(0.5)
    found = roofline(report, "v5e:4x4", model_flops=0.75 * 16 * 197e9, tokens=4096)
    assert (found.mfu, found.tokens_per_second) == (pytest.approx(0.375), pytest.approx(4096 / 2e-3))


def test_an_empty_program_takes_no_time() -> None:
    found = roofline(audited(LINE), "v5e:4x4", tokens=1)
    assert (found.step, found.bound, found.mfu, found.tokens_per_second) == (0, "nothing", None, None)


TEXT = """\
A model, not a measurement: step 3 ms on v5e:4x4 (16 × TPU v5e), bound by links over data; MFU 33.3% (the program's \
FLOPs, bf16); 1,365,333 tokens/s
resource         time    hidden  stalled  exposed  what
compute          1 ms                              1.97e+11 FLOPs
HBM              1 ms                              at most 781.06 MiB
links over data  2.4 ms  400 µs  0 s      2 ms     228.88 MiB in 3 collectives on ICI
"""


def test_the_text_says_that_it_is_a_model_and_what_takes_how_long() -> None:
    hidden = gather(40e6, exposed_bytes=0.0, beside_flops=197 * 10**9)
    report = audited(LINE, gather(100e6, count=2), hidden, matmul_flops=197 * 10**9, hbm_bytes=819 * 10**6)
    found = roofline(report, "v5e:4x4", tokens=4096)
    assert str(found) == TEXT
    page = found._repr_html_()
    assert "A model, not a measurement" in page and "<td>links over data</td>" in page
    told = json.loads(found.to_json())
    assert told["step"] == found.step and told["transfers"][0]["axes"] == ["data"]


def test_what_the_audit_could_not_count_makes_a_lower_bound() -> None:
    found = roofline(stored("tpu_unknown_loop"), "v5e:4x4", tokens=1e-6)
    loop = "while.7 from until_it_converges.<locals>.body (audit_programs.py:206)"
    assert found.mfu is None and found.missing == (
        f"loops with an unknown trip count are counted as one iteration ({loop})",
    )
    assert found.headline() == (
        "step ≥ 17.9 ns on v5e:4x4 (16 × TPU v5e), bound by links over data; MFU unknown; ≤ 56 tokens/s\nLOWER "
        f"BOUND of the step: loops with an unknown trip count are counted as one iteration ({loop})"
    )
    silent = roofline(stored("tpu_silent_kernel"), "v5e:4x4", model_flops=16 * 197e12 * 1e-9)
    assert silent.missing == ("kernels that report no FLOPs are counted as zero (tpu_custom_call)",)
    assert silent.mfu is not None and f"MFU ≤ {silent.mfu:.1%} (the model's FLOPs, bf16)" in silent.headline()


@pytest.mark.parametrize("name", few(["tpu_fsdp", "tpu_fsdp_tp", "tpu_tp_sp", "tpu_gathered_by_hand"], 2))
def test_stored_programs_keep_the_books(name: str) -> None:
    report = stored(name)
    found = roofline(report, "v5e:4x4")
    assert not found.missing
    assert sum(t.wire_bytes for t in found.transfers) == pytest.approx(report.wire_bytes())
    assert sum(t.count for t in found.transfers) == report.count()
    assert sum(t.exposed for t in found.transfers) == pytest.approx(found.exposed)
    assert found.step == pytest.approx(
        found.exposed + max(max(found.compute, found.hbm) + found.stalled, found.overlapped)
    )
    assert found.mfu is not None and 0 < found.mfu < 1
    # Two slices with a slow network between them are no faster than one.
    assert roofline(report, "v5e:2x4*2").step >= found.step


@pytest.mark.parametrize(
    ("topology", "error", "name"),
    [
        ("v5e:4x8", MeshError, "data=16"),
        ("v5e:1x512", PlanError, "TPU"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(topology: str, error: type[Exception], name: str) -> None:
    with raises(error, name):
        roofline(audited({"data": 512 if "512" in topology else 16}), topology)


sizes = st.integers(0, 10**12)
kinds = st.sampled_from(["all-gather", "all-reduce", "all-to-all", "collective-permute"])
sent = st.builds(
    lambda kind, axes, wire, shown, beside, count: collective(
        kind, axes, float(wire), exposed_bytes=wire * shown, beside_flops=beside, count=count
    ),
    kinds,
    st.sampled_from([("data",), ("model",), ("data", "model")]),
    st.integers(1, 10**10),
    st.sampled_from([0.0, 0.5, 1.0]),
    sizes,
    st.integers(1, 9),
)


def program(more: int, hbm: int, found: list[Any]) -> Audit:
    """Compute that overlaps a transfer is part of the program, so a program has at least as much."""
    beside = max((c.beside_flops * c.count for c in found), default=0)
    return audited({"data": 8, "model": 4}, *found, matmul_flops=beside + more, hbm_bytes=hbm)


programs = st.builds(program, sizes, sizes, st.lists(sent, max_size=5))


@given(programs, st.sampled_from(["v5e:4x8", "v5e:4x4*2", "v5p:2x4x4", "tpu7x:2x2x4"]), sizes, st.integers(0, 4))
def test_more_work_never_takes_less_time(report: Audit, topology: str, more: int, which: int) -> None:
    before = roofline(report, topology).step
    least = before * (1 - 1e-9)
    assert roofline(dataclasses.replace(report, matmul_flops=report.matmul_flops + more), topology).step >= least
    assert roofline(dataclasses.replace(report, hbm_bytes=report.hbm_bytes + more), topology).step >= least
    if which < len(report.collectives):
        grown = list(report.collectives)
        share = grown[which].exposed_bytes / grown[which].wire_bytes
        wire = grown[which].wire_bytes + more
        grown[which] = dataclasses.replace(grown[which], wire_bytes=wire, exposed_bytes=wire * share)
        assert roofline(dataclasses.replace(report, collectives=tuple(grown)), topology).step >= least


@given(programs)
def test_a_step_is_never_shorter_than_any_of_its_parts(report: Audit) -> None:
    found = roofline(report, "v5e:4x8")
    parts = (found.compute, found.hbm, found.overlapped, found.exposed, found.stalled)
    assert found.step >= max(parts) * (1 - 1e-9)
    assert found.mfu is None or found.mfu <= 1 + 1e-9
