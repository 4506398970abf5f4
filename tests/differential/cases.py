"""Test cases: data that a seed draws, that prints as Python, and that a reference checks."""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import numpy as np

FAMILIES = ("attention", "pipelines", "optimizers", "models", "partitioner")
"""Each family is a module with a class ``Case``, ``draw(dice) -> Case`` and ``run(case) -> Differences``."""
PASSING = ("same", "refused")
"""The kinds of outcomes that count as passed."""


class InvalidCase(Exception):
    """A case without a meaning, which the reference cannot compute either. Shrinking meets such cases; drawing must
    not."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
      kind: ``same``; ``refused`` (a typed error with a remedy); ``unremedied`` (a typed error without one);
        ``differs``; ``raised`` (any other exception); ``crashed`` (the process ended); ``hung`` (no answer in
        time); ``invalid``.
      text: the description of a failure.
      errors: for each precision, the largest error of this case, relative to the size of the reference.
    """

    kind: str
    text: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.kind not in PASSING

    def alike(self, other: Outcome) -> bool:
        """Whether both are the same failure: the same kind and, for exceptions, the same type."""
        kinds = ("raised", "unremedied")
        return self.kind == other.kind and (
            self.kind not in kinds or self.text.split(":")[0] == other.text.split(":")[0]
        )


class Differences:
    """Collects comparisons of a case; ``outcome`` reports whether all are within their bounds."""

    def __init__(self) -> None:
        self.wrong: list[tuple[float, str]] = []
        self.errors: dict[str, float] = {}

    def check(self, name: str, found: Any, want: Any, bound: float, size: float = 0.0, label: str = "fp32") -> None:
        """Compares two arrays in the max-norm.

        Args:
          name: the name of the arrays in the report.
          found, want: arrays of one shape; ``want`` is the reference.
          bound: the largest error, relative to the larger of ``max(abs(want))`` and ``size``.
          size: the magnitude of the terms that sum to ``want``: where they cancel, rounding is relative to them.
          label: the precision under which the error is reported.
        """
        a, b = np.asarray(found, np.float64), np.asarray(want, np.float64)
        if a.shape != b.shape:
            self.wrong.append((np.inf, f"{name} has shape {list(a.shape)}, the reference {list(b.shape)}"))
            return
        if not a.size:
            return
        if not np.isfinite(a).all() or not np.isfinite(b).all():
            if not np.array_equal(a, b, equal_nan=True):
                counts = (
                    f"{int((~np.isfinite(a)).sum())} of {a.size} entries, the reference {int((~np.isfinite(b)).sum())}"
                )
                self.wrong.append((np.inf, f"{name} is not finite in {counts}"))
            return
        scale = max(float(np.abs(b).max()), size)
        gap = np.abs(a - b)
        error = float(gap.max()) / scale if scale else float(gap.max() > 0)
        if error > bound:
            at = np.unravel_index(int(gap.argmax()), a.shape)
            where = f"[{', '.join(map(str, at))}]" if at else ""
            self.wrong.append(
                (
                    error,
                    f"{name}{where} is {a[at]:.9g}, the reference {b[at]:.9g}: error {error:.1e}, bound {bound:.0e}",
                )
            )
        else:
            self.errors[label] = max(self.errors.get(label, 0.0), error)

    def claim(self, right: bool, text: str) -> None:
        """Records ``text`` as a failure unless ``right``."""
        if not right:
            self.wrong.append((np.inf, text))

    @property
    def outcome(self) -> Outcome:
        texts = [text for _, text in sorted(self.wrong, key=lambda pair: -pair[0])]
        return Outcome("differs" if texts else "same", "; ".join(texts[:4]), self.errors)


class Dice:
    """Draws plain Python values from numpy's generator for a seed and an index; they are the same on every machine."""

    def __init__(self, seed: int, index: int) -> None:
        self.rng = np.random.default_rng((seed, index))

    def whole(self, least: int, most: int) -> int:
        """A random integer from ``least`` to ``most``, both included."""
        return int(self.rng.integers(least, most + 1))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def maybe(self, share: float, *options: Any) -> Any:
        """One of the options in ``share`` of the cases, else ``None``."""
        return self.one(*options) if self.chance(share) else None


def family(name: str) -> ModuleType:
    """The module of a family; the first use imports jax."""
    return importlib.import_module(f".{name}", __package__)


def drawn(name: str, seed: int, index: int) -> Any:
    """Case number ``index`` of a seed."""
    return family(name).draw(Dice(seed, index))


def changed(case: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != f.default}


def printed(case: Any) -> str:
    """Python that constructs the case.

    >>> from dataclasses import make_dataclass
    >>> printed(make_dataclass("Case", [("heads", int, 1), ("mask", str, "causal")], frozen=True)(heads=2))
    'Case(heads=2)'
    """
    return f"Case({', '.join(f'{name}={value!r}' for name, value in changed(case).items())})"


def parsed(name: str, text: str) -> Any:
    """The case that ``text`` describes, as :func:`printed` writes it; only literals are read, and nothing is
    executed."""
    call = ast.parse(text.strip(), mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError(f"--case is {text!r}, but a number or Case(name=value, ...) is expected.")
    values = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    return family(name).Case(**values)
