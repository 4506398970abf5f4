"""The error messages of the sharding layer: one function per problem, from plain names and sizes.

The other modules of :mod:`jaxpar.sharding` decide what is wrong. The wording is kept here, so that it stays consistent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxpar.errors import did_you_mean, listing

NO_LAYOUT = (
    "no active layout, but constrain() and hint() need one. Remedy: run inside 'with layout:', or call the "
    "model through train_step(layout, ...); for one device, Layout(MeshSpec().build(jax.devices()[:1]), rules)."
)


def product(sizes: Mapping[str, int]) -> str:
    """Returns the axes whose size is not 1, as ``data=4 × model=2``."""
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"


def tensor(path: str, names: Sequence[str | None], shape: Sequence[int] | None) -> str:
    """Returns the tensor's name in a problem, as ``params/kernel [8, 6] (embed, mlp)``."""
    return f"{path}{'' if shape is None else f' {list(shape)}'} ({', '.join(map(str, names))})"


def written(rule: object) -> str:
    """Returns a rule as users write it: ``model``, ``(replica, data)``, ``None``, ``first_of(model, None)``."""
    if isinstance(rule, tuple | list):
        return "None" if not rule else str(rule[0]) if len(rule) == 1 else f"({', '.join(rule)})"
    return str(rule)


def unannotated(tensors: Sequence[tuple[str, Sequence[int]]], most: int = 4) -> str:
    """Reports all parameters without names as one problem: usually, either all have names or none has."""
    shown = ", ".join(f"{path} {list(shape)}" for path, shape in tensors[:most])
    rest = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    what = f"{shown} has" if len(tensors) == 1 else f"{len(tensors)} parameters have"
    which = "" if len(tensors) == 1 else f": {shown}{rest}"
    it = "it" if len(tensors) == 1 else "them"
    return (
        f"{what} no logical dims{which}. Remedy: annotate {it} (jaxpar.nnx.axes, jaxpar.linen.axes, jp.tag), or allow "
        f"replication with unannotated='replicate' in the rules; over(axis) and jp.Zero then still shard {it}."
    )


def entry(role: str, dim: str) -> str:
    """Returns the name of a table entry: ``mlp`` in the base table, ``params: mlp`` in a role."""
    return f"{role}: {dim}" if role else dim


# Meshes.


def two_free_axes(axes: Iterable[str]) -> str:
    """Reports two or more mesh axes of size -1."""
    return f"the mesh axes {listing(axes)} are -1, but only one can be. Remedy: give the others a size."


def unknown_mesh_axis(axis: object, axes: Sequence[str]) -> str:
    """Reports a mesh axis that does not exist."""
    return f"unknown mesh axis {axis!r}.{did_you_mean(axis, axes)} The axes are: {', '.join(axes)}."


def open_mesh(asked: Mapping[str, int]) -> str:
    """Reports an abstract mesh with a size of -1 and no number of devices."""
    return f"abstract() of the mesh {product(asked)} requires a number of devices, such as abstract(4096)."


def mesh_misfit(asked: Mapping[str, int], fixed: int, devices: int) -> str:
    """Says why the sizes do not multiply to the number of devices, and lists each change of one axis that fits."""
    if devices < 1:
        return f"a mesh needs at least one device, but the number of devices is {devices}."
    text = f"the mesh {product(asked)} does not fit {devices} devices"
    if -1 in asked.values():
        fits = [str(d) for d in range(1, devices + 1) if devices % d == 0]
        return (
            f"{text}, because {devices} is not a multiple of {fixed}. Remedy: use other sizes that multiply to "
            f"{' or '.join(fits)}."
        )
    named = [axis for axis, size in asked.items() if size > 1 or axis == "data"]
    fits = [f"{axis}={devices * asked[axis] // fixed}" for axis in named if devices * asked[axis] % fixed == 0]
    return (
        f"{text}, because its sizes multiply to {fixed}. Remedy: use "
        f"{' or '.join(fits) or f'sizes that multiply to {devices}'}."
    )


def uneven_groups(groups: str, counts: Mapping[int, int]) -> str:
    """Reports slices or processes that hold different numbers of devices."""
    shown = ", ".join(f"{i}: {count}" for i, count in sorted(counts.items()))
    return (
        f"the {groups} have different numbers of devices ({shown}). Remedy: pass build() the same number of devices of "
        f"each."
    )


def torn_block(mesh: Mapping[str, int], block: Mapping[str, int], number: int, groups: str, whole: int) -> str:
    """Reports a block of axes that would span several slices or processes, although it is no larger than one."""
    return (
        f"the mesh {product(mesh)} does not fit {number} {groups} of {whole} devices: {product(block)} would span "
        f"several {groups}. Remedy: make its size divide {whole}."
    )


# Tables of rules.


def two_rules(dim: str, first: object, second: object) -> str:
    """Reports a dim with two rules."""
    both = f"two rules for {dim!r}: {written(first)} and {written(second)}"
    return f"{both}. Remedy: keep one, or write a fallback as {dim}=first_of(...)."


def not_in_base(where: str, dim: str, base: Iterable[str]) -> str:
    """Reports an overlay of a dim that the base table lacks."""
    return (
        f"{where} names {dim!r}, which is not in the base table.{did_you_mean(dim, base)} Remedy: correct the name, or "
        f"add it to the base table."
    )


def not_axes(where: str, value: object, meant: Iterable[str]) -> str:
    """Reports a value that is not a rule."""
    kinds = "an axis, a tuple of axes (major to minor) or None"
    return f"{where} must be {kinds}, got {value!r}.{did_you_mean(where, meant)}"


# Tensors under the rules.


def wrong_rank(rank: int, named: int, *, stackable: bool) -> str:
    """Returns the problem of a tensor whose rank is not the number of its names."""
    stacks = " For stacked layers, see jaxpar.nnx.stacked() or, in Linen, nn.PARTITION_NAME." if stackable else ""
    return f"the tensor has rank {rank}, but {named} dim names. Remedy: give each dim a name or None.{stacks}"


def unknown_dim(name: str, known: Collection[str]) -> str:
    """Returns the problem of a dim that the rules do not know."""
    if not known:
        return f"the dim is named {name!r}, but the rules table is empty. Remedy: give Rules a rule for {name!r}."
    return (
        f"unknown logical dim {name!r}.{did_you_mean(name, known)} The rules know {listing(sorted(known))}. Remedy: "
        f"correct the annotation, or add {name!r} to the rules (as None to leave it unsharded)."
    )


def claimed_axis(axis: str, rival: str, name: str) -> str:
    """Returns why a dim cannot take an axis that another dim has claimed."""
    return f"the axis {axis!r} is claimed by the dims {rival!r} and {name!r}"


def no_multiple(name: str, size: int, axes: Mapping[str, int]) -> str:
    """Returns why a dim cannot take axes that do not divide its size."""
    ways = f" = {math.prod(axes.values())}" if len(axes) > 1 else ""
    return f"the dim {name!r} has size {size}, which is not a multiple of {product(axes)}{ways}"


def remedy(name: str, rivals: Collection[str], *, chooses: bool) -> str:
    """Returns the remedy for a dim that does not fit.

    Args:
      name: the dim.
      rivals: the dims that claim the same axes.
      chooses: whether the dim's rule is a ``first_of``.
    """
    if chooses:
        return "add None as the last option, to leave the dim unsharded"
    if name in rivals:
        return "give one of the two another name, with its own rule"
    if rivals:
        return "give one of the two another axis or None, possibly in one role only (activations, params, ...)"
    return f"change the size, the rule or the mesh, or leave such dims unsharded: indivisible={{{name!r}: 'replicate'}}"


def undivided_layers(stacks: Sequence[str], size: int, why: str, rule: str, stages: int) -> str:
    """Reports stacks of ``size`` layers that the pipeline stages do not divide, and offers uneven stages."""
    fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    text = (
        f"{stacks[0]}{f' and {len(stacks) - 1} more' if len(stacks) > 1 else ''}: {why} (rule {rule}). Remedy: use a "
        f"number of stages that divides {size} ({fits})"
    )
    if size < stages:
        return f"{text}."
    low, more = divmod(size, stages)
    each = (*(low + 1,) * more, *(low,) * (stages - more))
    return (
        f"{text}; or use stages of different sizes, where every stage stores all layers of every stack: "
        f"Rules(indivisible={{'layers': 'replicate'}}) and jp.Pipeline(schedule, layers={each}), one number for each "
        f"piece of the model; in YAML rules: {{indivisible: {{layers: replicate}}}} and parallel: {{pipeline: "
        f"{{offset: {[n - low for n in each]}}}}}."
    )


def undivided_rows(arrays: Iterable[str], why: str, rule: str) -> str:
    """Reports arrays of a batch whose rows the axes do not divide, grouped by the reason."""
    return (
        f"{', '.join(arrays)}: {why} (rule {rule}), so every device would compute all rows. Remedy: pad the rows to a "
        f"multiple and mask the padding out of the loss, drop the remainder, or let every device compute all of them: "
        f"indivisible={{'batch': 'replicate'}} (YAML: indivisible: {{batch: replicate}}). An array that all rows share "
        f"has a first dim of 1."
    )


def uncut_rows(arrays: Sequence[str], count: int, ways: int, where: str) -> str:
    """Reports arrays of a batch that cannot be split into ``count`` equal microbatches on each of ``ways`` devices.

    ``where`` is the option that sets the number of microbatches.
    """
    number, several = ways * count, len(arrays) > 1
    dims = "their first dims are not multiples" if several else "its first dim is not a multiple"
    into = f"the {count} microbatches of the pipeline" if where == "pipeline" else f"{count} microbatches ({where})"
    other = "a schedule of fewer microbatches" if where == "pipeline" else f"another {where}"
    if count == 1 and where != "pipeline":
        return (
            f"{', '.join(arrays)} cannot be split evenly over {ways} devices: {dims} of {number}. Remedy: pad the rows "
            f"to a multiple of {number} and mask the padding out of the loss, or drop the remainder."
        )
    return (
        f"{', '.join(arrays)} cannot be split into {into} over {ways} devices: {dims} of {number}. Remedy: use a batch "
        f"of a multiple of {number} rows, or {other}."
    )


# Layouts.


def not_a_layout(mesh: object, rules: object) -> str:
    """Reports arguments of ``Layout`` of the wrong type."""
    got = f"{type(mesh).__name__} and {type(rules).__name__}"
    return f"Layout() requires a Mesh and Rules, got {got}. Remedy: use Layout(MeshSpec(...).build(), rules)."


def unknown_axis(where: str, axis: str, known: Iterable[str], mesh: Iterable[str]) -> str:
    """Reports a rule that names an unknown mesh axis."""
    return (
        f"the rule for {where!r} names the mesh axis {axis!r}, which does not exist.{did_you_mean(axis, known)} The "
        f"mesh has {listing(mesh)}. Remedy: correct the rule, or build a mesh with that axis."
    )


def mixed_axis_types(kinds: Mapping[str, str]) -> str:
    """Reports a mesh with several axis types, or with Manual axes."""
    shown = ", ".join(f"{axis}={kind}" for axis, kind in kinds.items())
    return f"the mesh has the axis types {shown}. Remedy: use MeshSpec(...).build(): all Auto or all Explicit."


def other_layout(own: Mapping[str, int], ambient: Mapping[str, int], *, other_rules: bool) -> str:
    """Reports a step that runs under another layout than its own."""
    rules = " and other rules" if other_rules else ""
    return (
        f"a step made for the mesh {own} runs inside a 'with' of the mesh {ambient}{rules}. Remedy: make the step with "
        f"the layout it runs under, or leave the 'with'."
    )


def manual_axis(name: str | None, axis: str, rule: str) -> str:
    """Returns the problem of a dim whose rule names an axis that is manual here."""
    return (
        f"the dim {name!r} is sharded over {axis!r}, which is manual inside this shard_map (rule {rule}). Remedy: use "
        f"hint(), which leaves this axis out."
    )


# Annotations.


def not_dims(out_sharding: object) -> str:
    """Reports Flax metadata that is not a tuple of logical dims."""
    return (
        f"out_sharding must be a tuple of logical dims such as ('embed', 'mlp'), got {out_sharding!r}. Remedy: "
        f"annotate with jaxpar.nnx.axes or nnx.with_partitioning."
    )


def nameless_box(box: object) -> str:
    """Reports a Flax metadata box that names no dims."""
    return (
        f"the metadata box {type(box).__name__} names no dims. Remedy: annotate with jaxpar.linen.axes or "
        f"nn.with_logical_partitioning."
    )
