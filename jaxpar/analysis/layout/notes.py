"""What ``explain`` says beside its tables: a line for each thing that a user may not expect, with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpar.analysis.layout.report import Row
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import listing


def narrow(rows: Sequence[Row], paths: Sequence[str], packed: bool) -> tuple[str, ...]:
    """What is said of gradients that are summed in 16 bits, or that are not ``packed`` as was asked for."""
    if not paths:
        return ()
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    size = show_bytes(sum(row.bytes for row in rows if row.path in set(paths)))
    some = f"{len(paths)} parameters" if len(paths) > 1 else "one parameter"
    text = (
        f"16-bit sums: the gradients of {some} ({size}) are summed over devices in the 16 bits that the model computes in: {named}. "
        f"Remedy: jp.sharded_dot(x, (w, dims)) in the place of x @ w, or ZeRO stage 1 (parallel: {{optimizer: {{stage: 1}}}}), which sums all "
        f"gradients in fp32."
    )
    if packed:
        text = (
            f"not in int8: {some} ({size}) and what is summed of their gradients cross in the dtype of the compute, as they do not go through "
            f"jp.sharded_dot: {named}. Remedy: ZeRO stage 1 (parallel: {{optimizer: {{stage: 1}}}}), in which all tensors cross in int8."
        )
    return (text,)


def assumed(operations: Sequence[str]) -> tuple[str, ...]:
    """A note on the operations whose sharding the memory estimate cannot follow."""
    if not operations:
        return ()
    text = (
        f"memory estimate: an upper bound. It takes large results of {listing(operations)} as replicated, because it has no rule for how they "
        f"are sharded. Remedy: name the dims of the result, as jp.hint(x, 'batch', 'embed')."
    )
    return (text,)


def with_reason(row: Row, operations: Sequence[str]) -> Row:
    """A parameter's row; ``operations`` keep its initial value from being equal in every layout."""
    if not operations:
        return row
    return replace(
        row, why=(*row.why, f"its initial value depends on the layout in the last bits, through {listing(operations)}")
    )


def unequal(parameters: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A note on the parameters whose initial values depend on the layout."""
    if not parameters:
        return ()
    paths = list(parameters)
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    operations = listing(sorted({name for names in parameters.values() for name in names}))
    text = (
        f"initial values: {named} may differ between layouts in the last bits, because the initializer uses {operations}, whose float sums "
        f"have no fixed order. Remedy: write the initializer with sums (jnp.sum, jnp.mean), which init evaluates in a fixed order; or "
        f"initialise once, save a checkpoint and restore it in each layout."
    )
    return (text,)
