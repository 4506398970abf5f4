"""The time that a collective takes on the links, against values computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from error_texts import raises

from jaxpar.errors import PlanError
from jaxpar.sharding.hardware.accelerators import accelerator
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.hardware.torus import Torus
from jaxpar.sharding.mesh import AXES, MeshSpec


def phases(topology: str, mesh: dict[str, int], kind: str, axes: tuple[str, ...], sent: float) -> dict[str, float]:
    """Seconds of one execution for each level."""
    where = Topology.parse(topology)
    links = Links.of(where, mesh)
    return {phase.level: phase.seconds for phase in links.phases(kind, axes, sent)}


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "speed"),
    [
        ("v5e:16x16", {"data": 16, "model": 16}, ("data",), 2 * 50e9),  # a closed ring: both directions
        ("v5e:16x16", {"data": 16, "model": 16}, ("data", "model"), 4 * 50e9),  # two closed rings together
        ("v5e:4x4", {"data": 4, "model": 4}, ("model",), 50e9),  # an open line: one link feeds its end
        ("v5e:4x4", {"data": 16}, ("data",), 2 * 50e9),  # two open lines
        ("v5e:4x16", {"data": 4, "model": 16}, ("data",), 50e9),
        ("v5p:4x4x4", {"data": 16, "model": 4}, ("data",), 4 * 100e9),
        ("v5p:2x2x4", {"data": 4, "model": 4}, ("model",), 2 * 100e9),  # the inner axis takes two dims
        ("v5p:2x2x4", {"data": 4, "model": 4}, ("data",), 100e9),  # no ring closes in slices smaller than a cube
        ("v5e:1x16", {"data": 4, "model": 4}, ("model",), 50e9),  # a part of a ring is a line
        ("v5e:1x16", {"data": 4, "model": 4}, ("data",), 2 * 50e9 / 4),  # four rings over the same wires
        ("v5e:1x16", {"data": 4, "model": 4}, ("data", "model"), 2 * 50e9),
    ],
)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_ring_gets_the_links_of_the_dims_that_its_axes_hold(
    topology: str, mesh: dict[str, int], axes: tuple[str, ...], speed: float, kind: str
) -> None:
    assert phases(topology, mesh, kind, axes, 3e9) == {"ICI": pytest.approx(3e9 / speed)}


def test_over_slices_the_small_pieces_cross_first() -> None:
    # 32 devices gather 32e6 bytes: 1e6 from the other slice, then 15 pieces of twice that.
    found = phases("v5e:4x4*2", {"data": 32}, "all-gather", ("data",), 31e6)
    assert found == {"DCN": pytest.approx(1e6 / 3.125e9), "ICI": pytest.approx(30e6 / 100e9)}


def test_a_program_that_says_what_crosses_slices_is_believed() -> None:
    links = Links.of(Topology.parse("v5e:4x4*2"), {"data": 32})
    between, inside = (
        links.phases("all-gather", ("data",), sent, between_slices=crossing)
        for sent, crossing in ((1e6, True), (30e6, False))
    )
    assert [(phase.level, phase.seconds) for phase in between] == [("DCN", pytest.approx(1e6 / 3.125e9))]
    assert [(phase.level, phase.seconds) for phase in inside] == [("ICI", pytest.approx(30e6 / 100e9))]
    both = phases("v5e:4x4*2", {"data": 32}, "all-gather", ("data",), 31e6)
    assert both == {phase.level: pytest.approx(phase.seconds) for phase in (*between, *inside)}


def test_an_axis_outside_the_slices_crosses_whole_and_one_inside_never_does() -> None:
    mesh = {"data": 2, "model": 16}
    assert phases("v5e:4x4*2", mesh, "all-reduce", ("data",), 1e9) == {"DCN": pytest.approx(1e9 / 3.125e9)}
    assert phases("v5e:4x4*2", mesh, "all-reduce", ("model",), 1e9) == {"ICI": pytest.approx(1e9 / 100e9)}


def test_two_devices_on_a_chip_share_its_links_and_have_a_fast_one_between_them() -> None:
    mesh = {"data": 8, "model": 2}
    assert phases("tpu7x:2x2x2", mesh, "all-gather", ("model",), 6e9) == {"chip": pytest.approx(6e9 / 600e9)}
    assert phases("tpu7x:2x2x2", mesh, "all-gather", ("data",), 6e9) == {"ICI": pytest.approx(6e9 / (3 * 50e9))}
    both = phases("tpu7x:2x2x2", mesh, "all-gather", ("data", "model"), 15e6)
    assert both == {"ICI": pytest.approx(7e6 / 150e9), "chip": pytest.approx(8e6 / 600e9)}


def test_all_to_all_pays_for_its_detours() -> None:
    ring = phases("v5e:16x16", {"data": 16, "model": 16}, "all-to-all", ("data",), 15e6)
    gather = phases("v5e:16x16", {"data": 16, "model": 16}, "all-gather", ("data",), 15 * 16e6)
    assert ring["ICI"] == pytest.approx(16e6 * 64 / 16 / 100e9)
    assert ring["ICI"] == pytest.approx(
        gather["ICI"] / 4 * 16 / 15
    )  # in large rings, the well-known quarter of a gather
    line = phases("v5e:4x4", {"data": 4, "model": 4}, "all-to-all", ("data",), 3e6)
    assert line == {"ICI": pytest.approx(4e6 / 50e9)}
    # Of 32 devices 16 are in the other slice, 15 in this one.
    slices = phases("v5e:4x4*2", {"data": 32}, "all-to-all", ("data",), 31e6)
    assert slices == {"DCN": pytest.approx(16e6 / 3.125e9), "ICI": pytest.approx(16e6 / 50e9)}


def test_a_permute_uses_one_link_one_way() -> None:
    assert phases("v5e:16x16", {"data": 16, "model": 16}, "collective-permute", ("data",), 1e9) == {"ICI": 1e9 / 50e9}
    assert phases("v5e:4x4*2", {"pipeline": 2, "data": 16}, "collective-permute", ("pipeline",), 1e9) == {
        "DCN": 1e9 / 3.125e9
    }


def shift(count: int, far: int) -> list[tuple[int, int]]:
    return [(i, (i + far) % count) for i in range(count)]


@pytest.mark.parametrize(
    ("topology", "mesh", "axis", "pairs", "loads"),
    [
        # A ring of 4, two devices wide. A message to the next device along the ring passes no other device; a message
        # to the opposite device passes one.
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, "model", shift(8, 2), {"ICI 0 +": 1}),
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, "model", shift(8, -2), {"ICI 0 -": 1}),
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, "model", shift(8, 4), {"ICI 0 +": 2}),
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, "model", [(0, 1), (1, 0)], {"ICI 1 +": 1, "ICI 1 -": 1}),
        # A shift by one in the order of the axis: half the messages cross to the other column, half cross back and move
        # on along the ring.
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, "model", shift(8, 1), {"ICI 0 +": 1, "ICI 1 +": 1, "ICI 1 -": 1}),
        # The outer half of pipeline shares its wires with both groups of model inside it.
        ("v5p:4x4x4", {"pipeline": 2, "data": 4, "model": 8}, "pipeline", [(0, 1)], {"ICI 1 +": 2}),
        (
            "v5e:4x4",
            {"data": 4, "model": 4},
            "model",
            shift(4, 1),
            {"ICI 0 +": 1, "ICI 0 -": 1},
        ),  # an open line: the last message goes all the way back
        ("v5e:4x4", {"data": 4, "model": 4}, "model", shift(4, 2), {"ICI 0 +": 2, "ICI 0 -": 2}),
        ("v5e:1x16", {"data": 4, "model": 4}, "data", shift(4, 1), {"ICI 1 +": 4}),  # four rings over the same wires
        ("v5e:1x16", {"data": 4, "model": 4}, "data", shift(4, -1), {"ICI 1 -": 4}),
    ],
)
def test_messages_of_a_permute_wait_where_they_share_a_link(
    topology: str, mesh: dict[str, int], axis: str, pairs: list[tuple[int, int]], loads: dict[str, int]
) -> None:
    where = Topology.parse(topology)
    links, speed = Links.of(where, mesh), accelerator(where.kind).link_bandwidth
    (phase,) = links.phases("collective-permute", (axis,), 1e9, pairs=tuple(pairs))
    assert phase.queues == {queue: pytest.approx(load * 1e9 / speed) for queue, load in loads.items()}
    assert links.permute((axis,), 1e9, pairs) == phase.seconds == pytest.approx(max(loads.values()) * 1e9 / speed)


def test_a_permute_between_the_devices_of_a_chip_stays_on_it() -> None:
    links = Links.of(Topology.parse("tpu7x:2x2x2"), {"data": 4, "model": 4})
    one = lambda pairs: links.phases("collective-permute", ("model",), 6e9, pairs=pairs)
    assert [(p.level, p.seconds) for p in one(((0, 1), (1, 0), (2, 3), (3, 2)))] == [
        ("chip", pytest.approx(6e9 / 600e9))
    ]
    # Both devices of a chip send to the next chip, over the link that they share.
    assert [(p.level, p.seconds) for p in one(((0, 2), (1, 3)))] == [("ICI", pytest.approx(6e9 / 50e9))]


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "rings"),
    [
        ("v5p:4x4x4", {"pipeline": 8, "model": 8}, ("model",), (4, 2)),
        ("v5e:4x4", {"data": 4, "model": 4}, ("model",), (4,)),
        ("v5e:4x4", {"data": 4, "model": 4}, ("data", "model"), (4, 4)),
        ("tpu7x:2x2x2", {"data": 4, "model": 4}, ("model",), (2, 2)),
    ],
)
def test_a_group_is_joined_in_a_ring_along_each_dim(
    topology: str, mesh: dict[str, int], axes: tuple[str, ...], rings: tuple[int, ...]
) -> None:
    where = Topology.parse(topology)
    assert Links.of(where, mesh).rings(axes) == rings


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_gpus_of_a_host_share_a_switch_and_hosts_a_network(kind: str) -> None:
    links = Links(accelerator("h100"), 4, (8,), 1, {"data": 4, "model": 8})
    (inside,) = links.phases(kind, ("model",), 9e9)
    (across,) = links.phases(kind, ("data",), 9e9)
    assert (inside.level, inside.seconds) == ("NVLink", pytest.approx(9e9 / 450e9))
    assert (across.level, across.seconds) == ("DCN", pytest.approx(9e9 / 50e9))


def test_a_gather_over_hosts_and_gpus_is_hierarchical() -> None:
    links = Links(accelerator("h100"), 4, (8,), 1, {"data": 32})
    found = {phase.level: phase.seconds for phase in links.phases("all-gather", ("data",), 31e6)}
    assert found == {"DCN": pytest.approx(3e6 / 50e9), "NVLink": pytest.approx(28e6 / 450e9)}


@pytest.mark.parametrize(
    ("topology", "levels"), [("h100:8", ["NVLink"]), ("h100:4x8", ["DCN"]), ("h100:2x8", ["DCN", "NVLink"])]
)
def test_an_axis_crosses_hosts_as_far_as_it_must(topology: str, levels: list[str]) -> None:
    hosts = Topology.parse(topology)
    links = Links.of(hosts, {"data": 4, "model": hosts.devices // 4})
    assert [phase.level for phase in links.phases("all-gather", ("data",), 1e9)] == levels


def test_a_slice_is_no_larger_than_its_pod() -> None:
    with raises(PlanError, "v5e", "TPU"):
        Links.of(Topology.parse("v5e:16x32"), {"data": 512})


@dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that ``mesh_utils`` reads."""

    id: int
    coords: tuple[int, int, int]
    device_kind: str
    platform: str = "tpu"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


@pytest.mark.parametrize(
    ("device_kind", "shape", "mesh"),
    [
        ("TPU v4", (4, 4, 4), {"data": 16, "model": 4}),
        ("TPU v4", (4, 4, 4), {"data": 4, "model": 16}),
        ("TPU v4", (4, 4, 8), {"data": 16, "model": 8}),
        ("TPU v5", (8, 8, 8), {"pipeline": 2, "data": 64, "model": 4}),
        ("TPU v5 lite", (16, 16), {"data": 16, "model": 16}),
        ("TPU v5 lite", (16, 16), {"data": 64, "model": 4}),
        ("TPU v5 lite", (4, 8), {"data": 16, "model": 2}),
        ("TPU v6 lite", (8, 16), {"data": 32, "model": 4}),
        ("TPU v5 lite", (4, 4), {"data": 2, "model": 8}),
    ],
)
def test_axes_lie_where_jax_lays_them(device_kind: str, shape: tuple[int, ...], mesh: dict[str, int]) -> None:
    places = itertools.product(*(range(n) for n in reversed((*shape, 1)[:3])))
    chips = [Chip(i, (x, y, z), device_kind) for i, (z, y, x) in enumerate(places)]
    laid = MeshSpec(**mesh).build(chips).devices
    torus = Torus.lay(mesh, shape, (False,) * len(shape), 1.0)
    for axis in mesh:
        line = np.moveaxis(laid, AXES.index(axis), 0).reshape(mesh[axis], -1)[:, 0]
        for dim, factors in enumerate(torus.factors):
            along = sorted({chip.coords[dim] for chip in line})
            assert len(along) == math.prod(factor for name, factor in factors if name == axis)
            if len(along) > 1:
                step = math.prod(factor for name, factor in factors[: [name for name, _ in factors].index(axis)])
                assert set(np.diff(along)) == {step}
