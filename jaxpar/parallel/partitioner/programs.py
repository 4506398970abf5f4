"""The smallest program for each fault of XLA's partitioner, which tell what the installed version computes wrongly.

As a command, it runs the programs whose numbers are its arguments, each on eight devices::

    python -m jaxpar.parallel.partitioner.programs 0 1 2
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.parallel.partitioner.faults import FEATURES, FFT, GROUPS, ORDER, ROWS, SHIFT, SPREAD, UPDATE, Fault
from jaxpar.parallel.partitioner.repair import avoid_faults
from jaxpar.utils.simulate_devices import simulate_devices


@dataclass(frozen=True)
class FaultyProgram:
    """A program that the partitioner computes wrongly.

    Attributes:
      fault: of the table.
      run: computes an array.
      shapes: of its operands.
      specs: of its operands over the axes ``x``, ``y`` and ``z`` of two devices each.
      result: the spec of its result, or ``None`` for what the compiler likes.
    """

    fault: Fault
    run: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    result: P | None = None

    def error(self, *, avoid: bool = False) -> float:
        """Returns the error of the result, relative to its largest number.

        Args:
          avoid: whether to run what a step runs instead.
        """
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
        operands = [
            np.sin(np.arange(1.0, np.prod(shape) + 1, dtype=np.float32)).reshape(shape) for shape in self.shapes
        ]
        expected = np.asarray(jax.jit(self.run)(*operands))

        def run(*operands: jax.Array) -> jax.Array:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                result: jax.Array = (avoid_faults(self._run, self.specs) if avoid else self._run)(*operands)
                return result

        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, self.specs, strict=True)]
        result = np.asarray(jax.jit(run)(*placed))
        return float(np.abs(result - expected).max() / np.abs(expected).max())

    def _run(self, *operands: jax.Array) -> jax.Array:
        result = self.run(*operands)
        if self.result is None:
            return result
        return jax.lax.with_sharding_constraint(result, NamedSharding(jax.sharding.get_abstract_mesh(), self.result))


def _conv(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def _kernel_gradient(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
    return jax.grad(lambda w: (_conv(x, w, groups) ** 2).sum())(w)


_IMAGES, _KERNEL = (4, 8, 8, 4), (3, 3, 4, 8)
PROGRAMS = (
    FaultyProgram(ROWS, _conv, (_IMAGES, _KERNEL), (P("x", "y"), P(None, None, None, "z"))),
    FaultyProgram(ROWS, _kernel_gradient, (_IMAGES, _KERNEL), (P("x", "y"), P())),
    FaultyProgram(GROUPS, lambda x, w: _kernel_gradient(x, w, 4), (_IMAGES, (3, 3, 1, 4)), (P("x"), P())),
    FaultyProgram(ORDER, jnp.matmul, ((8, 8), (8, 8)), (P(None, "x"), P("x")), P("x", ("z", "y"))),
    FaultyProgram(SHIFT, lambda x: jax.lax.pad(x, 0.0, ((-1, 1, 0),)), ((8,),), (P(),), P("x")),
    FaultyProgram(SHIFT, jax.grad(lambda a, b: (jax.lax.cumprod(a) * b).sum()), ((8,), (8,)), (P("x"), P())),
    FaultyProgram(UPDATE, lambda x, u: jax.lax.dynamic_update_slice(x, u, (9,)), ((8,), (1,)), (P("x"), P())),
    FaultyProgram(
        FEATURES, lambda x, w: _conv(x, w, 4), ((4, 8, 8, 8), (1, 1, 2, 16)), (P(None, None, None, "x"), P())
    ),
    FaultyProgram(FFT, jax.grad(lambda x: (jnp.fft.fftn(x).real ** 2).sum()), ((4, 4, 4),), (P(None, "x"),)),
    FaultyProgram(SPREAD, lambda x: jax.lax.pad(x, 0.0, ((-1, -1, 1),)), ((8,),), (P("x"),)),
    FaultyProgram(FEATURES, lambda x, w: _conv(x, w, 8), ((4, 8, 8, 8), (1, 1, 1, 8)), (P(None, None, None, "x"), P())),
)
"""Those that end the process are the last ones."""


def present(timeout: float = 120.0) -> dict[int, str]:
    """Returns what the installed XLA makes of each program, by number: ``right``, ``wrong``, ``fails`` or ``aborts``.

    Runs them in processes of their own, because some of them end it.

    Args:
      timeout: seconds for each process.

    Raises:
      subprocess.TimeoutExpired: a process takes longer.
    """
    results: dict[int, str] = {}
    while left := [number for number in range(len(PROGRAMS)) if number not in results]:
        child = subprocess.run(
            [sys.executable, "-m", __name__, *map(str, left)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        lines = [line.split() for line in child.stdout.splitlines()]
        results |= {int(number): result for number, result in lines}
        ended = [number for number in left if number not in results]
        if ended:
            results[ended[0]] = "aborts"
    return results


def _main(numbers: Sequence[str]) -> None:
    simulate_devices(8)
    for number in map(int, numbers):
        try:
            result: Any = "right" if PROGRAMS[number].error() < 1e-3 else "wrong"
        except (RuntimeError, ValueError):  # XLA's own errors
            result = "fails"
        print(number, result, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
