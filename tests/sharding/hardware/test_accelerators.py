"""The table of accelerators: every device name finds its entry, every figure has a source, and there is no second
table."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_texts import raises
from interpreters import python

from jaxpar.app.train.metrics import peak_flops
from jaxpar.errors import PlanError
from jaxpar.sharding.hardware.accelerators import ACCELERATORS, accelerator, of_device
from jaxpar.sharding.hardware.topology import Topology

ROOT = Path(__file__).parents[3]
KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200")


def test_the_table_holds_the_devices_people_train_on() -> None:
    assert tuple(ACCELERATORS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_has_a_source_and_no_source_is_left_over(kind: str) -> None:
    entry = ACCELERATORS[kind]
    assert set(entry.sources) == set(entry.figures)
    assert all(entry.sources.values())


@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_in_plain_units_and_plausible(kind: str) -> None:
    entry = ACCELERATORS[kind]
    assert 1e14 < entry.bf16 < 1e16
    assert 1e10 < entry.hbm_bytes < 1e12
    # Each step away from the chip is slower: memory, links, network.
    assert entry.hbm_bandwidth > entry.link_bandwidth > entry.network_bandwidth > 1e9
    assert entry.fp32 is not None and entry.fp32 < entry.bf16


@pytest.mark.parametrize(
    ("device_kind", "kind", "bf16"),
    [
        ("TPU v4", "v4", 275e12),
        ("TPU v5 lite", "v5e", 197e12),
        ("TPU v5", "v5p", 459e12),
        ("TPU v5p", "v5p", 459e12),
        ("TPU v6 lite", "v6e", 918e12),
        ("TPU7x", "tpu7x", 1153.5e12),
        ("NVIDIA A100-SXM4-80GB", "a100", 312e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA H200", "h200", 989e12),
        ("NVIDIA B200", "b200", 2250e12),
    ],
)
def test_jax_device_kinds_find_their_entry(device_kind: str, kind: str, bf16: float) -> None:
    assert accelerator(device_kind) is accelerator(kind)
    assert peak_flops(device_kind) == accelerator(kind).rate("bf16") == bf16


@pytest.mark.parametrize("name", ["cpu", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_a_similar_device_is_not_taken_for_one_in_the_table(name: str) -> None:
    assert of_device(name) is None and peak_flops(name) is None


def test_every_topology_is_of_a_known_accelerator() -> None:
    for name in ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"):
        topology = Topology.parse(name)
        assert accelerator(topology.kind) is accelerator(topology.device_kind)
        assert len(topology.shape) == accelerator(topology.kind).torus


@pytest.mark.parametrize("name", ["v5", "M3"])
def test_an_unknown_accelerator_says_which_there_are(name: str) -> None:
    with raises(PlanError, repr(name)):
        accelerator(name)


def test_a_rate_that_is_not_there_says_which_are() -> None:
    with raises(PlanError, "fp8", "NVIDIA"):
        accelerator("a100").rate("fp8")
    with raises(PlanError, "bfloat16"):
        accelerator("v5e").rate("bfloat16")


def test_the_table_is_read_without_jax() -> None:
    code = "import jaxpar.sharding.hardware.accelerators, sys; print('jax' in sys.modules)"
    assert python(code) == "False\n"


def test_the_documented_table_is_the_table() -> None:
    text = (ROOT / "docs" / "reference" / "accelerators.md").read_text(encoding="utf-8")
    for a in ACCELERATORS.values():
        rates = " | ".join("–" if r is None else f"{r / 1e12:.4g}" for r in (a.bf16, a.fp8, a.int8, a.tf32, a.fp32))
        memory = f"{a.hbm_bytes / 2**30:.1f} GiB | {a.hbm_bandwidth / 1e9:.0f}"
        fabric = f"{a.torus}-dim torus" if a.torus else "NVLink"
        links = f"{fabric} | {a.link_bandwidth / 1e9:.0f} | {a.network_bandwidth / 1e9:.4g}"
        assert f"| {a.kind} | {rates} | {memory} | {links} |" in text, a.kind
