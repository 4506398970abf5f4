"""Tests what plans send between slices or hosts: which axes may cross, how many bytes, and for how long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from jaxpar.planning.search.cost import CostModel
from jaxpar.planning.search.plan import Plan
from jaxpar.planning.search.space import Space, plans, tensor_dims
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology
from tests.planning.llama_workload import llama_workload

WORKLOAD = llama_workload()
AXES = ("pipeline", "replica", "data", "context", "ulysses", "model")
V5E = Topology.parse("v5e:4x4*2")


def found(topology: Topology, **fixed: int) -> tuple[list[Plan], Counter[str]]:
    """The plans of a topology, and why the others are left out."""
    refused: Counter[str] = Counter()
    space = Space(AXES, tensor_dims(WORKLOAD), remat=("full",), fixed=fixed, slices=topology.slices)
    return list(plans(WORKLOAD, topology.devices, space, refused)), refused


@pytest.mark.parametrize("name", ["v5e:4x4*2", "v5e:2x4*4", "v5e:2x2*8", "h100:4x8"])
def test_only_axes_that_send_little_cross_slices(name: str) -> None:
    topology = Topology.parse(name)
    crossing = {axis for plan in found(topology)[0] for axis in Links.of(topology, plan.mesh).crossing}
    assert crossing == {"pipeline", "replica", "data", "context"}


def test_meshes_whose_exposed_axes_would_cross_are_counted() -> None:
    topology = Topology.parse("v5e:2x2*8")
    refused = found(topology)[1]
    for axis in ("ulysses", "model"):
        assert refused[f"{axis} crosses {topology.slices} slices: the step would wait for the network"] > 0


def test_a_fixed_axis_may_cross_slices() -> None:
    made, _ = found(Topology.parse("v5e:2x2*2"), model=8)
    assert {plan.model for plan in made} == {8}


def test_one_slice_refuses_nothing_for_its_network() -> None:
    assert not [reason for reason in found(Topology.parse("v5e:4x8"))[1] if "slices" in reason]


def test_a_replica_across_slices_sums_the_gradients_of_its_shards_there() -> None:
    plan = Plan(replica=2, data=16, zero=3, remat="full")
    cost = CostModel(WORKLOAD, V5E).cost(plan)
    # An all-reduce between two sends each device's share of the gradients once: fp32, over 16 devices.
    assert cost.network_bytes == pytest.approx(WORKLOAD.param_count * 4 / 16)
    assert cost.network_seconds == pytest.approx(cost.network_bytes / 3.125e9)
    assert {t.axes for t in cost.transfers if t.network_bytes} == {("replica",)}


@pytest.mark.parametrize("name", ["v5e:4x4*2", "h100:4x8"])
def test_a_gather_across_slices_sends_each_device_its_share(name: str) -> None:
    topology = Topology.parse(name)
    cost = CostModel(WORKLOAD, topology).cost(Plan(data=32, zero=3, remat="full"))
    sent = {what: sum(t.network_bytes for t in cost.transfers if what in t.what) for what in ("gather", "scatter")}
    layers, outside = 8 * (4 * 1024 * 1024 + 3 * 1024 * 4096), 2 * 32768 * 1024
    # A device gets a shard of 32 from each other slice: twice in the layers, once outside them, in bf16.
    assert sent["gather"] == pytest.approx((topology.slices - 1) * (layers * 2 + outside) * 2 / 32)
    # A gradient in fp32 goes around a ring of TPUs, so whole gradients cross. GPUs scatter inside a host first.
    whole = (layers + outside) * 4 / 32
    assert sent["scatter"] == pytest.approx(whole * (31 if topology.platform == "tpu" else topology.slices - 1))


def test_replicas_across_slices_beat_weights_sharded_across_them() -> None:
    model = CostModel(WORKLOAD, V5E)
    inside, across = (model.cost(Plan(replica=32 // n, data=n, zero=3, remat="full")) for n in (16, 32))
    assert inside.step < across.step


def test_stages_across_slices_send_activations() -> None:
    plan = Plan(pipeline=2, data=16, zero=3, remat="full", microbatches=2)
    crossing = {t.what for t in CostModel(WORKLOAD, V5E).cost(plan).transfers if t.network_bytes}
    assert crossing == {"stages", "ends"}


def test_a_ring_across_slices_runs_at_the_speed_of_the_network() -> None:
    model = CostModel(llama_workload(batch=1, seq=65536), Topology.parse("h100:2x8"))
    ring = next(t for t in model.cost(Plan(context=16, remat="full")).transfers if t.what == "ring")
    assert ring.network_bytes == pytest.approx(ring.wire_bytes)
    assert ring.seconds == pytest.approx(ring.wire_bytes / 50e9)


def test_one_slice_sends_nothing_through_the_network() -> None:
    cost = CostModel(WORKLOAD, Topology.parse("v5e:4x8")).cost(Plan(replica=2, data=16, zero=3, remat="full"))
    assert (cost.network_bytes, cost.network_seconds) == (0, 0)


def test_an_estimate_does_not_depend_on_those_before_it() -> None:
    """A model keeps what several plans share; each of a pair differs in one field that a figure may depend on."""
    made = found(V5E)[0][::97]
    changes: list[dict[str, Any]] = [{"remat": "none"}, {"offload": True}, {"zero": 0}, {"zero": 3}]
    pairs = [[plan, replace(plan, **change)] for plan in made for change in changes]
    pairs += [[plan, replace(plan, sequence_parallel=not plan.sequence_parallel)] for plan in made if plan.model > 1]
    assert len(pairs) > 40 and any(plan.sequence_parallel for pair in pairs for plan in pair)
    for pair in pairs:
        shared = CostModel(WORKLOAD, V5E)
        for plan in (*pair, *pair[::-1]):
            assert shared.cost(plan) == CostModel(WORKLOAD, V5E).cost(plan), plan
