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
    fp8: float | None
    int8: float | None
    tf32: float | None
    fp32: float
    hbm_bytes: float
    hbm_bandwidth: float
    torus: int
    wrap: int | None
    link_bandwidth: float
    domain: int
    network_bandwidth: float
    chip_bandwidth: float | None
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
    def chip_devices(self) -> int:
        """The number of jax devices of a chip."""
        return 2 if self.chip_bandwidth else 1

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of all figures that the accelerator has; each is a key of ``sources``."""
        words = ("kind", "name", "device_kinds", "sources")
        return tuple(f.name for f in fields(self) if f.name not in words and getattr(self, f.name) is not None)


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
_DATASHEETS, _RESOURCES = "https://www.nvidia.com/en-us/data-center", "https://resources.nvidia.com"
_SPARSE = "halved where with sparsity"
_DGX = "https://docs.nvidia.com/dgx/dgx{}-user-guide ({})"

_A100 = f"{_DATASHEETS}/a100, datasheet of the 80GB SXM"
_H100 = f"{_RESOURCES}/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100 SXM, {_SPARSE})"
_H200 = f"{_DATASHEETS}/h200 (H200 SXM, {_SPARSE})"
_B200 = f"NVIDIA Blackwell Architecture Technical Brief, {_RESOURCES}/en-us-blackwell-architecture (HGX B200)"

# Kind → the source of most figures, the product name, and jax's device kinds.
_NAMES = {
    "v4": (_V4, "TPU v4", "TPU v4"),
    "v5e": (_V5E, "TPU v5e", "TPU v5 lite", "TPU v5e"),
    "v5p": (_V5P, "TPU v5p", "TPU v5", "TPU v5p"),
    "v6e": (_V6E, "TPU v6e", "TPU v6 lite", "TPU v6e"),
    "tpu7x": (f"half a chip, {_7X}", "TPU7x", "TPU7x"),
    "a100": (_A100, "NVIDIA A100 80GB SXM", "NVIDIA A100-SXM4-80GB"),
    "h100": (_H100, "NVIDIA H100 SXM", "NVIDIA H100 80GB HBM3"),
    "h200": (_H200, "NVIDIA H200 SXM", "NVIDIA H200"),
    "b200": (_B200, "NVIDIA B200", "NVIDIA B200"),
}
_FIGURES = {
    #        bf16       fp8      int8     tf32      fp32           hbm_bytes   hbm_bandwidth
    "v4":    (275e12,    None,    275e12,  None,     275e12 / 6,    32 * 2**30, 1200e9),
    "v5e":   (197e12,    None,    393e12,  None,     197e12 / 6,    16 * 2**30, 819e9),
    "v5p":   (459e12,    459e12,  918e12,  None,     459e12 / 6,    95 * 2**30, 2765e9),
    "v6e":   (918e12,    918e12,  1836e12, None,     918e12 / 6,    32 * 2**30, 1638e9),
    "tpu7x": (1153.5e12, 2307e12, None,    None,     1153.5e12 / 6, 96 * 2**30, 3690e9),
    "a100":  (312e12,    None,    624e12,  156e12,   19.5e12,       80e9,       2039e9),
    "h100":  (989e12,    1979e12, 1979e12, 494.5e12, 67e12,         80e9,       3350e9),
    "h200":  (989e12,    1979e12, 1979e12, 494.5e12, 67e12,         141e9,      4800e9),
    "b200":  (2250e12,   4500e12, 4500e12, 1100e12,  80e12,         180e9,      8000e9),
}  # fmt: skip
_LINKS = {
    #      torus wrap  link_bandwidth domain network_bandwidth chip_bandwidth
    "v4":    (3, 4,    50e9,          4096,  6.25e9,           None),
    "v5e":   (2, 16,   50e9,          256,   3.125e9,          None),
    "v5p":   (3, 4,    100e9,         8960,  6.25e9,           None),
    "v6e":   (2, 16,   100e9,         256,   12.5e9,           None),
    "tpu7x": (3, 4,    50e9,          9216,  6.25e9,           600e9),
    "a100":  (0, None, 300e9,         8,     25e9,             None),
    "h100":  (0, None, 450e9,         8,     50e9,             None),
    "h200":  (0, None, 450e9,         8,     50e9,             None),
    "b200":  (0, None, 900e9,         8,     50e9,             None),
}  # fmt: skip

# The figures that have a source of their own.
_SOURCES: dict[str, dict[str, str]] = {
    "v4": {"link_bandwidth": _ISCA, "network_bandwidth": f"'typically', {_BOOK}"},
    "v5e": {
        "hbm_bytes": f"{_V5E}, its '16 GB' read as GiB",
        "link_bandwidth": _PORTS.format(4, f"400 GB/s, {_V5E}"),
        "network_bandwidth": f"derived: 6.4 Tbit/s of a pod / 256 chips, {_V5E}",
    },
    "v5p": {
        "int8": _BOOK,
        "wrap": _V5P,
        "link_bandwidth": _PORTS.format(6, f"1200 GB/s, {_V5P}"),
        "network_bandwidth": f"50 Gbit/s a chip, {_V5P}",
    },
    "v6e": {
        **dict.fromkeys(("fp8", "hbm_bytes"), f"the comparison in {_7X}"),
        "link_bandwidth": _PORTS.format(4, f"800 GB/s, {_V6E}"),
        "network_bandwidth": f"100 Gbit/s a chip, the comparison in {_7X}",
    },
    "tpu7x": {
        **dict.fromkeys(("torus", "domain"), _7X),
        "link_bandwidth": _PORTS.format(6, f"1200 GB/s, halved for a chip's 2 devices, {_7X}"),
        "network_bandwidth": f"100 Gbit/s a chip, halved, {_7X}",
        "chip_bandwidth": f"6 times one link of the chip, {_7X}; not checked on the page again",
    },
    "b200": dict.fromkeys(("hbm_bytes", "hbm_bandwidth"), _DGX.format("b200", "8 GPUs: 1440 GB and 64 TB/s together")),
}


def _accelerator(kind: str) -> Accelerator:
    """Returns an entry of the tables."""
    sheet, name, *device_kinds = _NAMES[kind]
    made = Accelerator(kind, name, tuple(device_kinds), *_FIGURES[kind], *_LINKS[kind])
    if made.torus:
        shared = {"fp32": _PASSES, "wrap": _BOOK}
    else:
        nvlink = f"derived: both-way NVLink bandwidth of a GPU / 2, {2 * made.link_bandwidth / 1e9:g} GB/s, {sheet}"
        machine = "h100" if kind == "h200" else kind
        card = _DGX.format(machine, f"{made.domain} GPUs, each with a {8 * made.network_bandwidth / 1e9:g} Gbit/s card")
        shared = {"torus": nvlink, "link_bandwidth": nvlink, "domain": card, "network_bandwidth": card}
    return replace(made, sources=dict.fromkeys(made.figures, sheet) | shared | _SOURCES.get(kind, {}))


ACCELERATORS: Mapping[str, Accelerator] = {kind: _accelerator(kind) for kind in _NAMES}
"""Every accelerator that jaxpar knows, by kind."""

_BY_DEVICE_KIND = {name: a for a in ACCELERATORS.values() for name in a.device_kinds}


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
