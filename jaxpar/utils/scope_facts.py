"""Numbers that a program states in the names of its scopes: trip counts, FLOPs of kernels, rows of ragged operations.

A compiled program shows neither the length of a loop that differs between devices or iterations, nor the FLOPs of a
custom kernel, nor how many rows of a ragged operation's buffer are in use. Of the metadata that JAX can write, XLA's
passes keep only ``op_name``, the path of the named scopes. The code that builds such an operation therefore states the
number in a scope, and :mod:`jaxpar.analysis.hlo` reads it. All of these names are written and read here.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from fractions import Fraction

import jax


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


def expected_rows(rows: int) -> AbstractContextManager[None]:
    """Returns a named scope for ragged operations whose buffers are larger than their data.

    The operations are exchanges (``jax.lax.ragged_all_to_all``) and grouped matmuls (``jax.lax.ragged_dot``). The scope
    also holds for their gradients and for their recomputation.

    Args:
      rows: the rows of the buffer that one device uses in one call if the load is balanced over devices. An exchange
        counts all rows that a device sends, including those that it keeps.

    >>> import jax.numpy as jnp
    >>> def matmul(x, w, group_sizes):
    ...     with expected_rows(2048):
    ...         return jax.lax.ragged_dot(x, w, group_sizes)
    >>> x, w, group_sizes = jnp.ones((4096, 8)), jnp.ones((4, 8, 8)), jnp.full(4, 512)
    >>> "expected_rows_2048" in jax.jit(matmul).lower(x, w, group_sizes).as_text(debug_info=True)
    True
    """
    return jax.named_scope(f"expected_rows_{rows:d}")


def expected_rows_in(op_name: str) -> int | None:
    """Returns the expected rows of a ragged operation of this ``op_name``; the innermost scope decides.

    >>> expected_rows_in("jit(step)/transpose(jvp(expected_rows_2048))/ragged_all_to_all")
    2048
    """
    stated = re.findall(r"\bexpected_rows_(\d+)\b", op_name)
    return int(stated[-1]) if stated else None
