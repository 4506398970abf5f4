"""The workload of a small Llama, written out instead of traced: tests of estimates need no model."""

from __future__ import annotations

from jaxpar.planning.search.workload import Backward, Factors, KeptArray, Matmul, Workload

EMBED, MLP, VOCAB = ("embed", 1024), ("mlp", 4096), ("vocab", 32768)
HEADS, HEAD_DIM, LAYERS = ("kv_heads", 8), ("head_dim", 128), ("layers", 8)
HEAD = (HEADS, HEAD_DIM)


def llama_workload(batch: int = 32, seq: int = 2048) -> Workload:
    """A Llama with 8 layers, 8 heads and 0.17 billion parameters, with attention in tiles."""
    rows: Factors = (("batch", batch), ("seq", seq))

    def weight(columns: Factors, summed: Factors, source: int) -> Matmul:
        return Matmul((), rows, columns, summed, True, True, 8, source)

    shared, keys = (rows[0], HEADS), (rows[1],)
    matmuls = (
        *(weight(HEAD, (EMBED,), 0) for _ in "qkv"),
        Matmul(shared, keys, keys, (HEAD_DIM,), False, True, 8, 1),
        Matmul(shared, keys, (HEAD_DIM,), keys, False, True, 8, 2),
        weight((EMBED,), HEAD, 3),
        *(weight((MLP,), (EMBED,), 4) for _ in ("up", "gate")),
        weight((EMBED,), (MLP,), 5),
        Matmul((), rows, (VOCAB,), (EMBED,), True, False, 1, 6),
    )
    params = (
        *(KeptArray(name, (LAYERS, EMBED, *HEAD), 4) for name in "qkvo"),
        *(KeptArray(name, (LAYERS, EMBED, MLP), 4) for name in ("up", "gate", "down")),
        *(KeptArray(name, (VOCAB, EMBED), 4) for name in ("table", "head")),
    )
    block = KeptArray("", (LAYERS, *rows, EMBED), 2)
    logits = KeptArray("", (*rows, VOCAB), 4)
    inside = (*(KeptArray("", (LAYERS, *rows, *HEAD), 2) for _ in "qkvo"), KeptArray("", (LAYERS, *rows, MLP), 2))
    backward = {
        "none": Backward((block, *inside, logits), 3.0, 3.0),
        "full": Backward((block, logits), 4.0, 4.0),
    }
    named = (*rows, EMBED, MLP, VOCAB, HEADS, HEAD_DIM, LAYERS)
    sizes = {name: size for name, size in named if name is not None}
    return Workload(matmuls, params, backward, 2.0, sizes, tuple(sizes), flash=True)
