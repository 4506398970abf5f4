"""A cost model of collectives: which links each one uses, and for how many seconds.

**The levels.** Devices are joined on up to three levels, slowest first: the network between slices or hosts (``DCN``);
the torus of a slice (``ICI``) or the switch of a host (``NVLink``); and the inside of a chip that is two devices
(``chip``).

**Which links an axis uses.** Mesh axes are ordered outermost first. The outermost axes take the factors that cross
slices (as in ``MeshSpec.build``), the innermost axes those inside a chip. The rest is mapped to the torus, innermost
axis first: an axis takes full dims, as many as multiply to its size, or else factors of dims.
``jax.experimental.mesh_utils`` follows the same principle. Where it resolves a tie in another way, two axes swap places
here.

**The bandwidth of a torus dim.** Each chip has one link in each direction along each dim. A closed ring uses both
directions. An open line has the bandwidth of one, because one link feeds its last chip. Where an axis takes only the
outer factor of a dim, the groups of the inner factors share the links between them. A collective over several dims uses
all of them in parallel.

**The bytes.** They are those of the audit (``Collective.wire_bytes``), for the best ring algorithm. Over several levels
the hierarchical algorithm applies, one level after the other: it gathers across the outer level first, while the pieces
are small. XLA compiles a program for several TPU slices that way, and the program shows which part of a collective
crosses slices. An all-to-all on a torus also pays for its longer routes: on n chips, ⌊n²/4⌋ pairs cross the middle. The
messages of a permute travel along one torus dim after the other, and those that share a link are serialized. A permute
that may cross slices is assumed to cross them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import MeshError, PlanError
from jaxpar.sharding.hardware.accelerators import Accelerator, of_device
from jaxpar.sharding.hardware.rings import check_on_torus, check_rings
from jaxpar.sharding.hardware.topology import Topology, device_of
from jaxpar.sharding.hardware.torus import Link, Torus, take

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


NETWORK = "DCN"
"""The level of the network between slices or hosts."""


@dataclass(frozen=True)
class Phase:
    """The part of a collective that uses one level of links.

    Attributes:
      level: ``DCN``, ``ICI``, ``NVLink`` or ``chip``.
      queues: for each group of links, the seconds for which it is busy.
    """

    level: str
    queues: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The time until the last link is done."""
        return max(self.queues.values(), default=0.0)

    @property
    def network_seconds(self) -> float:
        """The time on the network between slices or hosts."""
        return self.seconds if self.level == NETWORK else 0.0


class Links:
    """The links of a group of devices under a mesh.

    Args:
      accelerator: the kind of the devices.
      slices: the number of slices, or of hosts of GPUs.
      shape: the shape of a slice in chips, or ``(GPUs of a host,)``.
      pair: jax devices per chip.
      mesh: axis → size, outermost first; the product of the sizes is ``slices · chips · pair``.
      rings: the axes whose devices form closed rings, as in :class:`jaxpar.MeshSpec`; without a torus they have no
        effect.

    Raises:
      MeshError: the devices of one of ``rings`` form no closed ring.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        slices: int,
        shape: Sequence[int],
        pair: int,
        mesh: Mapping[str, int],
        rings: Collection[str] = (),
    ):
        outer = take(mesh, slices, mesh)
        left = {axis: size // outer[axis] for axis, size in mesh.items()}
        inner = take(left, pair, reversed(list(mesh)))
        middle = {axis: size // inner[axis] for axis, size in left.items()}
        fabric = "ICI" if accelerator.torus else "NVLink"
        self.accelerator, self.slices, self.shape = accelerator, slices, tuple(shape)
        self.levels = {NETWORK: outer, fabric: middle, "chip": inner}
        self.pair, self.torus = pair, None
        if accelerator.torus:
            check_rings(rings, mesh)
            for axis in rings:
                check_on_torus(axis, mesh[axis], middle[axis], slices)
            closed = accelerator.wraps(shape)
            self.torus = Torus.lay(middle, shape, closed, accelerator.link_bandwidth, rings)

    @classmethod
    def of(cls, topology: Topology, mesh: Mapping[str, int], rings: Collection[str] = ()) -> Links:
        """Returns the links of a topology under the mesh of an audited program.

        Args:
          topology: the topology.
          mesh: axis → size, outermost first.
          rings: the axes whose devices form closed rings.

        Raises:
          MeshError: the mesh and the topology differ in size, or the devices of one of ``rings`` form no closed ring.
          PlanError: a slice has more chips than the accelerator allows.
        """
        devices, accelerator = math.prod(mesh.values()), topology.accelerator
        if devices != topology.devices:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"
            raise MeshError(
                f"the audited program runs on {devices} devices ({sizes}), but {topology} has {topology.devices}. "
                f"Remedy: audit a program compiled for {topology.devices} devices, or use a topology of {devices}."
            )
        if (chips := math.prod(topology.shape)) > accelerator.domain:
            raise PlanError(
                f"{topology} has {chips} chips in one slice, but {accelerator.name} has at most {accelerator.domain}. "
                f"Remedy: use more slices of fewer chips."
            )
        return cls(accelerator, topology.slices, topology.shape, accelerator.chip_devices, mesh, rings)

    @property
    def crossing(self) -> dict[str, int]:
        """The mesh axes that cross slices or hosts → over how many of them.

        >>> Links.of(Topology.parse("v5e:4x4*2"), {"replica": 2, "data": 8, "model": 2}).crossing
        {'replica': 2}
        """
        return {axis: size for axis, size in self.levels[NETWORK].items() if size > 1}

    @property
    def name(self) -> str:
        """The name of the topology: ``v5e:4x4``, ``v5e:4x4*2``, ``h100:4x8``."""
        return str(Topology(self.accelerator.kind, self.shape, self.slices))

    def seconds(self, kind: str, axes: tuple[str, ...], sent: float) -> float:
        """Returns the seconds of a collective over ``axes`` in which each device sends ``sent`` bytes."""
        return sum(phase.seconds for phase in self.phases(kind, axes, sent))

    def permute(self, axes: tuple[str, ...], sent: float, pairs: Sequence[tuple[int, int]]) -> float:
        """Returns the seconds of a permute; messages that share a link of a torus are serialized.

        Args:
          axes: the mesh axes of the permute.
          sent: the bytes of one message.
          pairs: (source, target) of each message, as indices along the axes.
        """
        away = tuple((a, b) for a, b in pairs if a != b)
        phases = self.phases("collective-permute", axes, sent, pairs=away) if away else []
        return sum(phase.seconds for phase in phases)

    def rings(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Returns the sizes of the rings that join a group over the axes, outermost first; their product is the group.

        A torus has one ring along each of its dims.

        >>> from jaxpar import MeshSpec
        >>> links_of(MeshSpec(data=8, model=8).on("v5p:4x4x4")).rings(("model",))
        (4, 2)
        """
        along: list[int] = []
        for axis in axes:
            for level, sizes in self.levels.items():
                along += self.torus.rings(axis) if level == "ICI" and self.torus else (sizes[axis],)
        return tuple(size for size in along if size > 1)

    def phases(
        self,
        kind: str,
        axes: Sequence[str],
        sent: float,
        between_slices: bool | None = None,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> list[Phase]:
        """Returns the cost of one execution of a collective, one phase per level; an empty list if nothing moves.

        Args:
          kind: the operation, as XLA names it.
          axes: the mesh axes of its groups.
          sent: the bytes that each device sends.
          between_slices: whether it crosses slices; ``None`` if the program does not show it.
          pairs: (source, target) of each message of a permute, as indices along the axes.
        """
        groups = {level: math.prod(sizes[axis] for axis in axes) for level, sizes in self.levels.items()}
        # A program for several slices shows for each collective whether it runs between them.
        used = [level for level, n in groups.items() if n > 1 and between_slices in (None, level == NETWORK)]
        if kind == "collective-permute":
            return [self._permuted(used[0], axes, sent, pairs)] if used else []
        others = math.prod(groups[level] for level in used) - 1
        found = []
        for level in used:
            outside = math.prod(groups[other] for other in used[: used.index(level)])
            inside = math.prod(groups[other] for other in used[used.index(level) + 1 :])
            # A gather's pieces grow with every level already gathered. Those of an all-to-all go to one device each.
            pieces = (groups[level] - 1) * (inside if kind == "all-to-all" else outside)
            moved, torus = sent * pieces / others, self.torus if level == "ICI" else None
            found.append(
                self._phase(level, moved) if torus is None else _spread(torus, axes, kind, moved, groups[level])
            )
        return found

    def _phase(self, level: str, sent: float) -> Phase:
        """Returns the phase of a level whose devices each have one link."""
        speeds = {
            NETWORK: self.accelerator.network_bandwidth,
            "NVLink": self.accelerator.link_bandwidth,
            "chip": self.accelerator.chip_bandwidth or math.inf,
        }
        return Phase(level, {level: sent / speeds[level]})

    def _permuted(self, level: str, axes: Sequence[str], sent: float, pairs: Sequence[tuple[int, int]]) -> Phase:
        """Returns the phase of a permute, in which messages that share a link of a torus are serialized."""
        if level != "ICI" or self.torus is None:
            return self._phase(level, sent)
        inside = self.levels["chip"]
        sharers = math.prod(inside[axis] for axis in axes)  # devices of one chip; `pairs` lists the messages of all
        moved = [(self._chip(axes, a), self._chip(axes, b)) for a, b in pairs or self._shift(axes)]
        if not (loads := self.torus.loads(axes, moved)):  # no message leaves its chip
            return self._phase("chip", sent)
        speed = self.torus.link * sharers
        return Phase("ICI", {_queue(link): sent * load / speed for link, load in loads.items()})

    def _shift(self, axes: Sequence[str]) -> list[tuple[int, int]]:
        """Returns the (source, target) pairs of a permute to the next device along the innermost axis."""
        sizes = [math.prod(sizes[axis] for sizes in self.levels.values()) for axis in axes]
        count, last = math.prod(sizes), sizes[-1]
        return [(i, i - i % last + (i + 1) % last) for i in range(count)]

    def _chip(self, axes: Sequence[str], device: int) -> int:
        """Returns the index of a device's chip within its slice, counted along the axes."""
        found, stride = 0, 1
        for axis in reversed(axes):
            outer, chips, inner = (sizes[axis] for sizes in self.levels.values())
            device, along = divmod(device, outer * chips * inner)
            found += along // inner % chips * stride
            stride *= chips
        return found


def _spread(torus: Torus, axes: Sequence[str], kind: str, sent: float, group: int) -> Phase:
    """Returns the phase of a collective that uses all dims of a torus along which its groups extend."""
    ways = torus.ways(axes)
    if kind == "all-to-all":
        held = sent * group / (group - 1)  # the bytes that a device holds; it sends all but its own share
        seconds = max(held * (chips**2 // 4) / chips / speed for chips, speed in ways.values())
    else:
        seconds = sent / sum(speed for _, speed in ways.values())
    return Phase("ICI", {_queue(link): seconds for dim in ways for link in torus.links(dim)})


def _queue(link: Link) -> str:
    dim, way, spot = link
    return f"ICI {dim} {'+' if way > 0 else '-'}" + (f" {spot}" if any(spot) else "")


def likely_shape(accelerator: Accelerator, chips: int) -> tuple[int, ...]:
    """Returns the slice shape for ``chips`` chips that is nearest to a square or a cube.

    >>> from jaxpar.sharding.hardware.accelerators import accelerator
    >>> likely_shape(accelerator("v5e"), 8), likely_shape(accelerator("v5p"), 128)
    ((2, 4), (4, 4, 8))
    """
    shape = [1] * max(accelerator.torus, 1)
    factors: list[int] = []
    while chips > 1:
        factors.append(next(n for n in range(2, chips + 1) if chips % n == 0))
        chips //= factors[-1]
    for factor in reversed(factors):
        shape[shape.index(min(shape))] *= factor
    return tuple(sorted(shape))


def links_of(mesh: Mesh | AbstractMesh, rings: Collection[str] = ()) -> Links | None:
    """Returns the links of a mesh's devices, or ``None`` if they are unknown, as for CPUs.

    Concrete devices report their slice and coordinates. An abstract mesh has only their kind: it is assumed to have as
    few slices as possible, each as near to a square or a cube as possible (or hosts with as many GPUs as a host can
    have). Where such a slice has no closed ring for one of ``rings``, none of them has an effect.

    >>> from jaxpar import MeshSpec
    >>> links_of(MeshSpec(data=4, context=4).on("v5e:4x4")).name, links_of(MeshSpec(data=4).abstract())
    ('v5e:4x4', None)
    """
    device = device_of(mesh)
    accelerator = None if device is None else of_device(device.device_kind)
    if accelerator is None:
        return None
    pair = accelerator.chip_devices if mesh.size % 2 == 0 else 1
    slices, shape = _placed(accelerator, mesh, mesh.size // pair)
    try:
        return Links(accelerator, slices, shape, pair, dict(mesh.shape), rings)
    except MeshError:  # the slice is a guess; with the real one, the mesh or the compiler raises it
        return Links(accelerator, slices, shape, pair, dict(mesh.shape))


def _placed(accelerator: Accelerator, mesh: Any, chips: int) -> tuple[int, tuple[int, ...]]:
    """Returns the number of slices or hosts, and the shape of one."""
    import jax

    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
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
