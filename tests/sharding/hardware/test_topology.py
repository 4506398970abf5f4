"""Parsing of topology names, and meshes on topologies."""

from __future__ import annotations

import jax
import pytest
from error_texts import raises
from jax.sharding import AxisType

import jaxpar as jp
from jaxpar.errors import MeshError
from jaxpar.sharding.hardware.topology import Topology, platform_of


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:4x4", 16),
        ("v5p:16x16x16", 4096),
        ("v4:2x2x4", 16),
        ("v6e:16x16", 256),
        ("tpu7x:4x4x4", 128),
        ("v5e:4x4*2", 32),
        ("h100:8", 8),
        ("h100:4x8", 32),
        ("h100:2x4", 8),
    ],
)
def test_a_name_tells_its_devices_and_comes_back(name: str, devices: int) -> None:
    assert Topology.parse(name).devices == devices
    assert str(Topology.parse(name)) == name


@pytest.mark.parametrize(
    "name", ["v5x:4x4", "v5e", "v5e:4x4x4", "v4:2x0x2", "h100:16", "h100:2x2x8", "h100:0x8", "h100:8*2"]
)
def test_a_wrong_name_says_what_would_be_right(name: str) -> None:
    with raises(MeshError, f"'{name}'"):
        Topology.parse(name)


@pytest.mark.parametrize(
    ("name", "kind", "cores", "platform", "slices"),
    [
        ("v4:2x2x2", "TPU v4", 2, "tpu", 1),
        ("v5e:4x4*2", "TPU v5 lite", 1, "tpu", 2),
        ("v5p:2x2x2", "TPU v5", 2, "tpu", 1),
        ("v6e:4x4", "TPU v6 lite", 1, "tpu", 1),
        ("tpu7x:2x2x1", "TPU7x", 1, "tpu", 1),
        ("h100:4x8", "NVIDIA H100 80GB HBM3", 132, "gpu", 4),
    ],
)
def test_a_topology_names_its_devices_as_jax_does(name: str, kind: str, cores: int, platform: str, slices: int) -> None:
    topology = Topology.parse(name)
    assert (topology.device_kind, topology.platform, topology.slices) == (kind, platform, slices)
    assert topology.abstract_device == jax.sharding.AbstractDevice(kind, cores, platform)


def test_one_host_of_gpus_is_written_shortly() -> None:
    assert Topology.parse("h100:1x8") == Topology.parse("h100:8") and str(Topology.parse("h100:1x8")) == "h100:8"


def test_a_mesh_on_a_topology_fills_in_and_carries_the_device() -> None:
    mesh = jp.MeshSpec(data=-1, model=4).on("v5p:4x4x4")
    assert (mesh.shape["data"], mesh.shape["model"], mesh.size) == (16, 4, 64)
    assert mesh.abstract_device.device_kind == "TPU v5" and platform_of(mesh) == "tpu"
    assert platform_of(jp.MeshSpec(data=4, model=8).on(Topology.parse("h100:4x8"))) == "gpu"
    assert set(jp.MeshSpec(data=-1).on("h100:8", axis_type=AxisType.Explicit).axis_types) == {AxisType.Explicit}


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (jp.MeshSpec(data=4, model=2), "data=4"),
        (jp.MeshSpec(data=-1, model=3), "model=3"),
    ],
)
def test_a_mesh_that_does_not_fit_a_topology_says_what_would(spec: jp.MeshSpec, name: str) -> None:
    with raises(MeshError, name):
        spec.on("v5p:4x4x4")


def test_the_platform_of_a_mesh_is_its_devices_or_what_it_carries() -> None:
    assert platform_of(jp.MeshSpec(data=-1).build()) == jax.devices()[0].platform
    assert platform_of(jp.MeshSpec(data=8).abstract()) == "cpu"
