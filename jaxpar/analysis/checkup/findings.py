"""``find``: what to change in a compiled step, the worst first, with a remedy for each.

Every finding costs time (by the roofline, a model) or memory, and ranks by its share of the step or of the device's
memory. A finding states only what the program shows: that a collective overlaps with nothing, not why the compiler
placed it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxpar.analysis.checkup.footprint import KEPT, Footprint, HeldTensor
from jaxpar.analysis.checkup.recognize import is_logits, is_scores
from jaxpar.analysis.compile.gathers import GATHER_OPTIONS
from jaxpar.analysis.compile.warnings import Rematerialised
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.hlo.collectives import Collective, wire_bytes
from jaxpar.analysis.roofline import Roofline, Transfers, roofline, show_time
from jaxpar.analysis.units import show_bytes
from jaxpar.errors import MeshError
from jaxpar.parallel.partitioner.repair import Repaired, by_kind

MIN_SHARE = 0.005
"""Findings below this share of the step or of the memory are dropped, except for the compiler's own warnings."""

_SPLIT_LOGITS = (
    "shard the vocabulary over a larger axis (vocab: model), reduce data.batch, or, if the loss needs all logits "
    "at the same time, compute it in pieces (jaxpar.models.losses.linear_cross_entropy)."
)
_BLOCKWISE = "use blockwise attention, a kernel that never stores the scores (splash)."


WRONG_IN_XLA = "wrong in XLA"
"""The kind of finding about what XLA's partitioner computes wrongly."""


@dataclass(frozen=True)
class Finding:
    """One thing to change.

    Attributes:
      kind: ``does not fit``, ``wrong in XLA``, ``exposed``, ``all-reduce for a scatter``, ``long ring``, ``open line``,
        ``involuntary rematerialisation``, ``logits``, ``attention scores``, or ``replicated``.
      where: source line, tensor or axes.
      text: what the program does, with sizes.
      remedy: what to change.
      seconds: of the step, by the roofline; 0 if the finding is only about memory.
      bytes: on the wire or in memory.
      share: of the step, or of the device's memory, from 0. A share of 1 or more does not fit.
    """

    kind: str
    where: str
    text: str
    remedy: str
    seconds: float
    bytes: float
    share: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n  from {self.where}\n  Remedy: {self.remedy}"


@dataclass(frozen=True)
class About:
    """Facts about the model that its program does not show; 0 or empty if unknown.

    Attributes:
      tokens: of one step over all devices.
      model_flops: FLOPs of one step over all devices that the model needs, without recomputation.
      vocab, seq: the sizes of the vocabulary and of the sequence, which identify logits and attention scores.
      remat: the model's remat policy, such as ``full``.
      reshard_after_forward: the run's ``parallel.reshard_after_forward``.
    """

    tokens: int = 0
    model_flops: float = 0.0
    vocab: int = 0
    seq: int = 0
    remat: str = ""
    reshard_after_forward: bool | int = True


@dataclass(frozen=True)
class Evidence:
    """The input of all findings.

    Attributes:
      audit: of the step.
      roofline: of the audit.
      times: the time of each collective, in the audit's order.
      memory: the footprint at the peak.
      held: the arrays that the step receives.
      warnings: the compiler's.
      about: facts about the model.
      rings: the mesh axes whose devices form closed rings.
      repaired: operations that XLA's partitioner would compute wrongly.
    """

    audit: Audit
    roofline: Roofline
    times: Sequence[Transfers]
    memory: Footprint
    held: Sequence[HeldTensor]
    warnings: Sequence[Rematerialised] = ()
    about: About = About()
    rings: Sequence[str] = ()
    repaired: Sequence[Repaired] = ()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis → size."""
        return self.audit.mesh

    def of_step(self, seconds: float) -> float:
        """Returns a time in seconds as a share of the step."""
        return seconds / self.roofline.step if self.roofline.step else 0.0

    def of_memory(self, size: float) -> float:
        """Returns bytes as a share of the device's memory, or of the peak if that memory is unknown."""
        return size / (self.memory.limit or self.memory.total or 1)


def find(evidence: Evidence) -> tuple[Finding, ...]:
    """Returns all findings, the worst first.

    >>> from jaxpar.analysis.roofline import roofline
    >>> empty = Audit({"data": 4}, 0, 0, 0, (), (), (), (), {})
    >>> memory = Footprint({"parameters": 20 * 2**30}, 20 * 2**30, 0, 0, 16 * 2**30, ())
    >>> found = find(Evidence(empty, roofline(empty, "v5e:2x2"), (), memory, ()))
    >>> [(f.kind, f.text) for f in found]  # doctest: +NORMALIZE_WHITESPACE
    [('does not fit',
      '20.00 GiB at the peak, 4.00 GiB more than a device has (16.00 GiB); 20.00 GiB of it is parameters')]
    """
    found = [finding for finder in _FINDERS for finding in finder(evidence)]
    always_reported = ("involuntary rematerialisation", "wrong in XLA")
    return tuple(
        sorted((f for f in found if f.share >= MIN_SHARE or f.kind in always_reported), key=lambda f: -f.share)
    )


def _does_not_fit(e: Evidence) -> Iterator[Finding]:
    if e.memory.fits or e.memory.limit is None:
        return
    largest = max(e.memory.categories, key=lambda name: e.memory.categories[name])
    text = (
        f"{show_bytes(e.memory.total)} at the peak, {show_bytes(e.memory.over)} more than a device has "
        f"({show_bytes(e.memory.limit)}); {show_bytes(e.memory.categories[largest])} of it is {largest}"
    )
    yield Finding(
        "does not fit", largest, text, knob(largest, e.about.remat), 0.0, e.memory.over, e.of_memory(e.memory.total)
    )


def _wrongly_partitioned(e: Evidence) -> Iterator[Finding]:
    """What the step computes in another way; nothing else warns of it in programs that are no steps of jaxpar."""
    for fault, how, ones in by_kind(e.repaired):
        text = f"{fault.name}: {fault.what} if {fault.when}. The step {how}, and is right"
        remedy = f"{fault.remedy}; in a program of your own, call jp.testing.assert_matches_single_device"
        yield Finding(WRONG_IN_XLA, "; ".join(map(str, ones)), text, remedy, 0.0, 0, 0.0)


def knob(category: str, remat: str = "") -> str:
    """Returns the remedy that makes a category of memory smaller.

    Args:
      category: one of ``jaxpar.analysis.checkup.footprint.CATEGORIES``.
      remat: the model's remat policy; empty if unknown.

    >>> knob("optimizer")  # doctest: +NORMALIZE_WHITESPACE
    'shard it with parallel: {optimizer: {stage: 1}} (or rules: {optimizer: {over: data}}), or keep it in host memory
    with parallel: {offload: {optimizer: host}}.'
    """
    recompute = "" if remat in ("", "full") else f"recompute activations (model.remat=full, now {remat}); "
    texts = {
        "parameters": (
            "shard them over another axis (rules: params: {embed: data}), or over more devices, or keep those of "
            "the layers in host memory with parallel: {offload: {parameters: host, optimizer: host}}."
        ),
        "optimizer": (
            "shard it with parallel: {optimizer: {stage: 1}} (or rules: {optimizer: {over: data}}), or keep it in "
            "host memory with parallel: {offload: {optimizer: host}}."
        ),
        "gradients": "shard the parameters over another axis, which also shards their gradients.",
        KEPT: (
            "gather the layers' weights again for the backward pass with parallel: {reshard_after_forward: true}, "
            "or keep them sharded within groups with parallel: {reshard_after_forward: 4}."
        ),
        "activations": f"{recompute}shard the sequence over an axis (residual_seq: model), or reduce data.batch.",
        "temporaries": f"{recompute}reduce data.batch, or shard the largest tensors at the peak over another axis.",
    }
    return texts.get(category, "reduce data.batch, or use more devices.")


def _exposed(e: Evidence) -> Iterator[Finding]:
    """Group the collectives with time that is not hidden, by axes and remedy."""
    groups: dict[tuple[tuple[str, ...], str], list[tuple[Collective, Transfers]]] = {}
    for c, t in zip(e.audit.collectives, e.times, strict=True):
        if t.exposed + t.stalled > 0:
            groups.setdefault((c.axes, _for_exposed(c, e)), []).append((c, t))
    for (axes, remedy), same in groups.items():
        same.sort(key=lambda pair: -(pair[1].exposed + pair[1].stalled))
        seconds = sum(t.exposed + t.stalled for _, t in same)
        sent = sum(c.total_wire_bytes for c, _ in same)
        unoverlapped = sum(t.exposed for _, t in same) >= seconds / 2
        counts: dict[str, int] = {}
        for c, _ in same:
            counts[c.kind] = counts.get(c.kind, 0) + c.count
        kinds = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
        text = (
            f"{show_time(seconds)} of the step ({e.of_step(seconds):.1%}) are exposed transfers over {'+'.join(axes)}, "
            f"mostly {'with no overlapping compute' if unoverlapped else 'longer than the compute they overlap with'}: "
            f"{kinds}, {show_bytes(round(sent))} on the wire"
        )
        yield Finding("exposed", _places(c for c, _ in same), text, remedy, seconds, sent, e.of_step(seconds))


def _places(collectives: Iterable[Collective]) -> str:
    """Returns the first three places, and how many more there are."""
    places = list(dict.fromkeys(c.place for c in collectives))
    more = f", and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more


def _for_exposed(c: Collective, e: Evidence) -> str:
    """Returns the remedy that makes a collective shorter or hides it."""
    axes, backward = "+".join(c.axes), "transpose(" in c.op_name
    batch_axes = _axes_of(e.held, "batch")
    tensor_parallel = bool(batch_axes) and set(c.axes) <= _axes_of(e.held, "parameters") - batch_axes
    if tensor_parallel and c.kind != "all-reduce":
        return (
            f"{axes} shards matmuls and not the batch, so activations cross it in every layer, in proportion to "
            f"the tokens per device: make {axes} smaller (mesh.{axes}) and give its devices to "
            f"{'+'.join(sorted(batch_axes))}."
        )
    if c.kind == "all-gather" and set(c.axes) <= batch_axes & _axes_of(e.held, "parameters"):
        options = GATHER_OPTIONS.get(e.roofline.topology.partition(":")[0])
        if options and c.exposed_bytes == c.wire_bytes:
            named = ", ".join(f"{name}: true" for name in options)
            return (
                f"{axes} shards parameters that are gathered for use, and this compiler runs gathers beside compute "
                f"only if it is told to: compiler: {{tpu: {{{named}}}}}."
            )
        return (
            f"{axes} shards parameters that are gathered for use: increase the tokens per device to overlap the "
            f"gathers with more compute (data.batch), make {axes} smaller, or, if memory allows, remove it from "
            "the rules of params."
        )
    if c.kind == "all-gather":
        return (
            f"the value is needed replicated over {axes} at this line: annotate it there with the sharding that it "
            f"is produced with, or make {axes} smaller."
        )
    if c.kind == "all-reduce" and backward and set(c.axes) <= batch_axes:
        return (
            f"a full gradient is summed on every device: shard its parameter over {axes} (rules: params), so that "
            "a reduce-scatter sends half the bytes."
        )
    if c.kind == "all-reduce":
        return (
            f"a matmul contracts a dim that is sharded over {axes}: shard its result over {axes} too (as "
            f"residual_seq: {axes} does), so that a reduce-scatter replaces it, or make {axes} smaller."
        )
    if c.kind == "reduce-scatter":
        return f"increase the tokens per device to overlap it with more compute (data.batch), or make {axes} smaller."
    if c.form == "ragged":
        return (
            f"rows travel over {axes} to the devices of their experts and back: make {axes} smaller (mesh.{axes}), so "
            f"that a device has more of the experts."
        )
    return (
        f"the shardings before and after this line differ over {axes}: annotate both sides identically, or make "
        f"{axes} smaller."
    )


def _axes_of(held: Sequence[HeldTensor], category: str) -> set[str]:
    """Returns the mesh axes that shard the tensors of a category."""
    return {axis for h in held if h.category == category for axes in h.spec for axis in axes}


def _all_reduce_for_scatter(e: Evidence) -> Iterator[Finding]:
    for c, t in zip(e.audit.collectives, e.times, strict=True):
        if c.form == "all-reduce + slice":
            waste, seconds = c.total_wire_bytes / 2, (t.exposed + t.stalled) / 2
            text = (
                f"{c.count} × all-reduce over {'+'.join(c.axes)} of which each device keeps a slice: twice the "
                f"bytes of a reduce-scatter, {show_bytes(round(waste))} wasted ({show_time(seconds)} of the step)"
            )
            remedy = (
                f"annotate the value over {'+'.join(c.axes)} directly after it is summed; if it is annotated "
                "there, this compiler does not generate a reduce-scatter."
            )
            yield Finding(
                "all-reduce for a scatter", c.place, text, remedy, seconds, waste, e.of_step(seconds or t.seconds / 2)
            )


def _long_rings(e: Evidence) -> Iterator[Finding]:
    """Find rings in which a device sends more than the other devices' shards, by kind and axes."""
    groups: dict[tuple[str, tuple[str, ...]], list[tuple[Collective, float, float]]] = {}
    for c, t in zip(e.audit.collectives, e.times, strict=True):
        if not c.form.startswith("ring of"):
            continue
        minimum = wire_bytes(c.kind, c.result_bytes * (1 if c.kind == "all-gather" else c.group), c.group)
        waste = c.wire_bytes - minimum
        if waste > 0.01 * minimum:
            place = groups.setdefault((c.kind, c.axes), [])
            place.append((c, waste * c.count, t.seconds * waste / c.wire_bytes))
    for (kind, axes), same in groups.items():
        waste, seconds = sum(w for _, w, _ in same), sum(s for _, _, s in same)
        longest = max((c for c, _, _ in same), key=lambda c: c.wire_bytes / c.result_bytes)
        text = (
            f"{sum(c.count for c, _, _ in same)} × {kind} over {'+'.join(axes)} as rings that send more than they "
            f"need (a {longest.form} among {longest.group} devices): {show_bytes(round(waste))} too much, "
            f"{show_time(seconds)} on the links"
        )
        option = f"xla_tpu_enable_windowed_einsum_for_{kind.replace('-', '_')}: false"
        remedy = (
            f"compare with the unsplit collective, on a TPU with the compiler option {option} (compiler: {{tpu: …}} in "
            f"the run's file): it sends less, but overlaps less."
        )
        yield Finding("long ring", _places(c for c, _, _ in same), text, remedy, seconds, waste, e.of_step(seconds))


def _open_lines(e: Evidence) -> Iterator[Finding]:
    """Find axes whose permutes would have twice the links in a closed ring, by the roofline."""
    moved: dict[str, float] = {}
    for c in e.audit.collectives:
        if c.kind == "collective-permute" and len(c.axes) == 1 and c.axes[0] not in e.rings:
            moved[c.axes[0]] = moved.get(c.axes[0], 0.0) + c.total_wire_bytes
    for axis, sent in moved.items():
        try:
            rings = (*e.rings, axis)
            closed = roofline(e.audit, e.roofline.topology, dtype=e.roofline.dtype, rings=rings).step
        except MeshError:  # the chips that are left to this axis hold no ring
            continue
        seconds = e.roofline.step - closed
        text = (
            f"the {e.sizes[axis]} devices of {axis} are an open line of chips, and permutes over it share links in "
            f"both directions: in a closed ring the step would take {show_time(closed)} instead of "
            f"{show_time(e.roofline.step)}"
        )
        remedy = f"place them on a block of chips: rings: [{', '.join(rings)}] beside mesh."
        yield Finding("open line", axis, text, remedy, seconds, sent, e.of_step(seconds))


def _rematerialised(e: Evidence) -> Iterator[Finding]:
    for w in e.warnings:
        moved = [
            (c, t) for c, t in zip(e.audit.collectives, e.times, strict=True) if w.op_name and c.op_name == w.op_name
        ]
        seconds = sum(t.exposed + t.stalled for _, t in moved)
        cost = f", {show_time(seconds)} of the step" if seconds else ""
        text = (
            f"the compiler replicates {w.tensor} on every device ({show_bytes(w.bytes)}{cost}) to reshard it from "
            f"[{w.before}] to [{w.after}]"
        )
        remedy = (
            "the two annotations order or split the axes of a dim differently: make them equal, or add a third "
            "annotation between them that shares a dim with each."
        )
        share = max(e.of_step(seconds), e.of_memory(w.bytes))
        where = w.source or w.op_name or "the compiler"
        yield Finding("involuntary rematerialisation", where, text, remedy, seconds, w.bytes, share)


def _large_buffers(e: Evidence) -> Iterator[Finding]:
    """Find logits and attention scores among the ten largest tensors that the step itself makes."""
    made = [buffer for _, buffer in e.memory.buffers if not buffer.argument][:10]
    for kind, is_one, remedy in (
        ("logits", partial(is_logits, vocab=e.about.vocab), _SPLIT_LOGITS),
        ("attention scores", partial(is_scores, seq=e.about.seq), _BLOCKWISE),
    ):
        found = [buffer for buffer in made if is_one(buffer, e.held, e.sizes)]
        if found:
            size = sum(buffer.bytes for buffer in found)
            shapes = ", ".join(dict.fromkeys(buffer.shape for buffer in found))
            text = f"{show_bytes(size)} of the peak ({e.of_memory(size):.1%} of the memory) are {kind}: {shapes}"
            where = next((b.source for b in found if b.source), found[0].op_name or "the compiler")
            yield Finding(kind, where, text, remedy, 0.0, size, e.of_memory(size))


def _replicated(e: Evidence) -> Iterator[Finding]:
    """Find parameters and optimizer arrays that are replicated on every device."""
    large = [axis for axis, size in e.sizes.items() if size > 1]
    for h in e.held:
        if h.category not in ("parameters", "optimizer") or any(h.spec) or not large:
            continue
        axis = max(large, key=lambda name: e.sizes[name])
        saved = h.bytes * (e.sizes[axis] - 1) // e.sizes[axis]
        fitting = [dim for dim, n in zip(h.dims, h.shape, strict=False) if dim and n % e.sizes[axis] == 0]
        role = "params" if h.category == "parameters" else "optimizer"
        remedy = (
            f"add a rule for one of its dims: rules: {{{role}: {{{fitting[0]}: {axis}}}}}. Saves {show_bytes(saved)}."
            if fitting
            else f"none of its dims is divisible by {axis}={e.sizes[axis]}: use another axis or another size."
        )
        text = f"{h.path} {list(h.shape)} is replicated on all {h.copies} devices, {show_bytes(h.bytes)}"
        yield Finding("replicated", h.path, text, remedy, 0.0, saved, e.of_memory(saved))


_FINDERS = (
    _does_not_fit,
    _wrongly_partitioned,
    _exposed,
    _all_reduce_for_scatter,
    _long_rings,
    _open_lines,
    _rematerialised,
    _large_buffers,
    _replicated,
)
