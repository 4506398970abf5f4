"""Names of topologies."""

from __future__ import annotations

import pytest

from jaxpar.errors import MeshError
from jaxpar.topology import Topology


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:4x4", 16),
        ("v5p:16x16x16", 4096),
        ("v4:2x2x4", 16),
        ("v6e:16x16", 256),
        ("tpu7x:4x4x4", 128),
        ("v5e:4x4*2", 32),
    ],
)
def test_a_name_tells_its_devices_and_comes_back(name: str, devices: int) -> None:
    assert Topology.parse(name).devices == devices
    assert str(Topology.parse(name)) == name


KNOWN = "v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:4x4x4"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v5x:4x4", f"unknown accelerator 'v5x' in 'v5x:4x4'. Did you mean 'v5p'? Known are {KNOWN}."),
        ("v5e", f"'v5e' names no topology. Remedy: write KIND:SHAPE in chips, or KIND:SHAPE*SLICES, as {KNOWN}."),
        ("v5e:4x4x4", "'v5e:4x4x4': a v5e slice has 2 dims of 1 chip or more, but 4x4x4 has 3. Remedy: as v5e:4x4."),
        ("v4:2x0x2", "'v4:2x0x2': a v4 slice has 3 dims of 1 chip or more, but 2x0x2 has a 0. Remedy: as v4:4x4x4."),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name: str, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        Topology.parse(name)
    assert str(caught.value) == text
