"""How long one collective keeps which links busy: where the mesh axes lie on the wires, and what each wire carries.

**Where axes lie.** Devices are joined on up to three levels, slowest first: the network between slices or hosts (``DCN``), the
torus of a slice (``ICI``) or the switch of a host (``NVLink``), and the inside of a chip that is two devices (``chip``). Axes
come outermost first. The outermost take the factors that cross slices (as ``MeshSpec.build`` lays them), the innermost those
inside a chip. Of the torus, the innermost axis first takes whole dims, as many as multiply to its size, or else factors of
dims; what is left goes to the next axis. ``jax.experimental.mesh_utils`` follows the same principle; where it weighs equal
choices otherwise, two axes swap places here.

**What a torus dim gives.** Each chip has a link either way along each dim. A closed ring sends both ways, an open line ends up
one way: its last chip is fed by one link. Where an axis holds only the outer factor of a dim, the groups of the factors inside
share the wires between them. A collective over several dims uses all of them at once.

**What is sent.** The bytes are the audit's (``Collective.wire_bytes``), those of the best ring. Over several levels they are
split as the hierarchical algorithm does it (gather across the outer level first, while the pieces are small), one level after
the other. A program for several TPU slices is compiled that way, and says itself which part crosses them. All-to-all on a torus
pays for its detours: on n chips, ⌊n²/4⌋ pairs cross the middle. A permute's messages go each their own way, one dim of the torus after the other,
and wait for each other where they share a link; one that may cross slices is taken to cross them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxpar.errors import MeshError, PlanError
from jaxpar.sharding.device_order import take
from jaxpar.sharding.hardware.accelerators import Accelerator, of_device
from jaxpar.sharding.hardware.topology import Topology, device_of
from jaxpar.sharding.hardware.torus import Torus

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


class Sent(Protocol):
    """What is asked of a collective: its kind, as XLA names it, the mesh axes, bytes that a device sends, and who sends to whom in a permute."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def wire_bytes(self) -> float: ...
    @property
    def between_slices(self) -> bool | None: ...
    @property
    def pairs(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True)
class Planned:
    """A collective of which no program tells yet."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    between_slices: bool | None = None
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Phase:
    """A part of a collective: the links of one level, and for how many seconds it keeps which wires (``queues``) busy."""

    level: str
    queues: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Until the last of them is done."""
        return max(self.queues.values(), default=0.0)


class Links:
    """The links of a group of devices under a mesh.

    Args:
      accelerator: what the devices are.
      slices: how many slices, or hosts of GPUs.
      shape: of a slice in chips, one number for the GPUs of a host.
      pair: jax devices on a chip.
      mesh: axis → size, outermost first; the product is ``slices · chips · pair``.
    """

    def __init__(self, accelerator: Accelerator, slices: int, shape: Sequence[int], pair: int, mesh: Mapping[str, int]):
        outer = take(mesh, slices, mesh)
        left = {axis: size // outer[axis] for axis, size in mesh.items()}
        inner = take(left, pair, reversed(list(mesh)))
        middle = {axis: size // inner[axis] for axis, size in left.items()}
        fabric = "ICI" if accelerator.torus else "NVLink"
        self.accelerator, self.slices, self.shape = accelerator, slices, tuple(shape)
        self.levels = {"DCN": outer, fabric: middle, "chip": inner}
        closed = accelerator.wraps(shape)
        self.torus = Torus.lay(middle, shape, closed, accelerator.link_bandwidth) if accelerator.torus else None

    @classmethod
    def of(cls, topology: Topology, accelerator: Accelerator, mesh: Mapping[str, int]) -> Links:
        """The links of a topology under the mesh of an audited program.

        Raises:
          MeshError: the mesh has another size than the topology.
          PlanError: a slice has more chips, or a host more GPUs, than there can be.
        """
        devices = math.prod(mesh.values())
        if devices != topology.devices:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"
            raise MeshError(
                f"the audited program runs on {devices} devices ({sizes}), but {topology} has {topology.devices}. Remedy: "
                f"audit a program compiled for {topology.devices} devices, or name a topology of {devices}."
            )
        # The last number of a GPU topology is the GPUs of a host; one before it is the number of hosts.
        shape = topology.shape if accelerator.torus else topology.shape[-1:]
        chips = math.prod(shape)
        slices = topology.slices * math.prod(topology.shape) // chips
        if chips > accelerator.domain:
            one, more = ("slice", "slices") if accelerator.torus else ("host", "hosts")
            raise PlanError(
                f"{topology} has {chips} chips in one {one}, but at most {accelerator.domain} of {accelerator.name} can be. "
                f"Remedy: more {more} of fewer chips."
            )
        return cls(accelerator, slices, shape, topology.devices // (slices * chips), mesh)

    @property
    def name(self) -> str:
        """The topology's: ``v5e:4x4``, ``v5e:4x4*2``, ``h100:4x8``."""
        shape, many = "x".join(map(str, self.shape)), self.slices > 1
        if self.accelerator.torus:
            return f"{self.accelerator.kind}:{shape}{f'*{self.slices}' if many else ''}"
        return f"{self.accelerator.kind}:{f'{self.slices}x' if many else ''}{shape}"

    def seconds(self, kind: str, axes: tuple[str, ...], sent: float) -> float:
        """What a collective takes in which each device sends so many bytes."""
        return sum(phase.seconds for phase in self.phases(Planned(kind, axes, sent)))

    def permute(self, axes: tuple[str, ...], sent: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Seconds of a permute to any devices: where messages share a link of a torus, they wait for each other.

        Args:
          pairs: (from, to) of those that send, counted along the axes.
        """
        away = tuple((a, b) for a, b in pairs if a != b)
        sending = Planned("collective-permute", axes, sent, pairs=away)
        return sum(phase.seconds for phase in self.phases(sending)) if away else 0.0

    def rings(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The sizes of the rings in which a group over the axes is joined, outermost first: along each dim of a torus one; their product is the group.

        >>> from jaxpar import MeshSpec
        >>> links_of(MeshSpec(data=8, model=8).on("v5p:4x4x4")).rings(("model",))
        (4, 2)
        """
        levels = list(self.levels)
        along = [
            sizes
            for axis in axes
            for level in levels
            for sizes in (self.torus.rings(axis) if level == "ICI" and self.torus else (self.levels[level][axis],))
        ]
        return tuple(size for size in along if size > 1)

    def phases(self, collective: Sent) -> list[Phase]:
        """What one execution of a collective costs, level by level; none where nothing moves."""
        axes, kind = collective.axes, collective.kind
        groups = {level: math.prod(sizes[axis] for axis in axes) for level, sizes in self.levels.items()}
        # A program of several slices says of each collective whether it runs between them.
        told = collective.between_slices
        used = [level for level, n in groups.items() if n > 1 and (told is None or told == (level == "DCN"))]
        if kind == "collective-permute":
            return [self._permuted(used[0], collective)] if used else []
        others = math.prod(groups[level] for level in used) - 1
        found = []
        for level in used:
            outside = math.prod(groups[other] for other in used[: used.index(level)])
            inside = math.prod(groups[other] for other in used[used.index(level) + 1 :])
            # A ring's pieces grow with every level that is gathered; an all-to-all's go each to its own device.
            pieces = (groups[level] - 1) * (inside if kind == "all-to-all" else outside)
            found.append(self._phase(level, axes, kind, collective.wire_bytes * pieces / others, groups[level]))
        return found

    def _phase(self, level: str, axes: Sequence[str], kind: str, sent: float, group: int) -> Phase:
        if level == "ICI" and self.torus is not None:
            return self._on_torus(self.torus, axes, kind, sent, group)
        speeds = {
            "DCN": self.accelerator.network_bandwidth,
            "NVLink": self.accelerator.link_bandwidth,
            "chip": self.accelerator.chip_bandwidth or math.inf,
        }
        return Phase(level, {level: sent / speeds[level]})

    @staticmethod
    def _on_torus(torus: Torus, axes: Sequence[str], kind: str, sent: float, group: int) -> Phase:
        ways = torus.ways(axes)
        if kind == "all-to-all":
            held = sent * group / (group - 1)  # what a device holds, of which it sends all but its own share
            seconds = max(held * (chips**2 // 4) / chips / speed for chips, speed in ways.values())
        else:
            seconds = sent / sum(speed for _, speed in ways.values())
        return Phase("ICI", {_queue(dim, way): seconds for dim in ways for way in (1, -1)})

    def _permuted(self, level: str, collective: Sent) -> Phase:
        """A permute: on a torus each message takes its own links, and those that share one wait for each other."""
        axes, sent = collective.axes, collective.wire_bytes
        if level != "ICI" or self.torus is None:
            return self._phase(level, axes, collective.kind, sent, 2)
        inside = self.levels["chip"]
        sharers = math.prod(inside[axis] for axis in axes)  # devices of a chip, whose messages are among the pairs
        pairs = collective.pairs or self._shift(axes)
        moved = [(self._chip(axes, a), self._chip(axes, b)) for a, b in pairs]
        loads = self.torus.loads(axes, moved)
        if not loads:  # all of it stays on a chip
            return self._phase("chip", axes, collective.kind, sent, 2)
        speed = self.torus.link * sharers
        return Phase("ICI", {_queue(*link): sent * load / speed for link, load in loads.items()})

    def _shift(self, axes: Sequence[str]) -> list[tuple[int, int]]:
        """To the neighbour along the innermost of the axes."""
        sizes = [math.prod(sizes[axis] for sizes in self.levels.values()) for axis in axes]
        count, last = math.prod(sizes), sizes[-1]
        return [(i, i - i % last + (i + 1) % last) for i in range(count)]

    def _chip(self, axes: Sequence[str], device: int) -> int:
        """Where a device's chip stands among those of its slice, counted along the axes."""
        found, stride = 0, 1
        for axis in reversed(axes):
            outer, chips, inner = (sizes[axis] for sizes in self.levels.values())
            device, along = divmod(device, outer * chips * inner)
            found += along // inner % chips * stride
            stride *= chips
        return found


def _queue(dim: int, way: int) -> str:
    return f"ICI {dim} {'+' if way > 0 else '-'}"


def likely_shape(accelerator: Accelerator, chips: int) -> tuple[int, ...]:
    """The slice of so many chips that is nearest to a square or a cube.

    >>> from jaxpar.sharding.hardware.accelerators import accelerator
    >>> likely_shape(accelerator("v5e"), 8), likely_shape(accelerator("v5p"), 128)
    ((2, 4), (4, 4, 8))
    """
    shape = [1] * max(accelerator.torus, 1)
    factor, left = 2, chips
    factors = []
    while left > 1:
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    for factor in reversed(factors):
        shape[shape.index(min(shape))] *= factor
    return tuple(sorted(shape))


def links_of(mesh: Mesh | AbstractMesh) -> Links | None:
    """The links of a mesh's devices; ``None`` where nothing is known of them, as of CPUs.

    Devices tell where they stand. An abstract mesh carries no more than their kind: there, one slice is taken that is nearest to a
    square or a cube (or hosts of as many GPUs as there can be).

    >>> from jaxpar import MeshSpec
    >>> links_of(MeshSpec(data=4, context=4).on("v5e:4x4")).name, links_of(MeshSpec(data=4).abstract())
    ('v5e:4x4', None)
    """
    device = device_of(mesh)
    accelerator = None if device is None else of_device(device.device_kind)
    if accelerator is None:
        return None
    pair = 2 if accelerator.chip_bandwidth and mesh.size % 2 == 0 else 1
    slices, shape = _placed(accelerator, mesh, mesh.size // pair)
    return Links(accelerator, slices, shape, pair, dict(mesh.shape))


def _devices(mesh: Any) -> list[Any]:
    """Of an abstract mesh none."""
    import jax

    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []


def _placed(accelerator: Accelerator, mesh: Any, chips: int) -> tuple[int, tuple[int, ...]]:
    """How many slices or hosts, and the shape of one."""
    devices = _devices(mesh)
    group = "slice_index" if all(getattr(d, "slice_index", None) is not None for d in devices) else "process_index"
    groups = {getattr(device, group) for device in devices} if accelerator.torus == 0 or group == "slice_index" else {0}
    slices = len(groups) or -(-chips // accelerator.domain)
    if slices > chips or chips % slices:
        slices = 1
    inside = chips // slices
    if devices and accelerator.torus:
        coords = [device.coords[: accelerator.torus] for device in devices if hasattr(device, "coords")]
        shape = tuple(1 + max(along) - min(along) for along in zip(*coords, strict=True))
        if math.prod(shape) == inside and shape:
            return slices, shape
    return slices, likely_shape(accelerator, inside) if accelerator.torus else (inside,)
