"""Stacks of tiny layers over pipeline stages, with every schedule and other mesh axes, against a plain loop in fp64 on
one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import Dice, Differences, InvalidCase

# A gradient is a sum of some 200 products through up to 12 layers: 2^-24 * 170 and 2^-53 * 90,000, relative to the
# largest entry.
BOUNDS = {"float32": 1e-5, "float64": 1e-11}
LABELS = {"float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Case:
    """A pipeline; the defaults are two layers over two stages, one microbatch of one row and one token.

    Attributes:
      schedule: a name of ``jp.pipeline.schedule``; ``none`` runs the layers without a pipeline.
      rows: the rows of each microbatch per device of data.
      layers: the layers of each piece of the model, in order. Uneven ones are passed to ``jp.Pipeline``, and the
        rules accept them, unless ``told`` is False.
      side: ``batch`` or ``param``; the latter reads a parameter, but has no gradient.
      weighted: whether the loss is a mean over tokens that count; ``bare`` divides by their number, which may be 0
        in a microbatch.
      aux: ``weights`` adds a mean of the layers' weights to the loss, ``rows`` one of their activations, ``dict``
        also a metric.
    """

    schedule: str = "1f1b"
    stages: int = 2
    microbatches: int = 1
    chunks: int | None = None
    sequence_chunks: int = 1
    fused: bool | None = None
    activation_checkpointing: str = "full"
    grad_reduction: str = "per_step"
    executor: str = "lockstep"
    embedding: str = "per_step"
    layers: tuple[int, ...] = (1, 1)
    told: bool = True
    recompute: tuple[int, ...] = ()
    data: int = 1
    model: int = 1
    zero: int = 0
    rows: int = 1
    seq: int = 1
    width: int = 1
    words: int = 2
    tied: bool = False
    weighted: bool = False
    bare: bool = False
    aux: str | None = None
    keys: bool = False
    side: str | None = None
    remat: bool = False
    dtype: str = "float32"
    seed: int = 0

    @property
    def depth(self) -> int:
        return sum(self.layers)

    @property
    def batch(self) -> int:
        return self.rows * self.data * self.microbatches

    @property
    def sizes(self) -> dict[str, int]:
        return {"pipeline": self.stages, "data": self.data, "model": self.model}


PLAIN = ("gpipe", "1f1b", "zb_uniform", "zb_h1", "zb_h2")
CHUNKED = ("interleaved", "depth_first", "breadth_first")


def draw(dice: Dice) -> Case:
    """Draw a pipeline that fits its mesh; sometimes layers that do not divide are not passed to ``jp.Pipeline``."""
    schedule = dice.one(*PLAIN, *CHUNKED, "seq1f1b", "seq1f1b", "zb_v", "dualpipe_v", "1f1b", "none")
    stages = 1 if schedule == "none" or dice.chance(0.05) else dice.one(2, 2, 3, 4)
    room = 8 // stages
    data = dice.one(*[n for n in (1, 1, 2, 3) if n <= room])
    values: dict[str, Any] = {"schedule": schedule, "stages": stages, "data": data}
    values["model"] = dice.one(*[n for n in (1, 1, 2) if n <= room // data])
    values |= _microbatches(dice, schedule, stages)
    pieces = stages * (values["chunks"] or (2 if schedule in ("zb_v", "dualpipe_v") else 1))
    each = dice.whole(1, max(1, 8 // pieces))
    layers = (each,) * pieces
    if dice.chance(0.4):
        layers = tuple(dice.whole(1, max(2, 8 // pieces)) for _ in range(pieces))
    values |= {"layers": layers, "told": dice.chance(0.95)}
    values |= _how(dice, values, min(sum(layers[i::stages]) for i in range(stages)))
    values |= {"rows": dice.one(1, 1, 2), "words": values["model"] * stages * dice.whole(1, 3)}
    values["seq"] = values["sequence_chunks"] * dice.whole(1, 3)
    values["width"] = values["model"] * stages * data * dice.one(1, 2)
    values |= {"tied": dice.chance(0.4), "weighted": dice.chance(0.4), "keys": dice.chance(0.25)}
    values["bare"] = values["weighted"] and values["sequence_chunks"] == 1 and dice.chance(0.15)
    # A weighted mean over microbatches of a layer's own loss differs from that of the batch, unless the loss reads only
    # weights.
    values["aux"] = dice.maybe(0.35, "weights") if values["weighted"] else dice.maybe(0.35, "weights", "rows", "dict")
    if values["sequence_chunks"] > 1:
        values |= {"keys": False, "aux": None}
    values |= {"side": dice.maybe(0.4, *["batch"] * 5, "param"), "remat": dice.chance(0.2)}
    return Case(**values, dtype=dice.one("float32", "float32", "float64"), seed=dice.whole(0, 999))


def _microbatches(dice: Dice, schedule: str, stages: int) -> dict[str, Any]:
    """Draw sizes that the schedule accepts."""
    values: dict[str, Any] = {"microbatches": dice.whole(1, 5), "chunks": None, "sequence_chunks": 1}
    if schedule in CHUNKED:
        values |= {"microbatches": stages * dice.whole(1, 2), "chunks": dice.whole(1, 2)}
    if schedule == "breadth_first":
        values["microbatches"] = stages + dice.whole(0, 2)
    if schedule == "dualpipe_v":
        values["microbatches"] = 2 * stages + dice.whole(0, 1)
    if schedule == "seq1f1b":
        values["sequence_chunks"] = dice.whole(1, 3)
    if schedule == "none":
        values["microbatches"] = 1
    return values


def _how(dice: Dice, so_far: dict[str, Any], least: int) -> dict[str, Any]:
    """Draw which activations are stored, when gradients are reduced, and the ZeRO stage."""
    values: dict[str, Any] = {
        "activation_checkpointing": dice.one("full", "none"),
        "embedding": dice.one("per_step", "per_step", "per_microbatch"),
    }
    values["zero"] = dice.one(0, 0, 0, 1, 2, 3) if so_far["data"] > 1 else 0
    if so_far["schedule"] == "none":
        return {"zero": values["zero"]}
    if so_far["schedule"] in ("zb_h1", "zb_h2", "zb_v", "1f1b", "gpipe"):
        values["fused"] = dice.maybe(0.3, False)
        if so_far["model"] == 1 and dice.chance(0.3):
            values["executor"] = "independent"
    if "executor" not in values and not values["zero"]:
        # A reduction per chunk requires a stage to stay with one chunk; V schedules do not.
        values["grad_reduction"] = dice.one(
            "per_step", "per_step", "per_microbatch", *(["per_chunk"] if so_far["schedule"] in CHUNKED else [])
        )
    if values.get("executor") == "independent" and values["zero"] == 2:
        values["zero"] = 1
    if values["activation_checkpointing"] == "none" and so_far["sequence_chunks"] == 1 and dice.chance(0.25):
        values["recompute"] = tuple(dice.whole(0, min(2, least)) for _ in range(so_far["stages"]))
    return values


def run(case: Case) -> Differences:
    """Compare metrics and gradients of one step with the reference."""
    import jax

    if min(case.rows, case.seq, case.width, case.words, case.microbatches, *case.layers) < 1:
        raise InvalidCase("a size is below 1")
    if case.aux in ("rows", "dict") and case.weighted:
        raise InvalidCase("a loss of activations is not averaged as the loss is")
    if (case.keys or case.aux) and case.sequence_chunks > 1:
        raise InvalidCase("a carried layer takes no keys and adds no loss")
    if case.seq % case.sequence_chunks:
        raise InvalidCase("the sequence does not divide")
    with jax.enable_x64(True):
        from .pipeline_models import reference

        want = reference(case)
    with jax.enable_x64(case.dtype == "float64"):
        return _compared(case, want)


def _compared(case: Case, want: Any) -> Differences:
    from jaxpar.errors import LayoutError

    from .pipeline_models import found
    from .stepping import CANCELLED, check_trees

    differences = Differences()
    try:
        metrics, gradients = found(case)
    except LayoutError as error:
        if case.depth % case.stages and not case.told:  # one cause is one problem, and its remedy names uneven stages
            right = len(error.problems) == 1 and "layers_per_stage=" in str(error)
            differences.claim(
                right, f"{len(error.problems)} problems for layers that do not divide: {error.problems[0]}"
            )
        if differences.wrong:
            return differences
        raise
    bound, label = BOUNDS[case.dtype], LABELS[case.dtype]
    for name, value in want[0].items():
        differences.claim(name in metrics, f"there is no metric {name}")
        # A loss or a metric may be a small difference of logits, or of terms, of about 1.
        differences.check(name, metrics.get(name, 0), value, bound, CANCELLED, label)
    check_trees(differences, "gradient of ", gradients, want[1], bound, label)
    return differences
