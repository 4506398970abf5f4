"""Random optax chains over ZeRO stages, microbatches and sizes; each step is compared with plain optax on one device,
from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cases import Dice, Differences, InvalidCase

# An update is some 30 operations on numbers whose sums over rows are exact (data are multiples of 1/8): 2^-24 * 170.
BOUND = 1e-5
BOUND_FP64 = 1e-11
"""The bound for line searches, which run in fp64: a difference between losses may cancel five digits."""
PROBED = 2e-6
"""The bound between the value that an optimizer receives and ``value_fn`` at the same parameters: a few roundings."""


@dataclass(frozen=True)
class Case:
    """An optimizer; the defaults are plain descent on one number.

    Attributes:
      chain: names of transformations in :mod:`.optimizer_chains`, applied one after the other.
      wrapper: the name of the wrapper around the chain.
      loss: ``linear`` in parameters, so that gradients are exact; ``curved``; or, where only the values that the
        optimizer receives are compared, ``noisy`` (draws from a key) and ``uneven`` (not linear in rows).
      shapes: the shapes of the parameters.
    """

    chain: tuple[str, ...] = ()
    wrapper: str | None = None
    zero: int = 0
    min_bytes: int = 0
    data: int = 1
    model: int = 1
    microbatches: int = 1
    rows: int = 1
    shapes: tuple[tuple[int, ...], ...] = ((1,),)
    loss: str = "linear"
    precision: str | None = None
    clip_norm: float | None = None
    steps: int = 1
    seed: int = 0

    @property
    def batch(self) -> int:
        return self.rows * self.data * self.microbatches


def draw(dice: Dice) -> Case:
    """Draw a chain of up to four transformations, on a mesh of up to eight devices."""
    from .optimizer_chains import PLAIN, SEARCHES, SMOOTH, WRAPPERS

    data = dice.one(1, 2, 2, 4, 8)
    values: dict[str, Any] = {"data": data, "model": 2 if data <= 4 and dice.chance(0.25) else 1}
    values |= {"zero": dice.one(0, 1, 1, 2, 3), "min_bytes": dice.one(0, 0, 64, 512)}
    values |= {"microbatches": dice.one(1, 1, 2, 3, 4), "rows": dice.one(1, 2), "steps": dice.whole(1, 3)}
    shapes = tuple(_shape(dice) for _ in range(dice.whole(1, 4)))
    values |= {"shapes": shapes, "seed": dice.whole(0, 999), "clip_norm": dice.maybe(0.15, 0.5, 3.0)}
    kind = dice.one(*["plain"] * 6, "smooth", "smooth", "search", "probe")
    if kind == "probe":
        values |= {"chain": ("probe",), "loss": dice.one("noisy", "uneven", "curved")}
        values["precision"] = dice.maybe(0.3, "bf16")
        return Case(**values)
    if kind == "search":
        chain = (*(("lbfgs",) if dice.chance(0.4) else ()), dice.one(*SEARCHES))
        return Case(**values | {"chain": chain, "loss": "curved", "clip_norm": None})
    names = SMOOTH if kind == "smooth" else PLAIN
    chain = tuple(dice.one(*names) for _ in range(dice.whole(1, 4)))
    if () in shapes:  # for scalars, sm3 raises and distance returns arrays of one element
        chain = tuple(name for name in chain if name not in ("sm3", "distance")) or ("adam",)
    if kind == "plain":  # a power of two of rows, because other counts round means
        values["microbatches"] = dice.one(1, 1, 2, 4)
    values |= {"chain": chain, "wrapper": dice.maybe(0.35, *WRAPPERS)}
    return Case(**values, loss="curved" if kind == "smooth" else "linear")


def _shape(dice: Dice) -> tuple[int, ...]:
    return dice.one(
        (), (1,), (5,), (8,), (16,), (16, 3), (3, 16), (8, 8), (1, 16), (4, 6, 8), (2, 3, 5), (64, 2), (8, 1, 4)
    )


def run(case: Case) -> Differences:
    """Compare parameters and the optimizer's state after each step, from the same state before it."""
    if min(case.rows, case.microbatches, case.steps) < 1 or any(n < 1 for shape in case.shapes for n in shape):
        raise InvalidCase("a size is below 1")
    import jax

    from .optimizer_chains import compared, searches

    differences = Differences()
    with jax.enable_x64(searches(case)):
        compared(case, differences)
    return differences
