"""Random orders of independent operations, shared by the tests of schedules and of their executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jaxpar.parallel.pipeline.schedules.orders import Op, Pieces
from jaxpar.parallel.pipeline.schedules.ticks import needs


@st.composite
def orders_of_ones_own(
    draw: st.DrawFn,
    stages: Sequence[int] = (1, 2, 3, 4),
    chunks: Sequence[int] = (1, 2, 3),
    parts: Sequence[int] = (1, 2),
    kinds: Sequence[str] = ("F", "FB", "FBW"),
) -> tuple[list[list[Op]], dict[str, Any]]:
    """Orders that some clock can execute, and the sizes they are for."""
    one = lambda some: draw(st.sampled_from(some))
    sizes = {"stages": one(stages), "chunks": one(chunks), "sequence_chunks": one(parts)}
    sizes |= {
        "microbatches": draw(st.integers(1, 4)),
        "placement": one(("interleaved", "v")),
        "fused": draw(st.booleans()),
    }
    pieces, cut, does = (
        Pieces(sizes["stages"], sizes["chunks"], sizes["placement"]),
        sizes["sequence_chunks"],
        one(kinds),
    )
    numbers = np.ndindex(len(does), sizes["microbatches"] * cut, pieces.count)
    todo = {(does[kind], m, piece) for kind, m, piece in numbers}
    orders: list[list[Op]] = [[] for _ in range(pieces.stages)]
    dice = draw(st.randoms(use_true_random=False))
    done: set[tuple[str, int, int]] = set()
    while todo:
        ready = [
            key
            for key in sorted(todo)
            if done.issuperset(needs(Op(*key), key[2], pieces.count, cut))  # type: ignore[arg-type]
        ]
        kind, m, piece = dice.choice(ready)
        stage, chunk = pieces.place(piece)
        orders[stage].append(Op(kind, m, chunk))  # type: ignore[arg-type]
        done.add((kind, m, piece))
        todo.remove((kind, m, piece))
    return orders, sizes
