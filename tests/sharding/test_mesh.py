"""Meshes: sizes, the order of axes, and the links that an axis crosses with several slices or processes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from error_texts import raises
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType
from profiles import examples

from jaxpar import MeshSpec
from jaxpar.errors import MeshError
from jaxpar.sharding.hardware.device_order import arrange
from jaxpar.sharding.mesh import AXES
from jaxpar.utils.yaml_config import parse_yaml

SPECS = st.builds(MeshSpec, **dict.fromkeys(AXES, st.sampled_from([1, 1, 1, 2, 3, 4])))


@dataclass(frozen=True)
class FakeDevice:
    """The attributes of a device that the arrangement reads."""

    id: int
    process_index: int = 0
    slice_index: int | None = None
    coords: tuple[int, int, int] = (0, 0, 0)
    platform: str = "cpu"
    device_kind: str = "cpu"
    core_on_chip: int = 0


def hosts(count: int, each: int, platform: str = "cpu") -> list[FakeDevice]:
    return [FakeDevice(i, process_index=i // each, platform=platform) for i in range(count * each)]


def tpus(shape: tuple[int, int, int], slice_index: int | None = None) -> list[FakeDevice]:
    """One TPU slice with four chips per host, in the order of hosts."""
    z_y_x = itertools.product(*(range(n) for n in reversed(shape)))
    chips = [
        # Coordinates are (x, y, z).
        FakeDevice(i, slice_index=slice_index, coords=c[::-1])  # type: ignore[arg-type]
        for i, c in enumerate(z_y_x)
    ]
    host = {c: (c.coords[0] // 2, c.coords[1] // 2, c.coords[2]) for c in chips}
    number = {h: i for i, h in enumerate(sorted(set(host.values())))}
    return [
        FakeDevice(c.id, number[host[c]], slice_index, c.coords, platform="tpu", device_kind="TPU v4") for c in chips
    ]


def placed(devices: Sequence[Any], attribute: str, **sizes: int) -> np.ndarray:
    """The attribute of every device at its place in the mesh."""
    mesh = arrange(devices, MeshSpec(**sizes).sizes(len(devices)))
    assert mesh.shape == tuple(MeshSpec(**sizes).sizes(len(devices)).values())
    assert sorted(device.id for device in mesh.flat) == sorted(device.id for device in devices)
    return np.vectorize(lambda device: getattr(device, attribute))(mesh)


def test_the_axes_stand_in_the_canonical_order_whatever_the_order_of_arguments() -> None:
    assert AXES == ("pipeline", "replica", "data", "expert", "context", "ulysses", "model")
    assert MeshSpec(model=2, data=4) == MeshSpec(data=4, model=2)
    assert tuple(MeshSpec(model=2, data=4).sizes(8)) == AXES
    assert MeshSpec(model=2, data=4).build().axis_names == AXES


@pytest.mark.parametrize("axis", AXES)
def test_minus_one_takes_what_is_left(axis: str) -> None:
    other = "model" if axis != "model" else "data"
    sizes = MeshSpec(**{axis: -1, other: 3}).sizes(12)
    assert sizes == {**dict.fromkeys(AXES, 1), axis: 4, other: 3}
    assert MeshSpec(**{axis: -1, other: 3}).sizes(3)[axis] == 1


def test_build_uses_every_visible_device_once() -> None:
    mesh = MeshSpec(pipeline=2, data=-1, model=2).build()
    assert dict(mesh.shape) == {**dict.fromkeys(AXES, 1), "pipeline": 2, "data": 2, "model": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices()


def test_build_takes_some_devices_and_another_axis_type() -> None:
    mesh = MeshSpec(data=-1).build(jax.devices()[2:6], axis_type=AxisType.Explicit)
    assert list(mesh.devices.flat) == jax.devices()[2:6]
    assert set(mesh.axis_types) == {AxisType.Explicit}


def test_abstract_needs_no_devices() -> None:
    mesh = MeshSpec(pipeline=8, data=-1, model=8).abstract(4096)
    assert dict(mesh.shape) == {**dict.fromkeys(AXES, 1), "pipeline": 8, "data": 64, "model": 8}
    assert MeshSpec(data=64, model=8).abstract().size == 512
    assert set(MeshSpec(data=4).abstract(axis_type=AxisType.Explicit).axis_types) == {AxisType.Explicit}


def test_only_the_outer_axes_cross_tpu_slices() -> None:
    devices = [device for i in range(2) for device in tpus((2, 2, 2), slice_index=i)]
    slices = placed(devices, "slice_index", data=4, model=4).reshape(4, 4)
    assert slices.tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    stages = placed(devices[::-1], "slice_index", pipeline=2, model=8).reshape(2, 8)
    assert stages.tolist() == [[0] * 8, [1] * 8]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_only_the_outer_axes_cross_hosts(platform: str) -> None:
    places = placed(hosts(4, 4, platform), "process_index", pipeline=2, data=4, model=2).reshape(2, 4, 2)
    assert places.tolist() == [[[0, 0], [0, 0], [1, 1], [1, 1]], [[2, 2], [2, 2], [3, 3], [3, 3]]]


def test_an_axis_larger_than_a_host_fills_hosts() -> None:
    assert placed(hosts(2, 4), "process_index", model=8).ravel().tolist() == [0] * 4 + [1] * 4
    assert placed(hosts(3, 8), "process_index", pipeline=2, data=3, model=4).reshape(2, 3, 4)[:, :, 0].tolist() == [
        [0, 1, 2],
        [0, 1, 2],
    ]


@examples()
@given(SPECS, st.integers(2, 16))
def test_axes_that_fit_into_a_host_stay_there_or_the_mesh_is_refused(spec: MeshSpec, count: int) -> None:
    sizes = spec.abstract().shape
    total = math.prod(sizes.values())
    assume(total % count == 0)
    whole = total // count
    small = {i: block for i in range(len(AXES)) if (block := math.prod(list(sizes.values())[i:])) <= whole}
    if any(whole % block for block in small.values()):
        with pytest.raises(MeshError, match="several processes"):
            arrange(hosts(count, whole), sizes)
        return
    places = placed(hosts(count, whole), "process_index", **sizes)
    for i in small:
        rows = places.reshape(*places.shape[:i], -1)
        assert (rows == rows[..., :1]).all()


def test_hosts_of_one_tpu_slice_are_no_boundary() -> None:
    # A row along model is a line of the torus, four chips of two hosts; arranged by host it would be a 2×2 square.
    for slice_index in (None, 0):
        chips = tpus((4, 4, 1), slice_index)
        rows = placed(chips, "id", data=4, model=4).reshape(4, 4)
        coords = {chip.id: chip.coords for chip in chips}
        for row in rows:
            varying = [len({coords[i][d] for i in row}) for d in range(3)]
            assert sorted(varying) == [1, 1, 4]


def test_a_mesh_may_split_a_physical_axis_of_a_tpu() -> None:
    for left, right in arrange(tpus((4, 4, 1)), MeshSpec(data=8, model=2).sizes(16)).reshape(8, 2):
        assert sum(abs(a - b) for a, b in zip(left.coords, right.coords, strict=True)) == 1


def test_granules_of_different_sizes_are_refused() -> None:
    devices = tpus((2, 2, 2), slice_index=0) + tpus((2, 2, 1), slice_index=1)
    with raises(MeshError, "0: 8"):
        arrange(devices, MeshSpec(data=-1).sizes(12))


@examples()
@given(SPECS, st.none() | st.sampled_from(AXES))
def test_a_spec_survives_yaml(spec: MeshSpec, free: str | None) -> None:
    spec = spec if free is None else replace(spec, **{free: -1})
    assert MeshSpec.from_dict(parse_yaml(yaml.safe_dump(spec.to_dict()))) == spec
    assert hash(MeshSpec.from_dict(spec.to_dict())) == hash(spec)


@examples()
@given(SPECS, st.booleans(), st.integers(1, 128))
def test_what_an_error_says_would_fit_fits(spec: MeshSpec, free: bool, devices: int) -> None:
    asked = {**spec.to_dict(), "data": -1} if free else spec.to_dict()
    try:
        assert math.prod(MeshSpec(**asked).sizes(devices).values()) == devices
    except MeshError as error:
        fits = str(error).partition("What fits: ")[2]
        changes = [{**asked, axis: int(size)} for axis, size in re.findall(r"(\w+)=(\d+)", fits)]
        products = [{"data": -1, "model": int(size)} for size in re.findall(r"\d+", fits)] if free else []
        for change in [*changes, *products, {"data": devices}]:
            assert math.prod(MeshSpec(**change).sizes(devices).values()) == devices
