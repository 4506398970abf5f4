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
pays for its detours: on n chips, ⌊n²/4⌋ pairs cross the middle. A permute is a shift to the neighbour, over one link, one way;
one that may cross slices is taken to cross them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

from jaxpar.accelerators import Accelerator, of_device
from jaxpar.devices import take
from jaxpar.errors import MeshError, PlanError
from jaxpar.topology import Topology, device_of

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


class Sent(Protocol):
    """What is asked of a collective: its kind, as XLA names it, the mesh axes, and bytes that a device sends."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def wire_bytes(self) -> float: ...
    @property
    def between_slices(self) -> bool | None: ...


@dataclass(frozen=True)
class Planned:
    """A collective of which no program tells yet."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    between_slices: bool | None = None


@dataclass(frozen=True)
class Phase:
    """A part of a collective: ``seconds`` on the links of one level, and the wires (``queues``) that it keeps busy."""

    level: str
    queues: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Torus:
    """The torus of a slice, with mesh axes laid on it.

    Attributes:
      shape: chips along each dim.
      closed: which dims close to a ring.
      link: bytes/s of one link, one way.
      factors: of each dim, the (axis, factor) pairs that make it up, innermost first.
    """

    shape: tuple[int, ...]
    closed: tuple[bool, ...]
    link: float
    factors: tuple[tuple[tuple[str, int], ...], ...]

    @classmethod
    def lay(cls, sizes: Mapping[str, int], shape: Sequence[int], closed: Sequence[bool], link: float) -> Torus:
        """Lay axes, outermost first, on a torus of as many chips.

        >>> Torus.lay({"data": 4, "model": 16}, (4, 16), (False, True), 5e10).factors
        ((('data', 4),), (('model', 16),))
        >>> Torus.lay({"data": 8, "model": 2}, (4, 4), (False, False), 5e10).factors
        ((('model', 2), ('data', 2)), (('data', 4),))
        """
        left, factors = list(shape), [[] for _ in shape]  # type: list[int], list[list[tuple[str, int]]]
        for axis, size in reversed(list(sizes.items())):
            for dim, factor in _dims_for(size, left, shape):
                factors[dim].append((axis, factor))
                left[dim] //= factor
        return cls(tuple(shape), tuple(closed), link, tuple(map(tuple, factors)))

    def ways(self, axes: Collection[str], *, shift: bool = False) -> dict[int, tuple[int, float]]:
        """Dim → (chips of a group along it, bytes/s that a device sends along it) for a group over these axes.

        Args:
          axes: of the group.
          shift: one way only, as a permute sends.
        """
        found = {}
        for dim, factors in enumerate(self.factors):
            mine = [i for i, (axis, _) in enumerate(factors) if axis in axes]
            chips = math.prod(factors[i][1] for i in mine)
            if chips == 1:
                continue
            sharing = math.prod(factor for axis, factor in factors[: mine[-1]] if axis not in axes)
            whole = mine[-1] == len(factors) - 1  # nothing of the dim lies outside of the group: its ring is the dim's
            both = 2 if self.closed[dim] and whole and not shift else 1
            found[dim] = (chips, self.link * both / sharing)
        return found


def _dims_for(size: int, left: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
    """The (dim, factor) pairs that an axis takes: whole dims, as many as fit, else factors of the dims with most to give."""
    free = [dim for dim, n in enumerate(shape) if n > 1 and left[dim] == n]
    for count in range(len(free), 0, -1):
        for dims in combinations(free, count):
            if math.prod(shape[dim] for dim in dims) == size:
                return [(dim, shape[dim]) for dim in dims]
    taken = []
    for dim in sorted(range(len(shape)), key=lambda dim: -math.gcd(size, left[dim])):
        factor = math.gcd(size, left[dim])
        if factor > 1:
            taken.append((dim, factor))
            size //= factor
    return taken


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
          pairs: (from, to) of those that send, as if the devices of a group stood in one line, or in a ring where it is closed.
        """
        away = [(a, b) for a, b in pairs if a != b]
        once = self.seconds("collective-permute", axes, sent) if away else 0.0
        if self.torus is None:
            return once
        size = math.prod(self.levels["ICI"][axis] for axis in axes)
        closed = any(chips == size and self.torus.closed[dim] for dim, (chips, _) in self.torus.ways(axes).items())
        return once * _crowd(away, 1 + max((max(pair) for pair in away), default=0), closed=closed)

    def phases(self, collective: Sent) -> list[Phase]:
        """What one execution of a collective costs, level by level; none where nothing moves."""
        axes, kind = collective.axes, collective.kind
        groups = {level: math.prod(sizes[axis] for axis in axes) for level, sizes in self.levels.items()}
        # A program of several slices says of each collective whether it runs between them.
        told = collective.between_slices
        used = [level for level, n in groups.items() if n > 1 and (told is None or told == (level == "DCN"))]
        if kind == "collective-permute":
            return [self._phase(used[0], axes, kind, collective.wire_bytes, 2)] if used else []
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
        return Phase(level, (level,), sent / speeds[level])

    @staticmethod
    def _on_torus(torus: Torus, axes: Sequence[str], kind: str, sent: float, group: int) -> Phase:
        ways = torus.ways(axes, shift=kind == "collective-permute")
        queues = tuple(f"ICI {dim}" for dim in ways)
        if kind == "collective-permute":
            seconds = sent / max(speed for _, speed in ways.values())
        elif kind == "all-to-all":
            held = sent * group / (group - 1)  # what a device holds, of which it sends all but its own share
            seconds = max(held * (chips**2 // 4) / chips / speed for chips, speed in ways.values())
        else:
            seconds = sent / sum(speed for _, speed in ways.values())
        return Phase("ICI", queues, seconds)


def _crowd(pairs: Sequence[tuple[int, int]], count: int, *, closed: bool) -> int:
    """The most messages that go through one link one way, each by the shorter way.

    >>> _crowd([(0, 1), (1, 2), (2, 3), (3, 0)], 4, closed=False), _crowd([(0, 2), (1, 3)], 4, closed=False)
    (1, 2)
    """
    load: dict[tuple[int, int], int] = {}
    for a, b in pairs:
        step = 1 if b > a else -1
        if closed and abs(b - a) > count // 2:
            step = -step
        while a != b:
            load[a, step] = load.get((a, step), 0) + 1
            a = (a + step) % count
    return max(load.values(), default=0)


def likely_shape(accelerator: Accelerator, chips: int) -> tuple[int, ...]:
    """The slice of so many chips that is nearest to a square or a cube.

    >>> from jaxpar.accelerators import accelerator
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
