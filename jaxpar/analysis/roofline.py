"""``roofline``: the best possible step time of a program on hardware that is not present, from the program's audit.

**It is a model, not a measurement.** It knows peak rates and bytes; it ignores latency, kernel efficiency and
congestion. Use it to find which resource bounds the step and to compare two layouts of one model. To know the step
time, run the program. The complete model:

- compute = (matmul + kernel FLOPs) / the peak matmul rate of ``dtype``. Elementwise work costs only its HBM traffic.
- HBM = bytes / peak bandwidth. The audit's bytes are an upper bound. Compute and HBM traffic overlap perfectly, so the
  *work* takes as long as the larger of the two.
- :mod:`jaxpar.sharding.hardware.links` gives the time of a collective. If it overlaps with no compute, all of its time
  is *exposed*.
- A collective that overlaps with compute is *hidden* for as long as that compute takes, at the average rate of the
  program (work / FLOPs). The rest of its time is *stalled*. A collective that overlaps with work without FLOPs is
  hidden completely.
- Transfers on the same link run one after the other; transfers on different links overlap, so the busiest link decides.
  Exposed transfers add up, except that permutes in flight at the same time count as the time of their busiest link.
- step = exposed + max(work + stalled, overlapped). *stalled* and *overlapped* are the times of the busiest link;
  *overlapped* is its time for all transfers that overlap with compute.
- MFU = FLOPs / (step · peak · devices).
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective
from jaxpar.analysis.units import html_table, show_bytes, table_lines
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.utils.terminal import fit

_COLUMNS = ("resource", "time", "hidden", "stalled", "exposed", "what")


@dataclass(frozen=True)
class Transfers:
    """All collectives over the same mesh axes, in one step.

    Attributes:
      axes: the mesh axes.
      levels: the links that they use, slowest first: ``DCN``, ``ICI`` or ``NVLink``, ``chip``.
      count: executions.
      wire_bytes: bytes that one device sends.
      hidden: seconds that overlap with compute.
      stalled: seconds by which they outlast the compute that they overlap with.
      exposed: seconds of transfers that overlap with no compute.
      network_seconds: seconds on the network between slices or hosts, hidden or not.
      network_bytes: bytes that one device sends through it.
    """

    axes: tuple[str, ...]
    levels: tuple[str, ...]
    count: int
    wire_bytes: float
    hidden: float
    stalled: float
    exposed: float
    network_seconds: float = 0.0
    network_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds on the links, hidden or not."""
        return self.hidden + self.stalled + self.exposed


@dataclass(frozen=True)
class Roofline:
    """One step on one topology by the model of :mod:`jaxpar.analysis.roofline`; all times in seconds.

    Attributes:
      topology, device, devices: the hardware and the number of devices.
      dtype: the dtype of the peak matmul rate.
      flops: matmul and kernel FLOPs of one device.
      hbm_bytes: bytes that one device moves to and from main memory.
      compute, hbm: the time of the FLOPs and of the memory traffic.
      transfers: the time on the links, by mesh axes, longest first.
      overlapped: on the busiest link, the time of all transfers that overlap with compute.
      stalled: on the busiest link, the time by which those transfers outlast the compute.
      exposed: the time of transfers that overlap with no compute.
      step: exposed + max(max(compute, hbm) + stalled, overlapped).
      bound: the resource that takes most of the step: ``compute``, ``HBM``, or links, such as ``links over data``;
        ``nothing`` in an empty program.
      mfu: useful FLOPs divided by the FLOPs that the devices could do in the step; ``None`` if either is unknown.
      mfu_of: ``the model's FLOPs``, or ``the program's FLOPs``, which count recomputation as useful.
      tokens_per_second: over all devices; ``None`` unless the tokens of a step were given.
      imbalance: the load of the busiest device divided by the balanced load, as in the audit.
      missing: what the audit could not count. If there is any, ``step`` is a lower bound, and ``mfu`` and
        ``tokens_per_second`` are upper bounds.

    >>> from jaxpar.analysis import Audit
    >>> found = roofline(Audit({"data": 4}, 2 * 1024**3, 0, 0, (), (), (), (), {}), "v5e:2x2", model_flops=4 * 1024**3)
    >>> found.bound, f"{found.mfu:.0%}"
    ('compute', '50%')
    """

    topology: str
    device: str
    devices: int
    dtype: str
    flops: int
    hbm_bytes: int
    compute: float
    hbm: float
    transfers: tuple[Transfers, ...]
    overlapped: float
    stalled: float
    exposed: float
    step: float
    bound: str
    mfu: float | None
    mfu_of: str
    tokens_per_second: float | None
    missing: tuple[str, ...]
    imbalance: float = 1.0

    def headline(self) -> str:
        """Returns the step in one or two lines, with bounds marked as such."""
        least, most = ("≥ ", "≤ ") if self.missing else ("", "")
        hardware = f"{self.topology} ({self.devices} × {self.device})"
        hardware += f" at a load imbalance of {self.imbalance:g}" if self.imbalance != 1 else ""
        text = f"step {least}{show_time(self.step)} on {hardware}, bound by {self.bound}"
        text += f"; MFU {'unknown' if self.mfu is None else f'{most}{self.mfu:.1%} ({self.mfu_of}, {self.dtype})'}"
        if self.tokens_per_second is not None:
            text += f"; {most}{self.tokens_per_second:,.0f} tokens/s"
        if self.missing:
            text += f"\nLOWER BOUND of the step: {'; '.join(self.missing)}"
        return text

    def rows(self) -> list[tuple[str, ...]]:
        """Returns table cells: resource, its time, of which hidden, stalled and exposed, and what it does."""
        rows: list[tuple[str, ...]] = [
            ("compute", show_time(self.compute), "", "", "", f"{self.flops:.4g} FLOPs"),
            ("HBM", show_time(self.hbm), "", "", "", f"at most {show_bytes(self.hbm_bytes)}"),
        ]
        for t in self.transfers:
            counted = f"{t.count} collective{'s' * (t.count != 1)}"
            what = f"{show_bytes(round(t.wire_bytes))} in {counted} on {' + '.join(t.levels)}"
            times = (show_time(s) for s in (t.seconds, t.hidden, t.stalled, t.exposed))
            rows.append((f"links over {'+'.join(t.axes)}", *times, what))
        return rows

    def to_text(self, width: int | None = None) -> str:
        """Returns :meth:`headline` and :meth:`rows`, in lines of at most ``width`` columns."""
        head = f"A model, not a measurement: {self.headline()}"
        return fit("\n".join([head, *table_lines([_COLUMNS, *self.rows()], width), ""]), width)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        head = html.escape(f"A model, not a measurement: {self.headline()}")
        return f"<div><b>{head}</b>{html_table(self.rows(), _COLUMNS)}</div>"

    def to_json(self) -> str:
        """Returns every field as JSON."""
        return json.dumps(asdict(self), indent=1)


def show_time(seconds: float) -> str:
    """Returns a duration as text, in a suitable unit.

    >>> show_time(0.00123), show_time(2.5), show_time(0)
    ('1.23 ms', '2.5 s', '0 s')
    """
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * s >= 1), (1e9, "ns"))
    return f"{seconds * scale:.3g} {unit}" if seconds else "0 s"


def roofline(
    report: Audit,
    topology: Topology | str,
    *,
    tokens: float | None = None,
    model_flops: float | None = None,
    dtype: str = "bf16",
    rings: Sequence[str] = (),
) -> Roofline:
    """Returns an estimate of how long one run of an audited program takes on a topology, and of what bounds it.

    The module's docstring describes the model.

    Args:
      report: the audit of one step, with the mesh that the program was compiled for, outermost axis first.
      topology: the hardware, or its name, such as ``"v5e:4x4"``. It may differ from the one that the program was
        compiled for.
      tokens: tokens of one step over all devices, for ``tokens_per_second``.
      model_flops: FLOPs of one step over all devices that the model needs, without recomputation, for the MFU. By
        default the MFU uses the FLOPs that the program runs.
      dtype: of the matmuls' operands, one of ``jaxpar.sharding.hardware.accelerators.DTYPES``.
      rings: the mesh axes whose devices form closed rings, as in :class:`jaxpar.Layout`.

    Returns:
      The :class:`Roofline` of one step.

    Raises:
      MeshError: the audit's mesh has another size than the topology, the topology is unknown, or the devices of one of
        ``rings`` form no closed ring.
      PlanError: no matmul rate for ``dtype``, or a slice larger than its pod.

    >>> report = Audit({"data": 4}, 2 * 1024**3, 0, 6 * 1024**2, (), (), (), (), {})  # a matmul of 1024 × 1024 in bf16
    >>> print(roofline(report, "v5e:2x2", tokens=1024).headline())
    step 10.9 µs on v5e:2x2 (4 × TPU v5e), bound by compute; MFU 100.0% (the program's FLOPs, bf16); 93,936,920 tokens/s
    """
    hardware = Topology.parse(str(topology))
    compute, hbm, timed = _timed(report, hardware, dtype, rings)
    device, flops, work = hardware.accelerator, report.matmul_flops + report.kernel_flops, max(compute, hbm)
    transfers = _by_axes(timed)
    busiest, stalled = _busiest(timed, lambda t: t.hidden + t.stalled), _busiest(timed, lambda t: t.stalled)
    exposed = sum(t.transfers.exposed for t in timed)
    step = exposed + max(work + stalled, busiest)
    # With FLOPs missing from the audit there is no MFU, unless the caller gives the model's FLOPs.
    missing = _missing(report)
    useful = model_flops if model_flops is not None else None if missing else flops * hardware.devices
    return Roofline(
        topology=str(hardware),
        device=device.name,
        devices=hardware.devices,
        dtype=dtype,
        flops=flops,
        hbm_bytes=report.hbm_bytes,
        compute=compute,
        hbm=hbm,
        transfers=transfers,
        overlapped=busiest,
        stalled=stalled,
        exposed=exposed,
        step=step,
        bound=_bound(compute, hbm, step, transfers),
        mfu=useful / (step * device.rate(dtype) * hardware.devices) if useful is not None and step else None,
        mfu_of="the program's FLOPs" if model_flops is None else "the model's FLOPs",
        tokens_per_second=tokens / step if tokens is not None and step else None,
        missing=missing,
        imbalance=report.imbalance,
    )


def time_each(
    report: Audit, topology: Topology | str, *, dtype: str = "bf16", rings: Sequence[str] = ()
) -> tuple[Transfers, ...]:
    """Returns the time of each of ``report.collectives`` in one step by the same model, in their order.

    Arguments and errors are those of :func:`roofline`.

    >>> time_each(Audit({"data": 4}, 0, 0, 0, (), (), (), (), {}), "v5e:2x2")
    ()
    """
    return tuple(one.transfers for one in _timed(report, Topology.parse(str(topology)), dtype, rings)[2])


@dataclass(frozen=True)
class _Timed:
    """The transfers of one collective, and the fraction of their time for which each link is busy."""

    transfers: Transfers
    queues: Mapping[str, float]


def _timed(report: Audit, hardware: Topology, dtype: str, rings: Sequence[str]) -> tuple[float, float, list[_Timed]]:
    """Returns the seconds of the FLOPs and of the memory traffic, and the transfers of each collective.

    Exposed permutes in flight together take the time of their busiest link.
    """
    flops, device = report.matmul_flops + report.kernel_flops, hardware.accelerator
    compute, hbm = flops / device.rate(dtype), report.hbm_bytes / device.hbm_bandwidth
    links = Links.of(hardware, report.mesh, rings)
    pace = max(compute, hbm) / flops if flops else 0.0
    timed = [_time(c, links, pace) for c in report.collectives]
    flights: dict[int, list[int]] = {}
    for n, c in enumerate(report.collectives):
        if c.flight is not None:
            flights.setdefault(c.flight, []).append(n)
    for members in flights.values():
        together = _busiest((timed[n] for n in members), lambda t: t.exposed)
        sequential = sum(timed[n].transfers.exposed for n in members)
        ratio = together / sequential if sequential else 1.0
        for n in members:
            transfers = replace(timed[n].transfers, exposed=timed[n].transfers.exposed * ratio)
            timed[n] = replace(timed[n], transfers=transfers)
    return compute, hbm, timed


def _time(c: Collective, links: Links, pace: float) -> _Timed:
    """Time one collective in one step; ``pace`` is seconds per FLOP in this program."""
    phases = links.phases(c.kind, c.axes, c.wire_bytes, c.between_slices, c.pairs)
    seconds_once = sum(phase.seconds for phase in phases)
    exposed = seconds_once * c.exposed_bytes / c.wire_bytes if c.wire_bytes else 0.0
    overlapped_time = max(seconds_once - exposed, 0.0)  # rounding may make it negative
    hidden = min(overlapped_time, c.beside_flops * pace) if c.beside_flops else overlapped_time
    network = c.count * sum(phase.network_seconds for phase in phases)
    transfers = Transfers(
        axes=c.axes,
        levels=tuple(phase.level for phase in phases),
        count=c.count,
        wire_bytes=c.total_wire_bytes,
        hidden=hidden * c.count,
        stalled=(overlapped_time - hidden) * c.count,
        exposed=exposed * c.count,
        network_seconds=network,
        network_bytes=network * links.accelerator.network_bandwidth,
    )
    # The phases are of different levels, so no queue occurs twice.
    queues = {queue: s / (seconds_once or 1.0) for phase in phases for queue, s in phase.queues.items()}
    return _Timed(transfers, queues)


def _by_axes(timed: list[_Timed]) -> tuple[Transfers, ...]:
    groups: dict[tuple[str, ...], list[Transfers]] = {}
    for one in timed:
        groups.setdefault(one.transfers.axes, []).append(one.transfers)
    found = []
    for axes, same in groups.items():
        levels = tuple(dict.fromkeys(level for t in same for level in t.levels))
        sums: dict[str, Any] = {name: sum(getattr(t, name) for t in same) for name in _SUMMED}
        found.append(Transfers(axes, levels, **sums))
    return tuple(sorted(found, key=lambda t: -t.seconds))


_SUMMED = ("count", "wire_bytes", "hidden", "stalled", "exposed", "network_seconds", "network_bytes")


def _busiest(timed: Iterable[_Timed], seconds: Callable[[Transfers], float]) -> float:
    """Returns these seconds of the transfers, on their busiest link."""
    busy: dict[str, float] = {}
    for one in timed:
        for queue, share in one.queues.items():
            busy[queue] = busy.get(queue, 0.0) + seconds(one.transfers) * share
    return max(busy.values(), default=0.0)


def _bound(compute: float, hbm: float, step: float, transfers: tuple[Transfers, ...]) -> str:
    if not step:
        return "nothing"
    work = max(compute, hbm)
    if step - work > work:
        longest = max(transfers, key=lambda t: (t.exposed + t.stalled, t.seconds))
        return f"links over {'+'.join(longest.axes)}"
    return "compute" if compute >= hbm else "HBM"


def _missing(report: Audit) -> tuple[str, ...]:
    found = []
    if report.unknown_loops:
        found.append(
            f"loops with an unknown trip count are counted as one iteration ({', '.join(report.unknown_loops)})"
        )
    if report.silent_kernels:
        found.append(f"kernels that report no FLOPs are counted as zero ({', '.join(report.silent_kernels)})")
    return tuple(found)
