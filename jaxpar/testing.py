"""Assertions for users' own tests: what a layout promises, frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from jaxpar.analysis.compare import Verdict, compare
from jaxpar.analysis.hlo.audit import Audit, audit
from jaxpar.analysis.hlo.collectives import Collective
from jaxpar.errors import VerificationError
from jaxpar.sharding.layout import Layout
from jaxpar.training.model import MakeModel


def assert_matches_single_device(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    data: Sequence[Mapping[str, np.ndarray]],
    dims: Mapping[str, Sequence[str | None]],
    *,
    bound: float = 1e-5,
    seed: int = 0,
) -> Verdict:
    """Train on ``data`` on one device, and take each step in the layout too, from the same state; both must agree.

    Compared are the loss, every gradient, the carried variables, and what the optimizer makes of the layout's gradients.

    Args:
      layout: the layout to prove.
      make_model, tx, seed: as for :func:`jaxpar.init`. The model should compute in fp32 for a bound this tight.
      loss_fn: as for :func:`jaxpar.train_step`.
      data: one batch per step, name → global array.
      dims: name → logical dims of that array.
      bound: largest relative difference allowed, per tensor and for the loss.

    Returns:
      The differences that were found.

    Raises:
      VerificationError: naming the first module that diverges.

    >>> import jax, numpy as np, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16,)), "embed")}
    >>> loss_fn = lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean()
    >>> data = [{"x": np.ones((8, 16), np.float32)}]
    >>> assert_matches_single_device(layout, make_model, optax.sgd(0.1), loss_fn, data, {"x": ("batch", None)}).passed
    True
    """
    verdict = compare(layout.on_one_device(), layout, make_model, tx, loss_fn, data, dims, bound=bound, seed=seed)
    if not verdict.passed:
        raise VerificationError(
            f"the layout does not compute what one device computes (loss {verdict.loss:.2e}, gradients "
            f"{verdict.gradients:.2e} in {verdict.worst}, updates {verdict.updates:.2e}, bound {bound:.0e}). First: {verdict.first}."
        )
    return verdict


def assert_wire_bytes(
    program: Any, mesh: Any, expected: float, *, kind: str | None = None, axis: str | None = None, rtol: float = 1e-3
) -> Audit:
    """A compiled program must send ``expected`` bytes from each device in one run.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit already made, whose own mesh then counts.
      kind, axis: count only collectives of this kind, or over this axis.
      rtol: largest relative difference allowed.

    Returns:
      The audit.

    Raises:
      VerificationError: listing the collectives that count, with their sources; also when a loop's trip count is unknown.
      AuditError: an unknown kind or axis, or a program that cannot be read.
    """
    report = _certain(program, mesh)
    found = report.wire_bytes(kind, axis)
    if abs(found - expected) > rtol * abs(expected):
        what = " ".join(text for text in (kind, f"over {axis}" if axis else "") if text) or "all collectives"
        largest = sorted(report.select(kind, axis), key=lambda c: -c.total_wire_bytes)
        raise VerificationError(
            f"one device sends {found:.0f} bytes ({what}), but {expected:.0f} were expected (rtol {rtol:g})."
            + _listed(largest, lambda c: f"{c.total_wire_bytes:.0f} bytes: {c}")
        )
    return report


def assert_collectives(
    program: Any, mesh: Any, expected: Mapping[tuple[str, str | tuple[str, ...]], int], *, min_bytes: int = 0
) -> Audit:
    """A compiled program must execute exactly these collectives in one run.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit already made, whose own mesh then counts.
      expected: (kind, axis or tuple of axes) → executions. What is not listed must not happen.
      min_bytes: leave out collectives whose result is smaller, such as those of a loss.

    Returns:
      The audit.

    Raises:
      VerificationError: naming every difference, with the sources of what was found.
      AuditError: an unknown kind or axis, or a program that cannot be read.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> program = jax.jit(lambda x: (x * x).sum(0)).lower(x).compile()
    >>> _ = assert_collectives(program, mesh, {("all-reduce", "data"): 1})
    """
    report = _certain(program, mesh)
    wanted: dict[tuple[str, frozenset[str]], int] = {}
    for (kind, axes), count in expected.items():
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            report.select(kind, name)  # raises for a kind or an axis that does not exist
        wanted[kind, frozenset(names)] = count
    found: dict[tuple[str, frozenset[str]], list[Collective]] = {}
    for c in report.collectives:
        if c.result_bytes >= min_bytes:
            found.setdefault((c.kind, frozenset(c.axes)), []).append(c)
    lines = []
    for key in dict.fromkeys((*wanted, *found)):
        same = found.get(key, [])
        count = sum(c.count for c in same)
        if count != wanted.get(key, 0):
            what = f"{key[0]} over {'+'.join(axis for axis in report.mesh if axis in key[1])}"
            lines.append(f"{what}: {count}, expected {wanted.get(key, 0)}." + _listed(same, str))
    if lines:
        raise VerificationError("the program's collectives are not the expected ones.\n" + "\n".join(lines))
    return report


def assert_no_collective_in_conditional(program: Any, mesh: Any) -> Audit:
    """No branch of a compiled program may hold a collective.

    Devices that take different branches of a conditional wait for each other for ever. The compiler does not warn.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit already made, whose own mesh then counts.

    Returns:
      The audit.

    Raises:
      VerificationError: listing the collectives in branches, with their sources.
    """
    report = program if isinstance(program, Audit) else audit(program, mesh=mesh)
    inside = [c for c in (*report.collectives, *report.other_arms) if c.conditional]
    if inside:
        raise VerificationError(
            f"{len(inside)} collectives stand in a branch of a conditional, where devices that take another branch never "
            f"meet them. Remedy: move them out, or choose between their results with jnp.where." + _listed(inside, str)
        )
    return report


def _certain(program: Any, mesh: Any) -> Audit:
    """The audit of a program whose loops all show their trip counts."""
    report = program if isinstance(program, Audit) else audit(program, mesh=mesh)
    if not report.certain:
        raise VerificationError(
            f"what the program sends is not known: the trip count is unknown of {', '.join(report.unknown_loops)}."
        )
    return report


def _listed(collectives: Sequence[Collective], line: Callable[[Collective], str], most: int = 12) -> str:
    lines = [f"\n  {line(c)}" for c in collectives[:most]]
    return "".join(lines) + (f"\n  … and {len(collectives) - most} more" if len(collectives) > most else "")
