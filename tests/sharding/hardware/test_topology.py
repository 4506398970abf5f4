"""Parsing of topology names, and meshes on topologies."""

from __future__ import annotations

import jax
import pytest
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


HOSTS = (
    "'h100:{}': h100 GPUs are written as h100:GPUS or h100:HOSTSxGPUS, with 1 to 8 GPUS in a host. Remedy: use h100:8 "
    "or h100:4x8."
)
MULTIPLY = "Remedy: use other sizes that multiply to 1 or 2 or 4 or 8 or 16 or 32 or 64"
KNOWN = "v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:4x4x4, h100:4x8"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v5x:4x4", f"unknown accelerator 'v5x' in 'v5x:4x4'. Did you mean 'v5p'? Known are {KNOWN}."),
        (
            "v5e",
            (
                "'v5e' is not a topology. Remedy: write KIND:SHAPE in chips, KIND:SHAPE*SLICES, or KIND:HOSTSxGPUS, "
                f"such as {KNOWN}."
            ),
        ),
        ("v5e:4x4x4", "'v5e:4x4x4': a v5e slice has 2 dims of 1 chip or more, but 4x4x4 has 3. Remedy: use v5e:4x4."),
        ("v4:2x0x2", "'v4:2x0x2': a v4 slice has 3 dims of 1 chip or more, but 2x0x2 has a 0. Remedy: use v4:4x4x4."),
        *((f"h100:{shape}", HOSTS.format(shape)) for shape in ("16", "2x2x8", "0x8", "8*2")),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name: str, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        Topology.parse(name)
    assert str(caught.value) == text


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
    ("spec", "text"),
    [
        (
            jp.MeshSpec(data=4, model=2),
            (
                "data=4 × model=2 does not fit 64 devices, because its sizes multiply to 8. "
                "Remedy: use data=32 or model=16."
            ),
        ),
        (
            jp.MeshSpec(data=-1, model=3),
            f"data=-1 × model=3 does not fit 64 devices, because 64 is not a multiple of 3. {MULTIPLY}.",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_a_topology_says_what_would(spec: jp.MeshSpec, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        spec.on("v5p:4x4x4")
    assert str(caught.value) == f"v5p:4x4x4: the mesh {text}"


def test_the_platform_of_a_mesh_is_its_devices_or_what_it_carries() -> None:
    assert platform_of(jp.MeshSpec(data=-1).build()) == jax.devices()[0].platform
    assert platform_of(jp.MeshSpec(data=8).abstract()) == "cpu"
