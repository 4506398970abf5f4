"""The notes below the tables of ``explain``: one line for each thing that may surprise the user, with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxpar.analysis.layout.rows import Row
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import listing
from jaxpar.parallel.partitioner.repair import Repaired, by_kind
from jaxpar.training.exact_weights import ExactWeights
from jaxpar.training.model import show


def wrongly_partitioned(repaired: Iterable[Repaired]) -> tuple[str, ...]:
    """Returns a note for each kind of operation that XLA's partitioner would compute wrongly.

    Args:
      repaired: the operations of the step.
    """
    places = lambda ones: ", ".join(dict.fromkeys(f"{one.site} over {'+'.join(one.axes)}" for one in ones))
    return tuple(
        f"wrong in XLA, right here: {fault.name}: {fault.what} if {fault.when}. The step {how}: {places(ones)}"
        for fault, how, ones in by_kind(repaired)
    )


def narrow_sums(rows: Sequence[Row], paths: Sequence[str], int8_reduced: bool) -> tuple[str, ...]:
    """Returns a note on gradients that are summed in 16 bits, or that are not reduced in int8.

    Args:
      rows: the rows of the report.
      paths: the parameters whose gradients the note is about. Without any, there is no note.
      int8_reduced: whether ``precision.reduce`` is int8. The note is then about the gradients that are not reduced in
        int8.
    """
    if not paths:
        return ()
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    size = show_bytes(sum(row.bytes for row in rows if row.path in set(paths)))
    count = f"{len(paths)} parameters" if len(paths) > 1 else "one parameter"
    text = (
        f"16-bit sums: the gradients of {count} ({size}) are summed over devices in the 16-bit compute dtype: "
        f"{named}. Remedy: use jp.sharded_dot(x, (w, dims)) instead of x @ w, or ZeRO stage 1 (parallel: "
        "{optimizer: {stage: 1}}), which sums all gradients in fp32."
    )
    if int8_reduced:
        text = (
            f"not in int8: {count} ({size}) and their reduced gradients are sent in the compute dtype, because they "
            f"do not go through jp.sharded_dot: {named}. Remedy: use ZeRO stage 1 (parallel: "
            "{optimizer: {stage: 1}}), which sends all tensors in int8."
        )
    return (text,)


def gathered_exactly(rows: Sequence[Row], gather: str | None, weights: ExactWeights) -> tuple[str, ...]:
    """Returns notes on weights that are gathered in the compute dtype, and on rounded ones that choose experts.

    Args:
      rows: the rows of the report.
      gather: the dtype in which other weights are gathered.
      weights: these weights. Those that no axis shards are left out.
    """
    sharded = {row.path for row in rows if any(row.spec)}
    shown = lambda path: show(("params", *path))
    reasons: dict[str, list[str]] = {}
    for path, reason in weights.reasons.items():
        if shown(path) in sharded:
            reasons.setdefault(reason, []).append(shown(path))
    texts = [
        f"gathered exactly: {listing(paths)} in the compute dtype instead of {gather}, because {reason}"
        for reason, paths in reasons.items()
    ]
    rounded = [shown(path) for path in weights.rounded_routers if shown(path) in sharded]
    if rounded:
        texts.append(
            f"rounded router: jp.sharded_dot gathers {listing(rounded)} in {gather}, so some tokens choose other "
            "experts. Remedy: jp.sharded_dot(x, (w, dims), exact=True)."
        )
    return tuple(texts)


def assumed_replicated(operations: Sequence[str]) -> tuple[str, ...]:
    """Returns a note on the operations whose sharding the memory estimate cannot follow."""
    if not operations:
        return ()
    text = (
        f"memory estimate: an upper bound. It counts large results of {listing(operations)} as replicated, because "
        "it has no sharding rule for them. Remedy: name the dims of the result, for example with jp.hint(x, "
        "'batch', 'embed')."
    )
    return (text,)


def with_reason(row: Row, operations: Sequence[str]) -> Row:
    """Returns a parameter's row with a note that ``operations`` make its initial value depend on the layout."""
    if not operations:
        return row
    reason = f"the last bits of its initial value depend on the layout, because of {listing(operations)}"
    return replace(row, why=(*row.why, reason))


def unequal_initial_values(parameters: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns a note on the parameters whose initial values depend on the layout.

    Args:
      parameters: path → the operations in its initializer whose float sums have no fixed order.
    """
    if not parameters:
        return ()
    paths = list(parameters)
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    operations = listing(sorted({name for names in parameters.values() for name in names}))
    text = (
        f"initial values: {named} may differ between layouts in the last bits, because the initializer uses "
        f"{operations}, whose floating-point sums have no fixed order. Remedy: write the initializer with sums "
        "(jnp.sum, jnp.mean), which init evaluates in a fixed order; or initialise once, save a checkpoint and "
        "restore it in each layout."
    )
    return (text,)
