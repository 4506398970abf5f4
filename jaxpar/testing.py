"""Assertions for users' tests: a layout computes what one device does, and its program sends what is expected."""

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
from jaxpar.utils.checks import Range, check_number


def assert_matches_single_device(
    layout: Layout,
    make_model: MakeModel,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    data: Sequence[Mapping[str, np.ndarray]],
    dims: Mapping[str, Sequence[str | None]] | None = None,
    *,
    bound: float = 1e-5,
    seed: int = 0,
) -> Verdict:
    """Asserts that each training step in a layout computes what it computes on one device.

    One device trains on ``data``, and the layout takes each step from the same state. Compared are the loss, every
    gradient, the carried variables, and the result of the optimizer for the layout's gradients.

    Args:
      layout: the layout to check.
      make_model, tx, seed: as for :func:`jaxpar.init`. The model has to compute in fp32 to meet the default bound.
      loss_fn: as for :func:`jaxpar.train_step`.
      data: one batch per step, name → global array.
      dims: name → logical dims of that array; required for every array of a batch.
      bound: the largest relative difference allowed, per tensor and for the loss.

    Returns:
      The largest differences found.

    Raises:
      VerificationError: a difference exceeds ``bound``. The text names the first module that diverges.
      LayoutError, ModelError, AnnotationError, ConfigError: as for :func:`jaxpar.init` and :func:`jaxpar.train_step`.

    >>> import jax, numpy as np, optax
    >>> import jaxpar as jp
    >>> layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed="data"))
    >>> make_model = lambda key: {"w": jp.tag(jax.random.normal(key, (16,)), "embed")}
    >>> loss_fn = lambda params, batch: ((batch["x"] @ params["w"]) ** 2).mean()
    >>> data = [{"x": np.ones((8, 16), np.float32)}]
    >>> assert_matches_single_device(layout, make_model, optax.sgd(0.1), loss_fn, data, {"x": ("batch", None)}).passed
    True
    """
    verdict = compare(layout.on_one_device(), layout, make_model, tx, loss_fn, data, dims or {}, bound=bound, seed=seed)
    if not verdict.passed:
        raise VerificationError(
            f"the layout does not compute what one device computes (loss {verdict.loss:.2e}, gradients "
            f"{verdict.gradients:.2e} in {verdict.worst}, updates {verdict.updates:.2e}, bound {bound:.0e}). First: "
            f"{verdict.first}."
        )
    return verdict


def assert_wire_bytes(
    program: Any, mesh: Any, expected: float, *, kind: str | None = None, axis: str | None = None, rtol: float = 1e-3
) -> Audit:
    """Asserts that one run of a compiled program sends ``expected`` bytes from each device.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit, whose own mesh is then used.
      expected: bytes per device.
      kind, axis: count only collectives of this kind, or over this axis.
      rtol: the largest relative difference allowed.

    Returns:
      The audit.

    Raises:
      VerificationError: the bytes differ, or the trip count of a loop is unknown. The text lists the collectives that
        were counted, with their sources.
      AuditError: an unknown kind or axis, or a program that cannot be read.
      ConfigError: ``rtol`` is not between 0 and 1.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> program = jax.jit(lambda x: (x * x).sum(0)).lower(x).compile()
    >>> _ = assert_wire_bytes(program, mesh, 2 * 7 / 8 * 32 * 4)  # an all-reduce of 32 floats over 8 devices
    """
    check_number("rtol", rtol, Range(0, 1.0))
    report = _certain(program, mesh)
    found = report.wire_bytes(kind, axis)
    if not abs(found - expected) <= rtol * abs(expected):  # also if one of them is NaN
        what = " ".join(text for text in (kind, f"over {axis}" if axis else "") if text) or "all collectives"
        largest = sorted(report.select(kind, axis), key=lambda c: -c.total_wire_bytes)
        raise VerificationError(
            f"one device sends {found:.0f} bytes ({what}), expected {expected:.0f} (rtol {rtol:g})."
            + _listed(largest, lambda c: f"{c.total_wire_bytes:.0f} bytes: {c}")
        )
    return report


def assert_collectives(
    program: Any, mesh: Any, expected: Mapping[tuple[str, str | tuple[str, ...]], int], *, min_bytes: int = 0
) -> Audit:
    """Asserts that one run of a compiled program executes exactly these collectives.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit, whose own mesh is then used.
      expected: (kind, axis or tuple of axes) → number of executions. A collective that is not listed is an error.
      min_bytes: ignore collectives with a smaller result, such as those of a loss.

    Returns:
      The audit.

    Raises:
      VerificationError: the collectives differ, or the trip count of a loop is unknown. The text lists every
        difference, with the sources of the collectives found.
      AuditError: an unknown kind or axis, or a program that cannot be read.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> program = jax.jit(lambda x: (x * x).sum(0)).lower(x).compile()
    >>> _ = assert_collectives(program, mesh, {("all-reduce", "data"): 1})
    """
    report = _certain(program, mesh)
    expected_counts: dict[tuple[str, frozenset[str]], int] = {}
    for (kind, axes), count in expected.items():
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            report.select(kind, name)  # raises for an unknown kind or axis
        expected_counts[kind, frozenset(names)] = count
    found: dict[tuple[str, frozenset[str]], list[Collective]] = {}
    for c in report.collectives:
        if c.result_bytes >= min_bytes:
            found.setdefault((c.kind, frozenset(c.axes)), []).append(c)
    lines = []
    for key in dict.fromkeys((*expected_counts, *found)):
        same = found.get(key, [])
        count = sum(c.count for c in same)
        if count != expected_counts.get(key, 0):
            what = f"{key[0]} over {'+'.join(axis for axis in report.mesh if axis in key[1])}"
            lines.append(f"{what}: {count}, expected {expected_counts.get(key, 0)}." + _listed(same, str))
    if lines:
        raise VerificationError("the program's collectives differ from the expected ones.\n" + "\n".join(lines))
    return report


def assert_no_collective_in_conditional(program: Any, mesh: Any) -> Audit:
    """Asserts that no branch of a conditional in a compiled program holds a collective.

    Devices that take different branches would wait for each other forever. The compiler does not warn about it.

    Args:
      program, mesh: as for :func:`jaxpar.audit`; or an audit, whose own mesh is then used.

    Returns:
      The audit.

    Raises:
      VerificationError: a branch holds a collective. The text lists them all, with their sources.
      AuditError: a program that cannot be read, or a mesh of another size.

    >>> import jax, jax.numpy as jnp, jaxpar as jp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jp.MeshSpec(data=-1).build()
    >>> x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> program = jax.jit(lambda x: (x * x).sum(0)).lower(x).compile()
    >>> assert_no_collective_in_conditional(program, mesh).count()
    1
    """
    report = program if isinstance(program, Audit) else audit(program, mesh=mesh)
    inside = [c for c in (*report.collectives, *report.other_arms) if c.conditional]
    if inside:
        raise VerificationError(
            f"{len(inside)} collectives are in a branch of a conditional, so devices that take another branch "
            "never execute them. Remedy: move them out of the branch, or select between their results with "
            "jnp.where." + _listed(inside, str)
        )
    return report


def _certain(program: Any, mesh: Any) -> Audit:
    """Returns the audit of a program, after checking that the trip counts of all of its loops are known."""
    report = program if isinstance(program, Audit) else audit(program, mesh=mesh)
    if not report.certain:
        raise VerificationError(
            f"the bytes that the program sends are unknown, because these loops have an unknown trip count: "
            f"{', '.join(report.unknown_loops)}."
        )
    return report


def _listed(collectives: Sequence[Collective], line: Callable[[Collective], str], most: int = 12) -> str:
    lines = [f"\n  {line(c)}" for c in collectives[:most]]
    return "".join(lines) + (f"\n  … and {len(collectives) - most} more" if len(collectives) > most else "")
