"""The compiler's warnings of *involuntary full rematerialization*: a tensor that it replicates to change its sharding.

XLA writes ``[SPMD] Involuntary full rematerialization`` if it knows no sequence of slices, gathers and exchanges from
the sharding in which one operation produces a tensor to the sharding in which the next one reads it. Each device then
builds the full tensor and keeps its shard. The cause is a pair of annotations that disagree on the order or the number
of axes of one dim.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jaxpar.analysis.hlo.liveness import own_line
from jaxpar.analysis.hlo.parser import Instruction, Module, types_of

_WORDS = re.compile(
    r"Involuntary full rematerialization.*?from sharding (?P<before>\{.*?\}) to (?P<after>\{.*?\}) "
    r"(?:efficiently|without).*?"
    r"HLO operation:? (?P<operation>%.*)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Rematerialised:
    """One tensor that is replicated on every device on the way from one sharding to another.

    Attributes:
      tensor: its dtype and full shape, ``f32[64,64]``; the shape of a shard if the sharding cannot be parsed.
      bytes: of the full tensor, or of a shard if the sharding cannot be parsed.
      before, after: its shardings, one entry per dim, as ``data, ·``; the compiler's text if it cannot be parsed.
      op_name: jax's path of the operation.
      source: the line of model code, if the program has it.
    """

    tensor: str
    bytes: int
    before: str
    after: str
    op_name: str
    source: str


def rematerialised(warning: str, module: Module | None = None) -> Rematerialised | None:
    """Parse a warning of involuntary full rematerialization; return ``None`` for any other warning.

    Args:
      warning: one line of the compiler's log.
      module: the compiled program, whose tables have the source lines.

    >>> found = rematerialised(
    ...     "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
    ...     "{mesh['a'=2,'b'=2], [{'a'}, {}]} to {mesh['a'=2,'b'=2], [{}, {'b', 'a'}]} efficiently "
    ...     "for HLO operation %copy.1 = f32[32,64]{1,0} copy(%sin.0), "
    ...     'metadata={op_name="jit(f)/sharding_constraint" stack_frame_id=3}. As the last resort'
    ... )
    >>> found.tensor, found.bytes, found.before, found.after, found.op_name
    ('f32[64,64]', 16384, 'a, ·', '·, b+a', 'jit(f)/sharding_constraint')
    """
    found = _WORDS.search(warning)
    if found is None:
        return None
    kind = found["operation"].partition(" = ")[2].split("(")[0].strip()
    arrays = types_of(kind.split(" ")[0])
    metadata = re.search(r'metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', found["operation"])
    made = Instruction("", "", (), (), metadata[0] if metadata else "", "", False)
    tensor, size = "a tensor", 0
    if len(arrays) == 1:
        (array,) = arrays
        counts = _shard_counts(found["before"])
        known = counts is not None and len(counts) == len(array.shape)
        shape = tuple(n * count for n, count in zip(array.shape, counts or (), strict=True)) if known else array.shape
        tensor = f"{array.dtype}[{','.join(map(str, shape))}]"
        size = array.bytes * (math.prod(counts) if known and counts else 1)
    source = own_line(module.frames(made)) if module is not None and metadata else ""
    return Rematerialised(tensor, size, _show(found["before"]), _show(found["after"]), made.op_name, source)


def _dims(sharding: str) -> list[list[tuple[str, int]]] | None:
    """Parse ``{mesh['a'=2,'b'=2], [{'a'}, {}]}`` into the axes of each dim with their sizes.

    Return ``None`` for other notations. ``'a':(1)2`` is part of an axis: 2 of it, inside an outer 1.
    """
    found = re.fullmatch(r"\{mesh\[(.*?)\].*?, \[(.*?)\].*\}", sharding)
    if found is None:
        return None
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", found[1])}
    return [
        [(name, int(part or sizes.get(name, 1))) for name, part in re.findall(r"'([\w.\-]+)'(?::\(\d+\)(\d+))?", dim)]
        for dim in re.findall(r"\{(.*?)\}", found[2])
    ]


def _shard_counts(sharding: str) -> list[int] | None:
    """Returns the number of shards of each dim."""
    dims = _dims(sharding)
    if dims is not None:
        return [math.prod(size for _, size in axes) for axes in dims]
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if tiles is None:
        return None
    numbers = [int(n) for n in tiles[1].split(",")]
    return numbers[:-1] if "last_tile_dim_replicate" in sharding else numbers


def _show(sharding: str) -> str:
    dims = _dims(sharding)
    return sharding if dims is None else ", ".join("+".join(name for name, _ in axes) or "·" for axes in dims)
