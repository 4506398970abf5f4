"""``estimate``: the peak memory of a train step on each device, from its trace; nothing is compiled.

The sizes of parameters, optimizer state and batch are exact. The rest comes from a walk through the traced step, which
assumes that the compiler behaves as XLA:TPU was observed to. ``docs/explanation/memory.md`` lists the assumptions, and
``docs/measured/memory.md`` the errors against the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpar.analysis.memory.jaxpr import Reader, TracedProgram
from jaxpar.analysis.memory.low_precision_sums import narrow_sums
from jaxpar.analysis.memory.walk import MemoryWalk, Moment, Value
from jaxpar.errors import JaxparError
from jaxpar.parallel.collectives.gather_reduce import SMALL
from jaxpar.parallel.pipeline.options import Asynchronous
from jaxpar.parallel.precision.policy import INT8, Precision
from jaxpar.sharding.layout import Layout, to_spec
from jaxpar.training.disk_step import gradient_step
from jaxpar.training.offload.disk_state import disk_of
from jaxpar.training.state import PlacedLeaf
from jaxpar.training.step import train_step

_VECTOR = {"TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128, "TPU7x": 64}
"""MiB of vector memory by device kind, from jax's ``pallas.tpu.get_tpu_info_for_chip``."""

ROLES = {"params": "parameters", "opt_state": "optimizer"}
KEPT = "kept weights"
PARTS = (
    "parameters",
    "optimizer",
    "batch and rest",
    "gradients",
    "weight copies",
    KEPT,
    "saved activations",
    "working",
)
"""The parts of an estimate.

``parameters``, ``optimizer`` and ``batch and rest`` are the arguments of the step. ``weight copies`` are weights in the
compute dtype. ``kept weights`` are gathered weights that loops keep for the backward pass (see
``reshard_after_forward``); ``saved activations`` are the other arrays that they keep for it (see the remat policy).
``working`` is everything else that is alive at the peak."""


@dataclass(frozen=True)
class Memory:
    """An estimate of one device's memory at the peak of a step.

    Attributes:
      target: the device that the step was traced for, such as ``TPU v5 lite``; ``cpu`` if the mesh names none.
      parts: a part of :data:`PARTS` → bytes on one device. If the step cannot be traced, only the known parts.
      unknown: why the step cannot be estimated, for example because it cannot be traced.
      narrow: parameters whose gradients the step sums over devices in 16 bits, although ``precision.reduce`` does not
        request it. With ``precision.reduce`` int8, parameters whose gradients are not reduced in int8.
      gradients: bytes on one device of the gradients of all parameters. ``parts["gradients"]`` counts those that are
        alive at the peak.
      assumed: operations whose sharding the estimate cannot follow. It takes their results as replicated, so the total
        is an upper bound.
      untraced: the message of the error if the step cannot be traced; else empty.
    """

    target: str
    parts: dict[str, int]
    unknown: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    gradients: int = 0
    assumed: tuple[str, ...] = ()
    untraced: str = ""

    @property
    def total(self) -> int | None:
        """The sum of all parts in bytes; ``None`` if the step cannot be estimated."""
        return None if self.unknown else sum(self.parts.values())

    @property
    def reason(self) -> str:
        """Why the step cannot be estimated, as a line below the table; empty if it can."""
        return f"memory is not estimated: {', '.join(self.unknown)}" if self.unknown else ""

    def cells(self, show: Callable[[int], str]) -> list[tuple[str, str]]:
        """Returns the parts and the total as rows of a table; :attr:`reason` tells why there is no total.

        Args:
          show: formats a number of bytes.

        >>> Memory("cpu", {"parameters": 8}, ("the layout has problems",)).cells(str)
        [('parameters', '8'), ('total', 'not estimated')]
        >>> Memory("cpu", {"parameters": 8, "gradients": 0, "working": 9}, gradients=8).cells(str)[1:]
        [('gradients alive at the peak (of 8)', '0'), ('working', '9'), ('total', '17')]
        """
        named = {KEPT: f"{KEPT} (by reshard_after_forward)"}
        if self.parts.get("gradients", 0) < self.gradients:
            named["gradients"] = f"gradients alive at the peak (of {show(self.gradients)})"
        known = [(named.get(part, part), show(size)) for part, size in self.parts.items() if size or part != KEPT]
        if self.unknown:
            return [*known, ("total", "not estimated")]
        return [*known, ("total, at most" if self.assumed else "total", show(self.total or 0))]


def estimate(
    layout: Layout, loss_fn: Callable[..., Any], state: Any, batch: Any, tensors: Sequence[PlacedLeaf], **options: Any
) -> Memory:
    """Estimate the peak memory of a step, without compiling it.

    Args:
      layout: a layout on a mesh with or without devices. ``MeshSpec.on(topology)`` sets the device that the step is
        for.
      loss_fn: as for :func:`jaxpar.train_step`.
      state, batch: pytrees of ``jax.ShapeDtypeStruct``, with global shapes.
      tensors: the placement of each leaf of ``state`` and ``batch``, in their order.
      options: keyword arguments of :func:`jaxpar.train_step`.

    Returns:
      The estimate. If the step cannot be traced, or its pipeline is asynchronous, ``unknown`` has the reason.
    """
    device = layout.mesh.abstract_mesh.abstract_device
    target = "cpu" if device is None else str(device.device_kind)
    known = dict.fromkeys(PARTS[:3], 0)
    leaves, treedef = jax.tree.flatten((state, batch))
    placed = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(layout.mesh, to_spec(tensor.resolved)))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
    if isinstance(options.get("pipeline"), Asynchronous):
        return Memory(target, known, ("an asynchronous pipeline is known only when it is compiled",))
    reader = Reader(layout.sizes)
    try:
        # With the optimizer state on disk, the program that computes the gradients is the larger of the two.
        step = train_step if disk_of(state) is None else gradient_step
        options = options | ({"return_grads": True} if step is train_step else {})
        traced = step(layout, loss_fn, **options).trace(*jax.tree.unflatten(treedef, placed))
    except (JaxparError, TypeError, ValueError, NotImplementedError) as error:
        message = str(error) or type(error).__name__
        return Memory(target, known, (f"the step cannot be traced: {message.splitlines()[0]}",), untraced=message)
    program = reader.read(traced.jaxpr.jaxpr, [tensor.resolved.axes for tensor in tensors])
    carried = len(jax.tree.leaves(state if step is train_step else (state.step, state.variables, state.loss_scale)))
    gradients = program.results[carried : carried + len(jax.tree.leaves(state.params))]
    if step is train_step:
        # return_grads only served to find the gradients: a real step does not return them.
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]
        kept = [i for i, path in enumerate(paths) if i >= carried and getattr(path[1], "key", "") == "grads"]
        gradients = [program.results[i] for i in kept]
        program.results = [value for i, value in enumerate(program.results) if i not in kept]
    narrow = _narrow(layout, program, gradients, tensors, Precision.of(options.get("precision")))
    for tensor, value in zip(tensors, program.inputs, strict=True):
        known[ROLES.get(tensor.role, PARTS[2])] += 0 if tensor.host else value.bytes
    made = gradients if step is gradient_step else ()
    walk = MemoryWalk(program, placed=program.results[:carried], vector=_VECTOR.get(target, 0) << 20)
    walk.mark_gradients(made)
    parts = known | _sorted(walk.peak(), walk)
    return Memory(target, parts, (), narrow, sum(value.bytes for value in gradients), reader.assumed())


def _narrow(
    layout: Layout,
    program: TracedProgram,
    gradients: Sequence[Value],
    tensors: Sequence[PlacedLeaf],
    precision: Precision,
) -> tuple[str, ...]:
    packed = precision.reduce == INT8
    if precision.reduce is not None and not packed and jnp.dtype(precision.reduce).itemsize < 4:
        return ()
    params = [tensor for tensor in tensors if tensor.role == "params"]
    axes = {axis for dim in layout.resolve(("batch",)).axes for axis in dim}
    found = [params[i] for i in narrow_sums(program, gradients, axes, 8 if packed else 2)]
    # Tensors below SMALL bytes in 16 bits are never quantized.
    return tuple(t.path for t in found if not packed or 2 * math.prod(t.shape) >= SMALL)


def _sorted(moment: Moment, walk: MemoryWalk) -> dict[str, int]:
    """Returns the bytes that are alive at the peak, by part."""
    parts = dict.fromkeys(PARTS[3:], 0)
    copies = walk.copies_of_inputs()
    for held in moment.held:
        if held.slice is not None and held.slice.gathered:
            part = KEPT
        elif held.value.gradient:
            part = "gradients"
        elif held.depth:
            part = "working"
        elif held.value in copies:
            part = "weight copies"
        else:
            part = "working" if held.slice is None else "saved activations"
        parts[part] += held.value.bytes
    return parts
