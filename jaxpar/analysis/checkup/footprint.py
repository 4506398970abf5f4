"""``footprint``: what one device's memory holds at the worst moment of a step, by category, and whether that fits.

What the step is given (parameters, optimizer state, batch) is known exactly, from the layout. What it makes on the way is
told from the buffers that :func:`jaxpar.analysis.hlo.liveness.peak` finds alive at the peak, by rules of thumb:

- **gradients**: made in the backward pass (jax's name of the operation has ``transpose(``), not gathered, and of the shape of
  a parameter: its shard, one layer of it, or either with fewer of its mesh axes applied (before it is scattered);
- **kept weights**: what the loop over layers gathers and fills an array with, for the backward pass not to gather it again; told by
  where it comes from (:mod:`jaxpar.analysis.hlo.kept_weights`), which is no rule of thumb;
- **activations**: made in the forward pass (``jvp(``) outside of loops: all else that it saves for the backward pass, stacks of
  residuals among it;
- **temporaries**: all else. Activations that the backward pass computes again are there, and gathered weights.

The sum is that walk's; where the compiler's own peak differs, the difference is *not attributed*: padding, fragments, code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.analysis.hlo.liveness import Buffer, Peak
from jaxpar.parallel.offload.placement import KIND
from jaxpar.sharding.hardware.accelerators import Accelerator
from jaxpar.sharding.layout import Layout
from jaxpar.training.state import TrainState, place

KEPT = "kept weights"
CATEGORIES = ("parameters", "optimizer", "other state", "batch", "gradients", KEPT, "activations", "temporaries")
"""What memory is for, in the order in which it is shown."""

_PARTS = {"params": "parameters", "opt_state": "optimizer"}


@dataclass(frozen=True)
class HeldTensor:
    """An array that a step is given.

    Attributes:
      path: of the tensor, ``params/blocks/mlp/up``.
      category: one of ``CATEGORIES``.
      dims: its logical dims; empty where it has none.
      shape: of the whole.
      spec: the mesh axes of each dim.
      bytes: on one device; none where it lies in the host's memory.
      copies: how many devices hold each shard.
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
      categories: name → bytes, as in ``CATEGORIES``.
      total: the compiler's peak; the walk's sum where the compiler gives none.
      unattributed: ``total`` less the sum of the categories; negative where the walk counts what the compiler packs.
      host: in the host's memory.
      limit: what the device has; ``None`` where it is not known.
      buffers: those alive at the peak, largest first, each with its category.
    """

    categories: Mapping[str, int]
    total: int
    unattributed: int
    host: int
    limit: int | None
    buffers: tuple[tuple[str, Buffer], ...]

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory; an unknown limit holds anything."""
        return self.limit is None or self.total <= self.limit

    @property
    def over(self) -> int:
        """Bytes beyond the limit; negative is what is free."""
        return self.total - (self.total if self.limit is None else self.limit)


def held_by(layout: Layout, state: TrainState, batch: Any) -> tuple[HeldTensor, ...]:
    """What a step is given, in the order of the compiled program's arguments.

    Args:
      layout: of the run.
      state: as :func:`jaxpar.training.state.abstract_state` gives it.
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
        _held(t.path, _PARTS.get(t.path.partition("/")[0], "other state"), t.names or (), leaf, layout)
        for t, leaf in zip(tensors, leaves, strict=True)
    ]
    inputs = jax.tree_util.tree_leaves_with_path(batch)
    named = (("/".join(["batch", *(str(getattr(key, "key", key)) for key in keys)]), leaf) for keys, leaf in inputs)
    return (*found, *(_held(path, "batch", (), leaf, layout) for path, leaf in named))


def _held(path: str, category: str, dims: Iterable[str | None], leaf: Any, layout: Layout) -> HeldTensor:
    entries = (*leaf.sharding.spec, *(None,) * (len(leaf.shape) - len(leaf.sharding.spec)))
    spec = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    ways = [math.prod(layout.sizes[axis] for axis in axes) for axes in spec]
    local = math.prod(-(-size // way) for size, way in zip(leaf.shape, ways, strict=True))
    if leaf.sharding.memory_kind == KIND:
        local = 0
    # A key's dtype is an extended one: two words of 32 bits, whatever it says of its items.
    size = leaf.dtype.itemsize
    copies = layout.mesh.size // math.prod(ways)
    return HeldTensor(path, category, tuple(dims), tuple(leaf.shape), spec, local * size, copies)


def footprint(
    peak: Peak,
    held: Iterable[HeldTensor],
    memory: Mapping[str, int],
    sizes: Mapping[str, int],
    device: Accelerator | None,
) -> Footprint:
    """The memory at a program's peak, by category.

    Args:
      peak: the buffers alive at the peak.
      held: what the program is given, as from :func:`held_by`.
      memory: the compiler's own figures, as in ``AheadOfTime.memory``.
      sizes: mesh axis → size.
      device: whose memory is the limit.

    >>> found = footprint(Peak(96, (Buffer(96, "f32[24]", "", "jit(step)/jvp()/mul", "", False),)), (), {"peak": 128}, {}, None)
    >>> found.categories["activations"], found.unattributed, found.fits
    (96, 32, True)
    """
    given = tuple(held)
    gradients = frozenset().union(*(_shapes(h, sizes) for h in given if h.category == "parameters"))
    named = tuple((_category(buffer, gradients, given), buffer) for buffer in peak.buffers)
    found = dict.fromkeys(CATEGORIES, 0)
    for h in given:
        found[h.category] += h.bytes
    for category, buffer in named:
        if not buffer.argument:
            found[category] += buffer.bytes
    attributed = sum(found.values())
    total = memory.get("peak") or attributed
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
    """The shapes that a parameter's gradient passes through: under any subset of its axes, whole or one layer of it."""
    if len(parameter.shape) < 2:  # a vector's shape says little
        return set()
    axes = [axis for entry in parameter.spec for axis in entry]
    found: set[tuple[int, ...]] = set()
    for n in range(len(axes) + 1):
        for kept in itertools.combinations(axes, n):
            ways = (math.prod(sizes[axis] for axis in entry if axis in kept) for entry in parameter.spec)
            local = tuple(-(-size // way) for size, way in zip(parameter.shape, ways, strict=True))
            found |= {local, local[1:], (1, *local[1:])}
    return {shape for shape in found if len(shape) > 1}
