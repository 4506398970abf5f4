"""Several topologies compared: the fastest, the smallest that fits, and the cheapest for given prices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from error_texts import raises

from jaxpar.errors import CompileError, PlanError
from jaxpar.planning.search import topologies
from jaxpar.planning.search.compiled import CompiledPlan
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space
from jaxpar.planning.search.topologies import Goal, Goals, TopologyReport, compare_topologies, parse_prices
from jaxpar.sharding.hardware.topology import Topology
from tests.planning.search.test_scaling import SPACE, WORK, Planned

SIZES = ("v5e:2x2", "v5e:4x4", "v5e:2x4", "v5e:1x1")
"""The work fits all of them by its estimate, and more chips are faster."""


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler whose steps take a second for each 64 devices' worth of work, and the topologies that it saw."""
    seen: list[str] = []

    class Compiler:
        def __init__(self, run_of: object, topology: Topology):
            self.topology = topology

        def traced_bytes(self, plan: Plan) -> int | None:
            return None

        def compiled(self, plan: Plan) -> CompiledPlan:
            seen.append(str(self.topology))
            if self.topology.devices < 8:
                raise CompileError("too large")
            step = 8.0 / self.topology.devices**0.5
            return CompiledPlan(True, step, step, 0.0, 0.0, (), 0.0, 0.0, 1e9 / self.topology.devices)

    monkeypatch.setattr(topologies, "CompilerMeasures", Compiler)
    return seen


def compared(goal: Goal, names: Sequence[str] = SIZES, **prices: float) -> TopologyReport:
    def space_of(topology: Topology) -> Space:
        return SPACE

    return compare_topologies(
        Planned(WORK), space_of, [Topology.parse(name) for name in names], Goals(goal, prices, programs=2)
    )


def ranked(report: TopologyReport) -> list[str]:
    return [str(choice.topology) for choice in report.ranked]


def test_the_fewest_chips_that_fit_are_compiled_first(compiler: list[str]) -> None:
    report = compared("chips")
    assert ranked(report) == ["v5e:2x4"]
    # Plans of the small ones fit by their estimate, but not compiled. 4x4 has more chips, so it was not compiled.
    assert list(dict.fromkeys(compiler)) == ["v5e:1x1", "v5e:2x2", "v5e:2x4"]
    assert [row[1:3] + row[-1:] for row in report.rows()] == [
        ("v5e:2x4", "8", "compiled"),
        ("v5e:4x4", "16", "estimate"),
        ("v5e:2x2", "4", "no plan fits"),
        ("v5e:1x1", "1", "no plan fits"),
    ]
    none = [choice for choice in report.choices if choice.plan is None]
    assert len(none) == 2 and all(math.isnan(c.step_seconds) and math.isnan(c.peak_bytes) for c in none)
    assert "NaN" not in report.to_json()


def test_the_fastest_topology_is_the_largest() -> None:
    assert ranked(compared("time"))[0] == "v5e:4x4"


def test_the_cheapest_topology_has_the_fewest_chip_hours() -> None:
    report = compared("price", v5e=3.6)
    assert ranked(report)[0] == "v5e:2x4"
    step = 8 / 8**0.5
    assert report.rows()[0][6] == f"{0.001 * 8 * step:.3g}"
    assert report.rows()[0][7] == f"{0.001 * 8 * step / (16 * 2048) * 1e9:,.2f}"
    assert report.columns[6:8] == ("$ a step", "$ for 1e9 tokens")
    told = json.loads(report.to_json())
    assert told["goal"] == "price"
    assert {one["topology"]: one.get("dollars_per_step") for one in told["topologies"]}["v5e:2x4"] == pytest.approx(
        0.001 * 8 * step
    )


def test_a_price_decides_between_kinds() -> None:
    names = ("v5e:2x4", "v6e:2x4")
    assert ranked(compared("price", names, v5e=1.0, v6e=9.0)) == ["v5e:2x4"]
    assert ranked(compared("price", names, v5e=9.0, v6e=1.0)) == ["v6e:2x4"]


def test_every_kind_needs_a_price() -> None:
    with raises(PlanError, "--objective"):
        compared("price")


def test_no_topology_that_fits_is_an_error() -> None:
    with raises(PlanError, "v5e:1x1", "v5e:2x2"):
        str(compared("chips", ("v5e:1x1", "v5e:2x2")))


def test_a_crash_of_the_compiler_is_told_beside_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crashing(topologies.CompilerMeasures):
        def traced_bytes(self, plan: Plan) -> int | None:
            return None

        def compiled(self, plan: Plan) -> CompiledPlan:
            raise CompileError("the compiler crashed (SIGSEGV): it wrote no message")

    monkeypatch.setattr(topologies, "CompilerMeasures", Crashing)
    report = compared("chips", ["v5e:2x2"])
    assert [row[-1] for row in report.rows()] == ["the compiler crashed"]
    with raises(PlanError, "FSDP"):
        _ = report.best.best


def test_a_price_of_a_kind_that_no_topology_has_is_an_error() -> None:
    with raises(PlanError, "--price", "v4"):
        compared("price", v5e=1.2, v4=3.0)


@pytest.mark.parametrize("setting", ["v5e", "v5e=", "v5e=-1", "v5e=inf", "v5e=nan", "v5e=cheap"])
def test_a_price_is_a_positive_number(setting: str) -> None:
    with raises(PlanError, "--price", "KIND"):
        parse_prices([setting])
