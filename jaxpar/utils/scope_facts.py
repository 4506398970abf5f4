"""Numbers that a program states in the names of its scopes: trip counts of loops, and FLOPs of kernels.

A compiled program shows neither the length of a loop that differs between devices or iterations, nor the FLOPs of a
custom kernel. Of the metadata that JAX can write, XLA's passes keep only ``op_name``, the path of the named scopes. The
code that builds such a loop or kernel therefore states the number in a scope, and :mod:`jaxpar.analysis.hlo` reads it.
All of these names are written and read here.
"""

from __future__ import annotations

import re
from fractions import Fraction


def trip_count_scope(count: int, rounds: int | None = None) -> str:
    """Returns the name of a scope for a loop.

    Args:
      count: how often the loop runs its body, averaged over devices.
      rounds: the iterations of an enclosing loop, if ``count`` is a sum over them.

    >>> trip_count_scope(12), trip_count_scope(44, rounds=14)
    ('visits_12', 'visits_44of14')
    """
    return f"visits_{count}" if rounds is None else f"visits_{count}of{rounds}"


def trip_count_in(op_name: str) -> int | Fraction | None:
    """Returns how often a loop of this ``op_name`` runs its body in each iteration of the loop around it.

    >>> trip_count_in("jit(step)/visits_44of14/while"), trip_count_in("jit(step)/while")
    (Fraction(22, 7), None)
    """
    stated = re.findall(r"\bvisits_(\d+)(?:of(\d+))?/", op_name)
    if not stated:
        return None
    count, rounds = stated[-1]  # the last match is the loop's own; earlier ones are of enclosing loops
    mean = Fraction(int(count), int(rounds or 1))
    return int(mean) if mean.denominator == 1 else mean


def matmul_flops_scope(forward: int, gradient: int | None = None) -> str:
    """Returns the name of a scope for an attention kernel.

    Args:
      forward: the FLOPs of one matmul in the forward kernel.
      gradient: those of one matmul in the gradient kernels; ``None`` if they are the same.

    >>> matmul_flops_scope(8), matmul_flops_scope(8, 12)
    ('attention_matmul_flops_8', 'attention_matmul_flops_8_12')
    """
    return "_".join(["attention_matmul_flops", *(str(n) for n in (forward, gradient) if n is not None)])


def matmul_flops_in(op_name: str) -> tuple[int, int] | None:
    """Returns the FLOPs of one matmul in the forward and in the gradient kernels of this ``op_name``.

    >>> matmul_flops_in("jit(step)/attention_matmul_flops_8_12/flash_fwd/pallas_call")
    (8, 12)
    """
    found = re.search(r"attention_matmul_flops_(\d+)(?:_(\d+))?", op_name)
    return None if found is None else (int(found[1]), int(found[2] or found[1]))
