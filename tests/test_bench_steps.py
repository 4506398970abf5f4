"""The table of all steps of ``configs/bench``: its rows, its topologies, and what it says that a step waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.maxtext.bench_steps import BEFORE, SLICES, Figures, settings_of, show, show_waits, topology_of, waits_of
from benchmarks.shared.paths import BENCH_CONFIGS
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective
from jaxpar.analysis.roofline import roofline
from jaxpar.app.config import load_run
from jaxpar.app.job import make_job

NAMES = sorted(file.stem for file in BENCH_CONFIGS.glob("*.yaml"))
SLOW = Figures("jaxpar", 4.5e9, 0.74e9, 3478 * 2**20, 31_570_000_000_000, 0.179, 0.082, 0.25, ("55 ms: a permute",))


def test_every_configuration_fits_its_topology() -> None:
    assert set(BEFORE) <= set(NAMES)
    assert all(any(name.startswith(start) for name in NAMES) for start in SLICES)
    for name in NAMES:
        make_job(load_run(BENCH_CONFIGS / f"{name}.yaml")).layout(topology_of(name).devices)


def test_maxtext_has_steps_of_the_same_sizes() -> None:
    has = [name for name in NAMES if settings_of(name) is not None]
    dense = ["1b_fsdp16", "1b_fsdp4_tp4", "1b_pp4_fsdp4", "8b_fsdp16", "8b_fsdp4_tp4"]
    assert has == [*dense, "ds_ep16", "ds_ep4", "mix_ep4", "mix_ep4_capacity", "mix_ep8"]
    assert "ici_tensor_parallelism=4" in (settings_of("8b_fsdp4_tp4") or [])


def test_a_row_shows_the_step_before_and_beside_maxtext() -> None:
    refused = Figures("MaxText", note="does not compile: no memory")
    assert show("1b_dp16_zero1", [SLOW, refused]).splitlines() == [
        "| `1b_dp16_zero1` | before | 4.24 | 4.12 | 5,232 |  |  |  |  |  |",
        "|  | jaxpar | 4.50 | 0.74 | 3,478 | 3.157e+13 | 179 | 82 | 250 | 1.397 |",
        "|  | MaxText: does not compile: no memory |  |  |  |  |  |  |  |  |",
    ]


def test_only_slow_steps_of_jaxpar_say_what_they_wait_for() -> None:
    fast = replace(SLOW, step=0.19)
    assert show_waits("1b_dp16", [SLOW, fast]) == "1b_dp16, 1.397:\n  55 ms: a permute"
    assert show_waits("1b_dp16", [fast, replace(SLOW, side="MaxText")]) == ""


@pytest.mark.parametrize(
    ("beside", "exposed", "text"),
    [
        (0, 3e9, "all-gather over model, bf16, from Block (model.py:1) (nothing beside it)"),
        (10**9, 0.0, "all-gather over model, bf16, from Block (model.py:1) (longer than the 1e+09 FLOPs beside each)"),
    ],
)
def test_a_wait_names_the_transfer_and_the_compute_beside_it(beside: int, exposed: float, text: str) -> None:
    gather = Collective(
        kind="all-gather", form="", axes=("model",), group=4, dtype="bf16", arrays=1, result_bytes=4 * 10**9,
        wire_bytes=3e9, exposed_bytes=exposed, beside_flops=beside, count=2, conditional=False, certain=True,
        source="Block (model.py:1)", module="", tensor="", op_name="",
    )  # fmt: skip
    report = Audit({"data": 4, "model": 4}, 10**12, 0, 10**9, (gather,), (), (), (), {})
    line = roofline(report, "v5e:4x4")
    (wait,) = waits_of(report, line)
    time, _, rest = wait.partition(": ")
    assert rest == text
    assert time.endswith(" ms") and float(time.removesuffix(" ms")) == pytest.approx(
        1e3 * (line.step - max(line.compute, line.hbm)), rel=5e-3
    )
