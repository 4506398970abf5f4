"""The peak figures of one device of each accelerator, every figure with its source. The only such table in jaxpar.

Figures are **per jax device**: a tpu7x chip is two devices, each with half of the chip's memory and links. They are in
FLOP/s, bytes and bytes/s, dense (without sparsity) and in one direction. They are the vendors' peaks, which a program
approaches but does not exceed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from jaxpar.errors import PlanError, did_you_mean, listing

DTYPES = ("bf16", "fp8", "int8", "tf32", "fp32")
"""The element types for which an accelerator may have a matmul rate."""


@dataclass(frozen=True)
class Accelerator:
    """The peak figures of one jax device.

    A rate is ``None`` where the device lacks it or the vendor does not publish it.

    Attributes:
      kind: the name in a topology, such as ``v5e``.
      name: the product name.
      device_kinds: the full names that jax reports as ``device_kind``. They must match exactly: a PCIe board or a GPU
        partition is another device with other figures.
      bf16, fp8, int8, tf32, fp32: matmul rates in FLOP/s.
      hbm_bytes, hbm_bandwidth: device memory, in bytes and bytes/s.
      torus: the number of dims of the torus that joins the chips; 0 where a switch joins all devices of a host
        (NVLink).
      link_bandwidth: bytes/s that a device sends through one link of the torus (its share, where devices share a chip),
        or into the switch.
      domain: the largest number of chips that one torus or switch joins.
      network_bandwidth: bytes/s that a device sends to another slice or host: its share of the host's network cards.
      wrap: a torus dim closes to a ring if its number of chips is a multiple of ``wrap`` (see :meth:`wraps`).
      chip_bandwidth: bytes/s to the other device of the same chip, where a chip is two devices.
      sources: the source of each figure.
    """

    kind: str
    name: str
    device_kinds: tuple[str, ...]
    bf16: float
    hbm_bytes: float
    hbm_bandwidth: float
    torus: int
    link_bandwidth: float
    domain: int
    network_bandwidth: float
    fp8: float | None = None
    int8: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    wrap: int | None = None
    chip_bandwidth: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def rate(self, dtype: str) -> float:
        """Returns the peak matmul rate in FLOP/s for operands of a dtype, one of ``DTYPES``.

        Raises:
          PlanError: the dtype is unknown, or the accelerator has no rate for it.
        """
        if dtype not in DTYPES:
            raise PlanError(f"unknown dtype {dtype!r}.{did_you_mean(dtype, DTYPES)} Known are {listing(DTYPES)}.")
        rate: float | None = getattr(self, dtype)
        if rate is None:
            known = listing(d for d in DTYPES if getattr(self, d) is not None)
            raise PlanError(f"{self.name} has no matmul rate for {dtype!r}. It has rates for {known}.")
        return rate

    def wraps(self, shape: Sequence[int]) -> tuple[bool, ...]:
        """Returns which dims of a slice close to a ring, for a slice shape in chips.

        >>> accelerator("v5e").wraps((4, 16)), accelerator("v5p").wraps((4, 4, 8)), accelerator("v5p").wraps((2, 2, 4))
        ((False, True), (True, True, True), (False, False, False))
        """
        if self.wrap is None:
            return (False,) * len(shape)
        closed = tuple(n % self.wrap == 0 for n in shape)
        # On a 3-D torus, optical switches join cubes of 4x4x4 chips. A smaller slice has no switch that closes its
        # rings.
        return closed if self.torus < 3 else (all(closed),) * len(shape)

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures that the accelerator has; each is a key of ``sources``."""
        words = ("kind", "name", "device_kinds", "sources")
        return tuple(f.name for f in fields(self) if f.name not in words and getattr(self, f.name) is not None)


def _by(source: str, *figures: str) -> dict[str, str]:
    return dict.fromkeys(figures, source)


# Vendors' pages have no date. Those marked 2026-11 were read then. NVIDIA's pages were not available; their figures
# were compared with copies by third parties, which docs/reference/accelerators.md lists.
_TPU = "https://docs.cloud.google.com/tpu/docs/{} (2026-11)"
_V4, _V5E, _V5P, _V6E, _7X = (_TPU.format(page) for page in ("v4", "v5e", "v5p", "v6e", "tpu7x"))
_PASSES = (
    "derived: bf16 / 6, the passes of jax.lax.Precision.HIGHEST; at jax's default precision fp32 runs at the bf16 rate"
)
_PORTS = "derived: both-way bandwidth of a chip / 2 directions / {} links, {}"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus (2026-11)"
_ISCA = "Jouppi et al., TPU v4, ISCA 2023, table 4, https://arxiv.org/abs/2304.01433 (6 links of 50 GB/s)"
_A100 = "https://www.nvidia.com/en-us/data-center/a100, datasheet of the 80GB SXM"
_H100 = (
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet "
    "(H100 SXM, halved where with sparsity)"
)
_H200 = "https://www.nvidia.com/en-us/data-center/h200 (H200 SXM, halved where with sparsity)"
_B200 = (
    "NVIDIA Blackwell Architecture Technical Brief, "
    "https://resources.nvidia.com/en-us-blackwell-architecture (HGX B200)"
)
_DGX = "https://docs.nvidia.com/dgx/dgx{}-user-guide ({})"
_NVLINK = "derived: both-way NVLink bandwidth of a GPU / 2, {}"

_HOPPER = Accelerator(
    kind="h100",
    name="NVIDIA H100 SXM",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    bf16=989e12,
    fp8=1979e12,
    int8=1979e12,
    tf32=494.5e12,
    fp32=67e12,
    hbm_bytes=80e9,
    hbm_bandwidth=3350e9,
    torus=0,
    link_bandwidth=450e9,
    domain=8,
    network_bandwidth=50e9,
    sources=_by(_H100, "bf16", "fp8", "int8", "tf32", "fp32", "hbm_bytes", "hbm_bandwidth")
    | _by(_NVLINK.format(f"900 GB/s, {_H100}"), "torus", "link_bandwidth")
    | _by(_DGX.format("h100", "8 GPUs, each with a 400 Gbit/s card"), "domain", "network_bandwidth"),
)

_TABLE = (
    Accelerator(
        kind="v4",
        name="TPU v4",
        device_kinds=("TPU v4",),
        bf16=275e12,
        int8=275e12,
        fp32=275e12 / 6,
        hbm_bytes=32 * 2**30,
        hbm_bandwidth=1200e9,
        torus=3,
        wrap=4,
        link_bandwidth=50e9,
        domain=4096,
        network_bandwidth=6.25e9,
        sources=_by(_V4, "bf16", "int8", "hbm_bytes", "hbm_bandwidth", "torus", "domain")
        | _by(_PASSES, "fp32")
        | _by(_ISCA, "link_bandwidth")
        | _by(_BOOK, "wrap")
        | _by(f"'typically', {_BOOK}", "network_bandwidth"),
    ),
    Accelerator(
        kind="v5e",
        name="TPU v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        bf16=197e12,
        int8=393e12,
        fp32=197e12 / 6,
        hbm_bytes=16 * 2**30,
        hbm_bandwidth=819e9,
        torus=2,
        wrap=16,
        link_bandwidth=50e9,
        domain=256,
        network_bandwidth=3.125e9,
        sources=_by(_V5E, "bf16", "int8", "hbm_bandwidth", "torus", "domain")
        | _by(f"{_V5E}, its '16 GB' read as GiB", "hbm_bytes")
        | _by(_PASSES, "fp32")
        | _by(_PORTS.format(4, f"400 GB/s, {_V5E}"), "link_bandwidth")
        | _by(f"derived: 6.4 Tbit/s of a pod / 256 chips, {_V5E}", "network_bandwidth")
        | _by(_BOOK, "wrap"),
    ),
    Accelerator(
        kind="v5p",
        name="TPU v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        bf16=459e12,
        fp8=459e12,
        int8=918e12,
        fp32=459e12 / 6,
        hbm_bytes=95 * 2**30,
        hbm_bandwidth=2765e9,
        torus=3,
        wrap=4,
        link_bandwidth=100e9,
        domain=8960,
        network_bandwidth=6.25e9,
        sources=_by(_V5P, "bf16", "fp8", "hbm_bytes", "hbm_bandwidth", "torus", "wrap", "domain")
        | _by(_BOOK, "int8")
        | _by(_PASSES, "fp32")
        | _by(_PORTS.format(6, f"1200 GB/s, {_V5P}"), "link_bandwidth")
        | _by(f"50 Gbit/s a chip, {_V5P}", "network_bandwidth"),
    ),
    Accelerator(
        kind="v6e",
        name="TPU v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        bf16=918e12,
        fp8=918e12,
        int8=1836e12,
        fp32=918e12 / 6,
        hbm_bytes=32 * 2**30,
        hbm_bandwidth=1638e9,
        torus=2,
        wrap=16,
        link_bandwidth=100e9,
        domain=256,
        network_bandwidth=12.5e9,
        sources=_by(_V6E, "bf16", "int8", "hbm_bandwidth", "torus", "domain")
        | _by(f"the comparison in {_7X}", "fp8", "hbm_bytes")
        | _by(_PASSES, "fp32")
        | _by(_PORTS.format(4, f"800 GB/s, {_V6E}"), "link_bandwidth")
        | _by(f"100 Gbit/s a chip, the comparison in {_7X}", "network_bandwidth")
        | _by(_BOOK, "wrap"),
    ),
    Accelerator(
        kind="tpu7x",
        name="TPU7x",
        device_kinds=("TPU7x",),
        bf16=1153.5e12,
        fp8=2307e12,
        fp32=1153.5e12 / 6,
        hbm_bytes=96 * 2**30,
        hbm_bandwidth=3690e9,
        torus=3,
        wrap=4,
        link_bandwidth=50e9,
        domain=9216,
        network_bandwidth=6.25e9,
        chip_bandwidth=600e9,
        sources=_by(f"half a chip, {_7X}", "bf16", "fp8", "hbm_bytes", "hbm_bandwidth")
        | _by(_7X, "torus", "domain")
        | _by(_PASSES, "fp32")
        | _by(_PORTS.format(6, f"1200 GB/s, halved for a chip's 2 devices, {_7X}"), "link_bandwidth")
        | _by(f"100 Gbit/s a chip, halved, {_7X}", "network_bandwidth")
        | _by(f"6 times one link of the chip, {_7X}; not checked on the page again", "chip_bandwidth")
        | _by(_BOOK, "wrap"),
    ),
    Accelerator(
        kind="a100",
        name="NVIDIA A100 80GB SXM",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        bf16=312e12,
        int8=624e12,
        tf32=156e12,
        fp32=19.5e12,
        hbm_bytes=80e9,
        hbm_bandwidth=2039e9,
        torus=0,
        link_bandwidth=300e9,
        domain=8,
        network_bandwidth=25e9,
        sources=_by(_A100, "bf16", "int8", "tf32", "fp32", "hbm_bytes", "hbm_bandwidth")
        | _by(_NVLINK.format(f"600 GB/s, {_A100}"), "torus", "link_bandwidth")
        | _by(_DGX.format("a100", "8 GPUs, each with a 200 Gbit/s card"), "domain", "network_bandwidth"),
    ),
    _HOPPER,
    replace(
        _HOPPER,
        kind="h200",
        name="NVIDIA H200 SXM",
        device_kinds=("NVIDIA H200",),
        hbm_bytes=141e9,
        hbm_bandwidth=4800e9,
        sources=_by(_H200, *_HOPPER.sources)
        | _by(_NVLINK.format(f"900 GB/s, {_H200}"), "link_bandwidth")
        | _by(_DGX.format("h100", "H200: 8 GPUs, each with a 400 Gbit/s card"), "domain", "network_bandwidth"),
    ),
    Accelerator(
        kind="b200",
        name="NVIDIA B200",
        device_kinds=("NVIDIA B200",),
        bf16=2250e12,
        fp8=4500e12,
        int8=4500e12,
        tf32=1100e12,
        fp32=80e12,
        hbm_bytes=180e9,
        hbm_bandwidth=8000e9,
        torus=0,
        link_bandwidth=900e9,
        domain=8,
        network_bandwidth=50e9,
        sources=_by(_B200, "bf16", "fp8", "int8", "tf32", "fp32")
        | _by(_NVLINK.format(f"1.8 TB/s, {_B200}"), "torus", "link_bandwidth")
        | _by(_DGX.format("b200", "8 GPUs: 1440 GB and 64 TB/s together"), "hbm_bytes", "hbm_bandwidth")
        | _by(_DGX.format("b200", "8 GPUs, each with a 400 Gbit/s card"), "domain", "network_bandwidth"),
    ),
)

ACCELERATORS: Mapping[str, Accelerator] = {a.kind: a for a in _TABLE}
"""Every accelerator that jaxpar knows, by kind."""

_BY_DEVICE_KIND = {name: a for a in _TABLE for name in a.device_kinds}


def of_device(device_kind: str) -> Accelerator | None:
    """Returns the accelerator that jax reports as ``device_kind``, or ``None`` if the table lacks it.

    A similar device is no substitute: its figures may differ.

    >>> of_device("TPU v5 lite").kind, of_device("NVIDIA H100 PCIe")
    ('v5e', None)
    """
    return _BY_DEVICE_KIND.get(device_kind)


def accelerator(name: str) -> Accelerator:
    """Returns an accelerator by its kind in a topology (``v5e``, ``h100``) or by jax's device kind (``TPU v5 lite``).

    Raises:
      PlanError: the accelerator is unknown; the text suggests a close name.

    >>> accelerator("NVIDIA H100 80GB HBM3") is accelerator("h100")
    True
    """
    found = ACCELERATORS.get(name) or of_device(name)
    if found is None:
        hint = did_you_mean(name, (*ACCELERATORS, *_BY_DEVICE_KIND))
        raise PlanError(f"unknown accelerator {name!r}.{hint} Known are {', '.join(ACCELERATORS)}.")
    return found
