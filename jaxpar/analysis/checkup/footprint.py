"""``footprint``: one device's memory at the peak of a step, by category, and whether it fits.

The sizes of the step's arguments (parameters, optimizer state, batch) follow from the layout and are exact. Everything
else is classified from the buffers that :func:`jaxpar.analysis.hlo.liveness.peak` finds alive at the peak:

- **gradients**: made in the backward pass (jax's name of the operation has ``transpose(``), not gathered, and of the
  shape of a parameter: its shard, one layer of it, or either with fewer of its mesh axes applied (before the
  reduce-scatter);
- **kept weights**: stacks that the loop over layers fills with gathered weights, so that the backward pass need not
  gather them again. Their origin identifies them (:mod:`jaxpar.analysis.hlo.kept_weights`); the other rules are
  heuristics;
- **activations**: made in the forward pass (``jvp(``) outside of loops: everything else that it saves for the backward
  pass, including stacks of residuals;
- **temporaries**: everything else, including activations that the backward pass recomputes, and gathered weights;
- **on-chip memory**: a TPU compiler keeps arrays in the memory on the chip (VMEM), as much as fits, and its own peak
  counts them too, up to the most that are alive there in the walk. In small programs this is most of the peak.

The sum is that of the walk. If the compiler's own peak differs, the difference is *not attributed*: padding,
fragmentation, code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.analysis.hlo.liveness import Buffer, Peak
from jaxpar.analysis.memory.estimate import KEPT, ROLES
from jaxpar.analysis.units import axes_of_dims, device_bytes, shard_count
from jaxpar.parallel.offload.placement import KIND
from jaxpar.sharding.hardware.accelerators import Accelerator
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import leaves_with_paths, show
from jaxpar.training.state import TrainState, place

VMEM = "on-chip memory"
CATEGORIES = (
    *("parameters", "optimizer", "other state", "batch", "gradients", KEPT, "activations", "temporaries"),
    VMEM,
)
"""The uses of memory, in the order in which they are shown."""


@dataclass(frozen=True)
class HeldTensor:
    """An array that a step receives as an argument.

    Attributes:
      path: of the tensor, such as ``params/blocks/mlp/up``.
      category: one of ``CATEGORIES``.
      dims: its logical dims; empty if it has none.
      shape: the global shape.
      spec: the mesh axes of each dim.
      bytes: in the memory of one device; 0 if it is in host memory.
      copies: the number of devices that hold each shard.
    """

    path: str
    category: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    bytes: int
    copies: int


@dataclass(frozen=True)
class Footprint:
    """One device's memory at the peak, in bytes.

    Attributes:
      categories: a name of ``CATEGORIES`` → bytes.
      total: the compiler's peak, or the sum of the walk if the compiler reports none.
      unattributed: ``total`` minus the sum of the categories; negative if the compiler packs buffers that the walk
        counts.
      host: bytes in host memory.
      limit: the memory of the device; ``None`` if unknown.
      buffers: (category, buffer) pairs of the buffers alive at the peak, largest first.
    """

    categories: Mapping[str, int]
    total: int
    unattributed: int
    host: int
    limit: int | None
    buffers: tuple[tuple[str, Buffer], ...]

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory; true if that memory is unknown."""
        return self.limit is None or self.total <= self.limit

    @property
    def over(self) -> int:
        """Bytes beyond the limit; if negative, the bytes that are free."""
        return self.total - (self.total if self.limit is None else self.limit)


def held_by(layout: Layout, state: TrainState, batch: Any) -> tuple[HeldTensor, ...]:
    """Returns the arrays that a step receives, in the order of the compiled program's arguments.

    Args:
      layout: of the run.
      state: the result of :func:`jaxpar.training.state.abstract_state`.
      batch: the placed shapes of the batch, a pytree of ``jax.ShapeDtypeStruct``.

    >>> import jax, optax, jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16, 4)), "embed", None)}
    >>> state = jp.abstract_state(layout, make_model, optax.sgd(1e-3))
    >>> [(held.path, held.category, held.bytes) for held in held_by(layout, state, ())][1]
    ('params/w', 'parameters', 32)
    """
    import jax

    tensors = place(layout, state)
    leaves = jax.tree.leaves(state)
    found = [
        _held(t.path, ROLES.get(t.path.partition("/")[0], "other state"), t.names or (), leaf, layout)
        for t, leaf in zip(tensors, leaves, strict=True)
    ]
    inputs = (_held(show(("batch", *path)), "batch", (), leaf, layout) for path, leaf in leaves_with_paths(batch))
    return (*found, *inputs)


def _held(path: str, category: str, dims: Iterable[str | None], leaf: Any, layout: Layout) -> HeldTensor:
    spec = axes_of_dims(leaf.sharding.spec, len(leaf.shape))
    num_shards = [shard_count(axes, layout.sizes) for axes in spec]
    # The itemsize of a PRNG key dtype is that of the two 32-bit words of a key.
    size = 0 if leaf.sharding.memory_kind == KIND else device_bytes(leaf.shape, leaf.dtype.itemsize, num_shards)
    copies = layout.mesh.size // math.prod(num_shards)
    return HeldTensor(path, category, tuple(dims), tuple(leaf.shape), spec, size, copies)


def footprint(
    peak: Peak,
    held: Iterable[HeldTensor],
    memory: Mapping[str, int],
    sizes: Mapping[str, int],
    device: Accelerator | None,
) -> Footprint:
    """Returns the memory at a program's peak, by category.

    Args:
      peak: the buffers alive at the peak.
      held: the arrays that the program receives, as from :func:`held_by`.
      memory: the compiler's own figures in bytes, as in ``AheadOfTime.memory``.
      sizes: mesh axis → size.
      device: the accelerator whose memory is the limit.

    >>> alive = Peak(96, (Buffer(96, "f32[24]", "", "jit(step)/jvp()/mul", "", False),))
    >>> found = footprint(alive, (), {"peak": 128}, {}, None)
    >>> found.categories["activations"], found.unattributed, found.fits
    (96, 32, True)
    """
    arguments = tuple(held)
    gradients = frozenset().union(*(_shapes(h, sizes) for h in arguments if h.category == "parameters"))
    named = tuple((_category(buffer, gradients, arguments), buffer) for buffer in peak.buffers)
    found = dict.fromkeys(CATEGORIES, 0)
    for h in arguments:
        found[h.category] += h.bytes
    for category, buffer in named:
        if not buffer.argument:
            found[category] += buffer.bytes
    attributed = sum(found.values())
    total = memory.get("peak") or attributed
    found[VMEM] = min(peak.on_chip, max(total - attributed, 0))
    attributed += found[VMEM]
    limit = None if device is None else int(device.hbm_bytes)
    return Footprint(found, total, total - attributed, memory.get("host", 0), limit, named)


def _category(buffer: Buffer, gradients: frozenset[tuple[int, ...]], held: tuple[HeldTensor, ...]) -> str:
    if buffer.argument:
        return held[buffer.number].category if buffer.number < len(held) else "other state"
    if buffer.gathered:
        return KEPT
    backward = "transpose(" in buffer.op_name
    if backward and not buffer.opcode.startswith("all-gather") and buffer.dims in gradients:
        return "gradients"
    if "jvp(" in buffer.op_name and not backward and not buffer.scope:
        return "activations"
    return "temporaries"


def _shapes(parameter: HeldTensor, sizes: Mapping[str, int]) -> set[tuple[int, ...]]:
    """Returns the shapes of a parameter's gradient under any subset of its axes, of all layers or of one."""
    if len(parameter.shape) < 2:  # a vector's shape is ambiguous
        return set()
    axes = [axis for entry in parameter.spec for axis in entry]
    found: set[tuple[int, ...]] = set()
    for n in range(len(axes) + 1):
        for kept in itertools.combinations(axes, n):
            num_shards = (math.prod(sizes[axis] for axis in entry if axis in kept) for entry in parameter.spec)
            local = tuple(-(-size // shards) for size, shards in zip(parameter.shape, num_shards, strict=True))
            found |= {local, local[1:], (1, *local[1:])}
    return {shape for shape in found if len(shape) > 1}
