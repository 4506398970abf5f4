"""Orders that fill the bubble with gradients of weights (W), on which no other stage depends.

All of them assume that F, B and W take equal time.
"""

from __future__ import annotations

from jaxpar.parallel.pipeline.schedules.orders import Kind, Op, Orders


def handcrafted(stages: int, microbatches: int, most: int) -> Orders:
    """Returns the orders of ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv:2401.10241).

    In each step, every stage does a backward if one is ready, else a forward, else a W. One rule is added: while fewer
    than ``stages - stage`` forwards have a pending backward, as in 1F1B, a forward has priority. Without this rule the
    stages fall out of step, and ZB-H1 with 4 stages and 32 microbatches takes 101 steps instead of 99. With it both
    take the minimum, 3 * microbatches + stages - 1, as the last stage cannot start before step stages - 1.

    Args:
      stages: the number of stages.
      microbatches: the number of microbatches.
      most: the largest number of forwards of a stage whose W is pending.
    """
    done: dict[tuple[Kind, int, int], int] = {}
    counts: list[dict[Kind, int]] = [{"F": 0, "B": 0, "W": 0} for _ in range(stages)]
    orders: list[list[Op]] = [[] for _ in range(stages)]

    def chosen(stage: int, now: int) -> Kind | None:
        f, b, w = counts[stage].values()

        def arrived(kind: Kind, microbatch: int, other: int) -> bool:
            return other in (-1, stages) or done.get((kind, microbatch, other), now) < now

        forward = f < microbatches and f - w < most and arrived("F", f, stage - 1)
        backward = b < f and arrived("F", b, stage) and arrived("B", b, stage + 1)
        if backward and not (forward and f - b < stages - stage):
            return "B"
        return "F" if forward else "W" if w < b else None

    now = 0
    while any(count["W"] < microbatches for count in counts):
        # All stages choose before the results of this step exist.
        for stage, kind in [(stage, chosen(stage, now)) for stage in range(stages)]:
            if kind is not None:
                microbatch = counts[stage][kind]
                orders[stage].append(Op(kind, microbatch))
                done[kind, microbatch, stage] = now
                counts[stage][kind] += 1
        now += 1
    return tuple(map(tuple, orders))


class _Stage:
    """Builds the order of a stage with two chunks; each kind of operation takes the microbatches of a chunk in turn."""

    def __init__(self) -> None:
        self.order: list[Op] = []
        self.counts: dict[tuple[Kind, int], int] = {}
        self.due: list[Op] = []

    def count(self, kind: Kind, chunk: int) -> int:
        return self.counts.get((kind, chunk), 0)

    def do(self, *steps: str) -> None:
        """Appends operations.

        ``F0`` is the next forward of chunk 0, ``BW1`` the next full backward of chunk 1 (B, then W), ``B1`` only its B,
        with W pending, and ``W1`` the oldest pending W of chunk 1.
        """
        for step in steps:
            chunk = int(step[-1])
            if step[0] == "W":
                self.order.append(self.due.pop(next(i for i, op in enumerate(self.due) if op.chunk == chunk)))
                continue
            kind: Kind = "F" if step[0] == "F" else "B"
            op = Op(kind, self.count(kind, chunk), chunk)
            self.counts[kind, chunk] = op.microbatch + 1
            self.order.append(op)
            if kind == "B":
                (self.order if step[:-1] == "BW" else self.due).append(op._replace(kind="W"))


def zb_v(stages: int, microbatches: int) -> Orders:
    """Returns the orders of ZB-V (Qi et al. 2024, arXiv:2405.15362): two chunks per stage in a ``v``.

    Each stage stores activations for at most 2 * stages forwards. With 2 * stages - 1 or more microbatches the pipeline
    is full; with fewer, the same order has gaps.
    """
    count = max(microbatches, 2 * stages - 1)
    result = []
    for at in range(stages):
        stage = _Stage()
        stage.do(*["F0"] * (2 * (stages - at) - 1))
        stage.do(*["F1", "F0"] * at)
        stage.do(*["F1", "BW1"] * (stages - at))
        while stage.count("F", 1) < count:
            stage.do(*["F0"] * (stage.count("F", 0) < count), "BW0", "F1", "BW1")
        stage.do(*["B0", "B1"] * at)
        stage.do(*["B0", "W0"] * (stages - at))
        stage.do(*["W1"] * at, *["W0"] * at)
        result.append(tuple(op for op in stage.order if op.microbatch < microbatches))
    return tuple(result)


def dualpipe_v(stages: int, microbatches: int) -> Orders:
    """Returns the orders of DualPipe (DeepSeek-AI 2024, arXiv:2412.19437) cut in half: two chunks per stage in a ``v``.

    The forward of one chunk runs in the same tick as the backward of the other. Takes 2 * stages microbatches or more,
    and each stage stores activations for at most 2 * stages + 1 forwards.
    """
    result = []
    for at in range(stages):
        stage, below = _Stage(), stages - 1 - at
        stage.do(*["F0"] * (2 * below))
        stage.do(*["F0", "F1"] * (at + 1))
        stage.do(*["B1", "W1", "F1"] * below)
        stage.do(*["F0", "BW1", "F1", "BW0"] * (microbatches - 2 * stages + at + 1))
        stage.do(*["BW1", "F1", "BW0"] * below)
        # The first half of the last backwards includes W. The second half defers W, so that the previous stages receive
        # their cotangents earlier.
        full, split = ["BW1", "BW0"] * (at + 1), ["B1", "B0"] * (at + 1)
        stage.do(*full[: at + 1], *split[at + 1 :])
        for _ in range(below):
            stage.do(f"W{stage.due[0].chunk}", "B0")
        stage.do(*(f"W{op.chunk}" for op in tuple(stage.due)))
        result.append(tuple(stage.order))
    return tuple(result)
