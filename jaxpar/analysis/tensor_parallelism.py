"""``compare_tensor``: what tensor parallelism in one, two, 2.5 and three dimensions sends for a model, and how long."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from jaxpar.analysis.roofline import show_time
from jaxpar.analysis.units import show_bytes, table_lines
from jaxpar.errors import JaxparError
from jaxpar.parallel.collectives.gather_reduce import precision_scope
from jaxpar.parallel.precision.policy import Precision, PrecisionLike
from jaxpar.parallel.tensor.grid import KINDS, grid, rules
from jaxpar.parallel.tensor.matmul import product_name
from jaxpar.parallel.tensor.traffic import Matmuls
from jaxpar.sharding.hardware.links import Links
from jaxpar.sharding.hardware.topology import Topology
from jaxpar.sharding.layout import Layout, tracing_under
from jaxpar.sharding.mesh import MeshSpec
from jaxpar.sharding.rules import Rules
from jaxpar.training.loss import loss_of
from jaxpar.training.model import MakeModel
from jaxpar.training.state import abstract_state
from jaxpar.utils.contexts import matmul_observer
from jaxpar.utils.jaxprs import inner_jaxprs, needed_equations, opened
from jaxpar.utils.terminal import fit

_RESHAPES = ("name", "reshape", "split", "slice", "squeeze", "optimization_barrier", "convert_element_type")
"""What ``sharded_dot`` does to a product after it is computed, as jax names it."""
_COLUMNS = ("kind", "mesh", "sent forward", "sent in all", "links", "compute", "step", "weights", "inputs")


@dataclass(frozen=True)
class TensorPlan:
    """The matmuls of a model under one kind of tensor parallelism; bytes and seconds of one device.

    Each matmul that ``sharded_dot`` runs is counted once, so the layers of a scan count as one layer. The embedding and
    an output head inside a loss are not counted. What the backward pass computes again of the forward pass, by
    ``jax.checkpoint``, is counted too, except results that it does not need, such as those of a layer's last matmul.

    Attributes:
      name: the name of the layout, such as ``2d``.
      mesh: the sizes of its mesh axes above 1.
      forward_bytes: bytes sent in the forward pass.
      sent_bytes: bytes sent in forward and backward pass.
      again_bytes: the part of ``sent_bytes`` for results that the backward pass computes again.
      link_seconds: the time of all collectives, one after the other.
      compute_seconds: the time of the matmuls of forward and backward pass.
      weight_bytes: the shards of the weights, in the compute dtype.
      input_bytes: the shards of the matmuls' inputs, which the backward pass keeps.
      problem: why the layout cannot run; the numbers are then 0.
    """

    name: str
    mesh: Mapping[str, int]
    forward_bytes: float = 0.0
    sent_bytes: float = 0.0
    again_bytes: float = 0.0
    link_seconds: float = 0.0
    compute_seconds: float = 0.0
    weight_bytes: int = 0
    input_bytes: int = 0
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of matmuls and collectives if nothing overlaps."""
        return self.link_seconds + self.compute_seconds

    def cells(self) -> tuple[str, ...]:
        """Returns the row of a table."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        if self.problem:
            return (self.name, mesh, f"not possible: {self.problem}")
        sizes = (show_bytes(round(n)) for n in (self.forward_bytes, self.sent_bytes))
        times = (show_time(s) for s in (self.link_seconds, self.compute_seconds, self.seconds))
        return (self.name, mesh, *sizes, *times, show_bytes(self.weight_bytes), show_bytes(self.input_bytes))


@dataclass(frozen=True)
class TensorPlans:
    """Kinds of tensor parallelism for one model on one topology.

    Attributes:
      topology: its name.
      plans: one for each kind.
    """

    topology: str
    plans: tuple[TensorPlan, ...]

    @property
    def best(self) -> TensorPlan | None:
        """The plan that takes the least time if nothing overlaps; ``None`` if none is possible."""
        possible = [plan for plan in self.plans if not plan.problem]
        return min(possible, key=lambda plan: plan.seconds, default=None)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Returns the report, in lines of at most ``width`` columns."""
        whole = [plan.cells() for plan in self.plans if not plan.problem]
        lines = table_lines([_COLUMNS, *whole], width, below=(4, 5, 7, 8), labels=True)
        lines += [": ".join(plan.cells()[::2]) for plan in self.plans if plan.problem]
        best, others = self.best, [plan for plan in self.plans if not plan.problem and plan is not self.best]
        if best is not None:
            against = ", ".join(f"{other.name} {show_time(other.seconds)}" for other in others)
            verdict = f"{best.name} wins with {show_time(best.seconds)} a layer"
            lines.append(f"{verdict}, against {against}." if against else f"{verdict}.")
        head = f"Matmuls of one layer, forward and backward, on {self.topology}: a model, not a measurement."
        return fit("\n".join([head, *lines, ""]), width)

    def to_json(self) -> str:
        """Returns every field as JSON."""
        return json.dumps(asdict(self), indent=1)


def compare_tensor(
    make_model: MakeModel,
    tx: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    topology: str,
    layouts: Mapping[str, Layout] | Rules,
    devices: int | None = None,
    precision: PrecisionLike = None,
) -> TensorPlans:
    """Returns what each kind of tensor parallelism sends for the matmuls of a model, and the time that this takes.

    The gradient of the loss is traced under each layout; every :func:`jaxpar.sharded_dot` is counted. Nothing is
    compiled, and no device is needed. Links and compute are those of the roofline; the times assume that nothing
    overlaps.

    Args:
      make_model, tx, loss_fn: as for :func:`jaxpar.explain`.
      batch: a pytree of arrays or of their shapes and dtypes, with global shapes.
      topology: the hardware, such as ``"v5e:8x8"``.
      layouts: name → layout on an abstract mesh of all chips; or rules, from which :func:`jaxpar.tensor.rules` makes
        one layout for each kind.
      devices: with rules, the number of devices that share a layer, by default all; the others take the axis ``data``.
      precision: as for :func:`jaxpar.train_step`.

    Raises:
      ConfigError: ``precision`` has no valid value.
      MeshError: the topology is unknown, or ``devices`` does not divide its devices.

    >>> import jax, jax.numpy as jnp, optax
    >>> import jaxpar as jp
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (64, 256)), "embed", "mlp")}
    >>> loss_fn = lambda model, x: jnp.sum(jp.sharded_dot(x, (model["w"], ("embed", "mlp")))[0])
    >>> batch = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
    >>> rules = jp.Rules(batch="data", embed=None, mlp=None)
    >>> found = compare_tensor(make_model, optax.sgd(1.0), loss_fn, batch, topology="v5e:2x2", layouts=rules)
    >>> [plan.name for plan in found.plans if not plan.problem], round(found.plans[1].forward_bytes)
    (['1d', '2d'], 40960)
    """
    target, model = Topology.parse(topology), _Model(make_model, tx, loss_fn, batch, Precision.of(precision))
    plans = []
    for name, layout in _layouts(target, layouts, devices):
        if isinstance(layout, Layout):
            plans.append(_plan(name, layout, target, model))
        else:
            plans.append(TensorPlan(name, {}, problem=layout))
    return TensorPlans(str(target), tuple(plans))


def _layouts(
    target: Topology, layouts: Mapping[str, Layout] | Rules, devices: int | None
) -> Iterator[tuple[str, Layout | str]]:
    """Yields the name of each layout, and the layout or why there is none."""
    if not isinstance(layouts, Rules):
        yield from layouts.items()
        return
    shared = target.devices if devices is None else devices
    for kind in KINDS:
        try:
            spec = MeshSpec(data=-1, **grid(kind, shared))
            yield kind, Layout(spec.on(target), rules(kind, layouts))
        except JaxparError as error:
            yield kind, str(error)


class _Model(NamedTuple):
    """The arguments of :func:`compare_tensor` that describe a step."""

    make_model: MakeModel
    tx: Any
    loss_fn: Callable[..., Any]
    batch: Any
    precision: Precision


def _plan(name: str, layout: Layout, target: Topology, model: _Model) -> TensorPlan:
    sizes = {axis: size for axis, size in layout.sizes.items() if size > 1}
    try:
        every = _matmuls(layout, model)
        links = Links.of(target, layout.sizes)
    except JaxparError as error:
        return TensorPlan(name, sizes, problem=str(error).splitlines()[0])
    sent = [(1.0, one) for matmuls, _ in every for one in matmuls.sent(layout.sizes)]
    again = [(share, one) for matmuls, share in every for one in matmuls.sent_again(layout.sizes)]
    flops = sum((3 + share) * matmuls.flops(layout.sizes) for matmuls, share in every)
    return TensorPlan(
        name,
        sizes,
        forward_bytes=sum(one.wire_bytes for _, one in sent if not one.backward),
        sent_bytes=sum(share * one.wire_bytes for share, one in (*sent, *again)),
        again_bytes=sum(share * one.wire_bytes for share, one in again),
        link_seconds=sum(share * links.seconds(one.kind, one.axes, one.wire_bytes) for share, one in (*sent, *again)),
        compute_seconds=flops / target.accelerator.rate("bf16"),
        weight_bytes=sum(matmuls.weight_bytes(layout.sizes) for matmuls, _ in every),
        input_bytes=sum(matmuls.input_bytes(layout.sizes) for matmuls, _ in every),
    )


def _matmuls(layout: Layout, model: _Model) -> list[tuple[Matmuls, float]]:
    """Returns the matmuls of a step, each once, and which share of them the backward pass computes again."""
    found: dict[Any, tuple[Matmuls, str]] = {}

    def note(place: str, x: Any, ws: Any, routes: Any) -> None:
        matmuls = Matmuls.of(x, ws, routes, model.precision)
        found[(place, matmuls)] = matmuls, product_name(x, ws)

    def gradients(state: Any, batch: Any) -> Any:
        params = jax.tree.map(model.precision.computing, state.params)
        return jax.grad(loss_of(model.loss_fn, state, batch), has_aux=True)(params)[0]

    state = abstract_state(layout, model.make_model, model.tx)
    with matmul_observer(note), tracing_under(layout), precision_scope(model.precision):
        program = jax.make_jaxpr(gradients)(state, model.batch).jaxpr
    once, again = Counter[str](), Counter[str]()
    _count(program, once, again, recomputes=False)
    return [(matmuls, again[name] / max(once[name], 1)) for matmuls, name in found.values()]


def _count(jaxpr: Jaxpr, once: Counter[str], again: Counter[str], *, recomputes: bool) -> None:
    """Counts the products of each name in the forward pass, and those that the backward pass computes again."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in needed_equations(jaxpr, jaxpr.outvars):
        if eqn.primitive.name == "name":
            if not recomputes:
                once[eqn.params["name"]] += 1
            elif _computed(eqn.invars[0], made):
                again[eqn.params["name"]] += 1
        for inner in inner_jaxprs(eqn):
            again_inside = eqn.primitive.name in ("checkpoint", "remat2") and eqn.params["differentiated"]
            _count(opened(inner), once, again, recomputes=recomputes or again_inside)


def _computed(value: Any, made: Mapping[Any, Any]) -> bool:
    """Whether a value comes from a product here, and not from one that was kept."""
    while value in made and made[value].primitive.name in _RESHAPES:
        value = made[value].invars[0]
    return value in made
