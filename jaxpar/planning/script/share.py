"""What one device computes of a step, beside an equal share of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr

from jaxpar.analysis.hlo.audit import audit
from jaxpar.errors import AuditError
from jaxpar.planning.script.placed_array import PlacedArray
from jaxpar.utils.jaxprs import inner_jaxprs, opened

_MOST = 1.25
"""Times the equal share of the matmuls, above which a device does the work of others again."""
_LEAST = 1e6
"""FLOPs of a step whose distribution is of no matter."""


def matmul_flops(jaxpr: Jaxpr) -> float:
    """Returns the FLOPs of the dots and convolutions of a program; a loop of unknown length counts as one run.

    >>> import jax
    >>> loop = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=3)[0]
    >>> matmul_flops(jax.make_jaxpr(loop)(jax.numpy.ones((8, 8))).jaxpr)
    3072.0
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        shapes = [getattr(atom.aval, "shape", ()) for atom in (*eqn.invars, *eqn.outvars)]
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            total += 2.0 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in summed)
        elif eqn.primitive.name == "conv_general_dilated":
            outputs = shapes[1][eqn.params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * math.prod(shapes[-1]) * math.prod(shapes[1]) / outputs
        inner = [matmul_flops(opened(body)) for body in inner_jaxprs(eqn)]
        if inner:
            total += max(inner) if eqn.primitive.name == "cond" else sum(inner) * eqn.params.get("length", 1)
    return total


def warn_of_uneven_share(compiled: Any, jaxpr: Jaxpr, placed: Sequence[PlacedArray], devices: int) -> None:
    """Warn if a device computes more than its share of the matmuls, and of the arrays that cause it.

    Args:
      compiled: the compiled step.
      jaxpr: its program for all devices.
      placed: the arrays that it reads.
      devices: their number.
    """
    total = matmul_flops(jaxpr)
    if devices == 1 or total < _LEAST:
        return
    try:
        of_one = audit(compiled).matmul_flops
    except AuditError:
        return
    if of_one * devices <= _MOST * total:
        return
    whole = [a for a in placed if a.shape and not any(dim.axes for dim in a.resolved.dims)]
    causes = sorted((a for a in whole if a.role == "activations"), key=lambda a: -a.bytes)[:3]
    names = [f"{a.path} {list(a.shape)}" for a in causes if 100 * a.bytes >= causes[0].bytes]
    cause = f"Every device has all of {', '.join(names)}." if names else "The compiler does not divide all operations."
    warnings.warn(
        f"train_step: each of the {devices} devices computes {of_one / total:.2f} of the step's matmuls, "
        f"{of_one * devices / total:.1f} times its share. "
        f"{cause} Remedy: pass arrays of the batch whose first dims are multiples of {devices}, or choose another "
        "layout: print(train_step) shows the dims and how they are sharded.",
        stacklevel=4,
    )
