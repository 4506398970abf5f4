"""``roofline``: how fast a program could run at best on hardware that is not here, from what its audit counts.

**It is a model, not a measurement.** It knows peaks and bytes; it knows no latency, no kernel, no congestion. Trust it to say
which resource binds, and to compare two layouts of one model; run the program to know how long it takes. The whole model:

- compute = (matmul + kernel FLOPs) / the peak matmul rate of ``dtype``. Elementwise work costs only its HBM traffic.
- HBM = bytes / peak bandwidth; the audit's bytes are an upper bound. Compute and HBM traffic overlap perfectly, so the larger
  of the two is the *work*.
- A collective takes what :mod:`jaxpar.sharding.hardware.links` says. Without compute scheduled beside it, all of that is *exposed*.
- With compute beside it, it is hidden for as long as that compute takes, at the average pace of the program (work / FLOPs);
  what it takes longer is *stalled*. Beside work without FLOPs it is hidden whole.
- Transfers wait for each other where they share a link, and not elsewhere: the busiest link decides. Exposed ones add up, but of permutes that are on
  their way together the busiest link counts.
- step = exposed + max(work + stalled, overlapped), where *stalled* and *overlapped* (all of the transfers that have compute
  beside them) are those of the busiest link.
- MFU = FLOPs / (step · peak · devices).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective
from jaxpar.analysis.units import show_bytes
from jaxpar.sharding.hardware.accelerators import accelerator
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology

_COLUMNS = ("resource", "time", "hidden", "stalled", "exposed", "what")


@dataclass(frozen=True)
class Transfers:
    """All collectives over the same mesh axes, in one step.

    Attributes:
      axes: the mesh axes.
      levels: the links that they run on, slowest first: ``DCN``, ``ICI`` or ``NVLink``, ``chip``.
      count: executions.
      wire_bytes: bytes that one device sends.
      hidden: seconds under the compute that is scheduled beside them.
      stalled: seconds by which they outlast that compute.
      exposed: seconds with no compute beside them.
    """

    axes: tuple[str, ...]
    levels: tuple[str, ...]
    count: int
    wire_bytes: float
    hidden: float
    stalled: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Time on the links, hidden or not."""
        return self.hidden + self.stalled + self.exposed


@dataclass(frozen=True)
class Roofline:
    """One step on one topology by the model of :mod:`jaxpar.analysis.roofline`; all times in seconds.

    Attributes:
      topology, device, devices: what it runs on.
      dtype: whose peak matmul rate is taken.
      flops: of one device, matmuls and kernels.
      hbm_bytes: of one device.
      compute, hbm: what FLOPs and main memory take.
      transfers: what the links take, by mesh axes, longest first.
      overlapped, stalled: of the transfers with compute beside them, on the busiest link: all of their time, and that by
        which they outlast the compute.
      exposed: transfers with no compute beside them.
      step: exposed + max(max(compute, hbm) + stalled, overlapped).
      bound: what takes most of the step: ``compute``, ``HBM``, ``links over data``; ``nothing`` in an empty program.
      mfu: useful FLOPs over what the devices could do in the step; ``None`` where either is not known.
      mfu_of: ``the model's FLOPs``, or ``the program's FLOPs``, which count recomputation as useful.
      tokens_per_second: over all devices, where the tokens of a step were given.
      missing: what the audit could not count. If there is any, ``step`` is a lower bound, ``mfu`` and
        ``tokens_per_second`` are upper bounds.
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

    def headline(self) -> str:
        """The step in a line or two; what is only a bound says so."""
        least, most = ("≥ ", "≤ ") if self.missing else ("", "")
        text = f"step {least}{show_time(self.step)} on {self.topology} ({self.devices} × {self.device}), bound by {self.bound}"
        text += f"; MFU {'not known' if self.mfu is None else f'{most}{self.mfu:.1%} ({self.mfu_of}, {self.dtype})'}"
        if self.tokens_per_second is not None:
            text += f"; {most}{self.tokens_per_second:,.0f} tokens/s"
        if self.missing:
            text += f"\nLOWER BOUND of the step: {'; '.join(self.missing)}"
        return text

    def rows(self) -> list[tuple[str, ...]]:
        """Resource, its time, of which hidden, stalled and exposed, and what it does."""
        hbm = f"at most {show_bytes(self.hbm_bytes)}"
        rows: list[tuple[str, ...]] = [
            ("compute", show_time(self.compute), "", "", "", f"{self.flops:.4g} FLOPs"),
            ("HBM", show_time(self.hbm), "", "", "", hbm),
        ]
        for t in self.transfers:
            what = f"{show_bytes(round(t.wire_bytes))} in {t.count} collective{'s' * (t.count != 1)} on {' + '.join(t.levels)}"
            times = (show_time(s) for s in (t.seconds, t.hidden, t.stalled, t.exposed))
            rows.append((f"links over {'+'.join(t.axes)}", *times, what))
        return rows

    def __str__(self) -> str:
        rows = [_COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"A model, not a measurement: {self.headline()}", *lines]) + "\n"

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        table = row(_COLUMNS, "th") + "".join(row(cells, "td") for cells in self.rows())
        head = html.escape(f"A model, not a measurement: {self.headline()}")
        return f"<div><b>{head}</b><table>{table}</table></div>"

    def to_json(self) -> str:
        """Every field as JSON."""
        return json.dumps(asdict(self), indent=1)


def show_time(seconds: float) -> str:
    """A duration in the unit that suits it.

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
) -> Roofline:
    """How long one run of an audited program would take on a topology, and what would bind it. A model: see the module.

    Args:
      report: the audit of one step, with the mesh it was compiled for, outermost axis first.
      topology: the hardware, or its name, as ``"v5e:4x4"``; it need not be the one that the program was compiled for.
      tokens: of one step over all devices, for ``tokens_per_second``.
      model_flops: FLOPs of one step over all devices that the model needs, without recomputation; the MFU is of these.
        Without it the MFU is of the FLOPs that the program runs.
      dtype: of the matmuls' operands, one of ``jaxpar.sharding.hardware.accelerators.DTYPES``.

    Raises:
      MeshError: the audit's mesh has another size than the topology, or no such topology.
      PlanError: unknown accelerator, no matmul rate for ``dtype``, or a slice larger than its pod.

    >>> report = Audit({"data": 4}, 2 * 1024**3, 0, 6 * 1024**2, (), (), (), (), {})  # a matmul of 1024 × 1024 in bf16
    >>> print(roofline(report, "v5e:2x2", tokens=1024).headline())
    step 10.9 µs on v5e:2x2 (4 × TPU v5e), bound by compute; MFU 100.0% (the program's FLOPs, bf16); 93,936,920 tokens/s
    """
    where = Topology.parse(topology) if isinstance(topology, str) else topology
    device = accelerator(where.kind)
    peak = device.rate(dtype)
    links = Links.of(where, device, report.mesh)
    flops = report.matmul_flops + report.kernel_flops
    compute, hbm = flops / peak, report.hbm_bytes / device.hbm_bandwidth
    work = max(compute, hbm)
    timed = _times(report.collectives, links, work / flops if flops else 0.0)
    transfers = _by_axes(timed)
    busiest, stalled = _busiest(timed)
    exposed = sum(t.transfers.exposed for t in timed)
    step = exposed + max(work + stalled, busiest)
    # FLOPs that were not all counted tell nothing of an MFU, unless the model's are known.
    missing = _missing(report)
    useful = model_flops if model_flops is not None else None if missing else flops * where.devices
    return Roofline(
        topology=str(where),
        device=device.name,
        devices=where.devices,
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
        mfu=useful / (step * peak * where.devices) if useful is not None and step else None,
        mfu_of="the program's FLOPs" if model_flops is None else "the model's FLOPs",
        tokens_per_second=tokens / step if tokens is not None and step else None,
        missing=missing,
    )


def time_each(report: Audit, topology: Topology | str, *, dtype: str = "bf16") -> tuple[Transfers, ...]:
    """What each of ``report.collectives`` takes in one step by the same model, in their order. Raises what that does.

    >>> time_each(Audit({"data": 4}, 0, 0, 0, (), (), (), (), {}), "v5e:2x2")
    ()
    """
    where = Topology.parse(topology) if isinstance(topology, str) else topology
    device = accelerator(where.kind)
    flops = report.matmul_flops + report.kernel_flops
    work = max(flops / device.rate(dtype), report.hbm_bytes / device.hbm_bandwidth)
    links = Links.of(where, device, report.mesh)
    return tuple(one.transfers for one in _times(report.collectives, links, work / flops if flops else 0.0))


@dataclass(frozen=True)
class _Timed:
    """One collective's transfers, and how long each link is busy with them, as a part of their time."""

    transfers: Transfers
    queues: Mapping[str, float]


def _times(collectives: Sequence[Collective], links: Links, pace: float) -> list[_Timed]:
    """What each takes. Of exposed permutes that are on their way together, the busiest link's counts."""
    timed = [_time(c, links, pace) for c in collectives]
    flights: dict[int, list[int]] = {}
    for n, c in enumerate(collectives):
        if c.flight is not None:
            flights.setdefault(c.flight, []).append(n)
    for members in flights.values():
        busy: dict[str, float] = {}
        for n in members:
            for queue, share in timed[n].queues.items():
                busy[queue] = busy.get(queue, 0.0) + timed[n].transfers.exposed * share
        alone = sum(timed[n].transfers.exposed for n in members)
        together = max(busy.values(), default=0.0) / alone if alone else 1.0
        for n in members:
            transfers = replace(timed[n].transfers, exposed=timed[n].transfers.exposed * together)
            timed[n] = replace(timed[n], transfers=transfers)
    return timed


def _time(c: Collective, links: Links, pace: float) -> _Timed:
    """What a collective takes in one step; ``pace`` is the seconds that a FLOP takes in this program."""
    phases = links.phases(c)
    once = sum(phase.seconds for phase in phases)
    exposed = once * c.exposed_bytes / c.wire_bytes if c.wire_bytes else 0.0
    covered = max(once - exposed, 0.0)  # less rounding
    hidden = min(covered, c.beside_flops * pace) if c.beside_flops else covered
    transfers = Transfers(
        axes=c.axes,
        levels=tuple(phase.level for phase in phases),
        count=c.count,
        wire_bytes=c.total_wire_bytes,
        hidden=hidden * c.count,
        stalled=(covered - hidden) * c.count,
        exposed=exposed * c.count,
    )
    queues: dict[str, float] = {}
    for phase in phases:
        for queue, seconds in phase.queues.items():
            queues[queue] = queues.get(queue, 0.0) + (seconds / once if once else 0.0)
    return _Timed(transfers, queues)


def _by_axes(timed: list[_Timed]) -> tuple[Transfers, ...]:
    together: dict[tuple[str, ...], list[Transfers]] = {}
    for one in timed:
        together.setdefault(one.transfers.axes, []).append(one.transfers)
    sums = (
        Transfers(
            axes=axes,
            levels=tuple(dict.fromkeys(level for t in same for level in t.levels)),
            count=sum(t.count for t in same),
            wire_bytes=sum(t.wire_bytes for t in same),
            hidden=sum(t.hidden for t in same),
            stalled=sum(t.stalled for t in same),
            exposed=sum(t.exposed for t in same),
        )
        for axes, same in together.items()
    )
    return tuple(sorted(sums, key=lambda t: -t.seconds))


def _busiest(timed: list[_Timed]) -> tuple[float, float]:
    """Of the busiest link: the seconds of transfers with compute beside them, and those by which they outlast it."""
    busy: dict[str, float] = {}
    stalled: dict[str, float] = {}
    for one in timed:
        for queue, share in one.queues.items():
            busy[queue] = busy.get(queue, 0.0) + (one.transfers.hidden + one.transfers.stalled) * share
            stalled[queue] = stalled.get(queue, 0.0) + one.transfers.stalled * share
    return max(busy.values(), default=0.0), max(stalled.values(), default=0.0)


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
        found.append(f"loops of unknown length count as one run ({', '.join(report.unknown_loops)})")
    if report.silent_kernels:
        found.append(f"kernels that state no FLOPs count as none ({', '.join(report.silent_kernels)})")
    return tuple(found)
