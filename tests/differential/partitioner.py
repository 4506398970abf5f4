"""Single operations under random shardings, as a step runs them, compared with one device in fp64.

Without :mod:`jaxpar.parallel.partitioner` every tenth case is a fault of XLA's partitioner.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from .cases import Dice, Differences, InvalidCase

BOUND = 1e-9
"""Both programs compute in fp64 on arrays of up to 4,096 entries; the operations have condition numbers below 1e5."""
MESHES = ((2, 2, 2), (2, 2, 2), (2, 4), (4, 2), (8,), (1, 8), (2, 1, 4))
RESULT = -1
"""The number of the result among the operands of a placement."""


@dataclass(frozen=True)
class Case:
    """A function of arrays and where each array is.

    Attributes:
      name: a key of ``OPERATIONS``.
      variant: the seed of the operation's parameters and of its operands' shapes.
      mesh: the sizes of the mesh axes.
      places: ``(operand, dim, axis)``: this axis shards that dim; axes of one dim are in this order. Operand -1 is the
        result, and the last one is the array that weights the result where gradients are compared.
      fixed: whether the result is constrained, also to a replicated sharding.
      gradients: whether gradients of a weighted sum are compared too.
      step: whether :func:`jaxpar.train_step` computes them, of a model whose parameters are the real operands.
    """

    name: str = "exp"
    variant: int = 0
    mesh: tuple[int, ...] = (1,)
    places: tuple[tuple[int, int, int], ...] = ()
    fixed: bool = False
    gradients: bool = False
    step: bool = False


def draw(dice: Dice) -> Case:
    """Draw an operation and a sharding of each operand and of the result."""
    import jax

    from .operations import OPERATIONS

    name, variant = dice.one(*OPERATIONS), dice.whole(0, 999)
    drawn = OPERATIONS[name](Dice(variant, 0))
    with jax.enable_x64(True):
        result = jax.eval_shape(drawn.function, *_arrays(drawn, variant))
    gradients, fixed = drawn.smooth and dice.chance(0.7), dice.chance(0.6)
    mesh = dice.one(*MESHES)
    shapes = {i: operand.shape for i, operand in enumerate(drawn.operands)}
    shapes |= {RESULT: result.shape} if fixed else {}
    shapes |= {len(drawn.operands): result.shape} if gradients else {}
    places = tuple(p for i, dims in shapes.items() if dice.chance(0.8) for p in _placed(dice, i, dims, mesh))
    step = gradients and any(operand.real for operand in drawn.operands) and dice.chance(0.4)
    return Case(name, variant, mesh, places, fixed, gradients, step)


def _placed(dice: Dice, operand: int, dims: tuple[int, ...], mesh: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Puts each axis on a random dim that it divides, or leaves it idle."""
    left, places = list(dims), []
    for axis in dice.rng.permutation(len(mesh)).tolist():
        dim = dice.whole(0, max(0, len(dims) - 1))
        if dims and dice.chance(0.65) and left[dim] % mesh[axis] == 0:
            left[dim] //= mesh[axis]
            places.append((operand, dim, axis))
    return places


def _arrays(drawn: Any, variant: int) -> list[Any]:
    import numpy as np

    rng = np.random.default_rng((variant, 1))
    return [operand.array(rng) for operand in drawn.operands]


def run(case: Case) -> Differences:
    """Compare the result and the gradients with those of one device."""
    import jax

    from .operations import OPERATIONS

    if case.name not in OPERATIONS or math.prod(case.mesh) > 8 or min(case.mesh) < 1:
        raise InvalidCase("no such operation or mesh")
    with jax.enable_x64(True):
        return _compared(case, OPERATIONS[case.name](Dice(case.variant, 0)))


def _compared(case: Case, drawn: Any) -> Differences:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpar.parallel.partitioner.repair import avoid_faults

    arrays = _arrays(drawn, case.variant)
    result = jax.eval_shape(drawn.function, *arrays)
    weights = np.random.default_rng((case.variant, 2)).normal(size=result.shape)
    devices = np.array(jax.devices()[: math.prod(case.mesh)]).reshape(case.mesh)
    mesh = jax.sharding.Mesh(devices, tuple("xyz")[: len(case.mesh)])
    shapes = {RESULT: result.shape, **{i: x.shape for i, x in enumerate([*arrays, weights])}}
    placements = {i: NamedSharding(mesh, PartitionSpec(*_spec(case, i, s))) for i, s in shapes.items()}
    real = [i for i, operand in enumerate(drawn.operands) if operand.real] if case.gradients else []

    def function(fix: bool, weights: Any, *arrays: Any) -> tuple[Any, Any]:
        def weighted(*chosen: Any) -> tuple[Any, Any]:
            inputs = list(arrays)
            for i, x in zip(real, chosen, strict=True):
                inputs[i] = x
            y = drawn.function(*inputs)
            y = jax.lax.with_sharding_constraint(y, placements[RESULT]) if fix else y
            return jnp.sum(y * weights), y

        chosen = [arrays[i] for i in real]
        if not real:
            return weighted()[1], ()
        gradients, y = jax.grad(weighted, range(len(real)), has_aux=True)(*chosen)
        return y, gradients

    inputs = [weights, *arrays]
    want = jax.device_get(jax.jit(function, static_argnums=0)(False, *inputs))
    differences = Differences()
    order = [len(arrays), *range(len(arrays))]
    placed = [jax.device_put(x, placements[i]) for i, x in zip(order, inputs, strict=True)]
    specs = [placements[i].spec for i in order]

    def correct(*inputs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return avoid_faults(functools.partial(function, case.fixed), specs)(*inputs)

    try:
        if case.step:
            got, want = _stepped(case, drawn, mesh, arrays, weights, real), (np.sum(want[0] * weights), want[1])
        else:
            got = jax.device_get(jax.jit(correct)(*placed))
    except jax.errors.JaxRuntimeError as error:
        if "fft_thunk" in str(error):  # XLA:CPU's transform takes no array in another order of dims, and says so
            return differences
        raise
    for name, a, b in zip(
        ["result", *(f"gradient of operand {i}" for i in real)], [got[0], *got[1]], [want[0], *want[1]], strict=True
    ):
        differences.check(name, a, b, BOUND, label="fp64")
    if differences.wrong:
        program = " ".join(str(jax.make_jaxpr(drawn.function)(*arrays)).split())
        differences.claim(False, f"{program}, {_described(case, shapes)}")
    return differences


def _stepped(case: Case, drawn: Any, mesh: Any, arrays: list[Any], weights: Any, real: list[int]) -> tuple[Any, Any]:
    """Returns the loss and the gradients that a training step computes; a dim's name is that of its array and place."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxpar as jp

    every = {**dict(enumerate(arrays)), len(arrays): weights}
    result = jax.eval_shape(drawn.function, *arrays)
    shapes = {RESULT: result.shape, **{i: x.shape for i, x in every.items()}}
    names = {i: [f"dim_{i % 99}_{dim}" for dim in range(len(shape))] for i, shape in shapes.items()}
    rules = {
        name: axes for i, shape in shapes.items() for name, axes in zip(names[i], _spec(case, i, shape), strict=True)
    }
    automatic = jax.sharding.Mesh(
        mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * mesh.devices.ndim
    )
    layout = jp.Layout(automatic, jp.Rules(batch=None, **rules))

    def loss(model: Any, batch: Any) -> Any:
        read = {**{int(key): x for key, x in model.items()}, **{int(key): x for key, x in batch.items()}}
        y = drawn.function(*(read[i] for i in range(len(arrays))))
        y = jp.hint(y, *names[RESULT]) if case.fixed else y
        return jnp.sum(y * read[len(arrays)])

    make = lambda key: {str(i): jp.tag(jnp.asarray(arrays[i]), *names[i]) for i in real}
    batch = {str(i): jp.shard_array(layout, x, *names[i]) for i, x in every.items() if i not in real}
    step = jp.train_step(layout, loss, return_grads=True)
    _, metrics = step(jp.init(layout, make, optax.sgd(0.1)), batch)
    return jax.device_get((metrics["loss"], [metrics["grads"][str(i)] for i in real]))


def _axes(case: Case, operand: int, dims: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The axes of each dim of an array, in order."""
    axes: list[tuple[int, ...]] = [()] * len(dims)
    for _, dim, axis in (place for place in case.places if place[0] == operand):
        if not (dim < len(dims) and 0 <= axis < len(case.mesh)) or any(axis in others for others in axes):
            raise InvalidCase("a placement without a meaning")
        axes[dim] = (*axes[dim], axis)
    if any(n % math.prod(case.mesh[a] for a in names) for n, names in zip(dims, axes, strict=True)):
        raise InvalidCase("a dim that its axes do not divide")
    return tuple(axes)


def _spec(case: Case, operand: int, dims: tuple[int, ...]) -> list[tuple[str, ...] | None]:
    return [tuple("xyz"[axis] for axis in names) or None for names in _axes(case, operand, dims)]


def _described(case: Case, shapes: dict[int, tuple[int, ...]]) -> str:
    specs = {i: tuple("".join(names or ()) for names in _spec(case, i, dims)) for i, dims in shapes.items()}
    return f"mesh {case.mesh}, sharded {specs}"
