"""How close each test is to its numeric bounds: a pytest plugin, and a command that prints a table of what it recorded.

Rounding depends on the processor, so an error just below its bound on one machine is above it on another. Run the tests
with and without fused multiply-adds (AVX2, AVX) and YNNPACK's sums (docs/facts.md says why these), then list the tests
that are within a factor of 3 of a bound::

    uv run python -m pytest tests -p tests.margins -o enable_assertion_pass_hook=true --margins here.jsonl
    XLA_FLAGS="--xla_cpu_max_isa=AVX --xla_cpu_experimental_ynn_fusion_type=" uv run python -m pytest tests \\
        -p tests.margins -o enable_assertion_pass_hook=true --margins other.jsonl
    uv run python tests/margins.py here.jsonl other.jsonl --within 3

A test's ratio is the largest of its ``error / bound``. A ratio that is equal in all runs compares bytes, not rounding:
``--changing`` leaves it out. ``exact`` counts comparisons of fractions that must be bitwise equal.

The plugin sees numpy's asserts (and chex's, which use them), ``allclose``, ``pytest.approx``,
``jaxpar.testing.assert_matches_single_device``, and asserts of the form ``a < b``, ``<=``, ``>``, ``>=`` or ``==``
between numbers that are not both integers. It does not see into ``all(...)`` or ``(...).all()``: write those as a
maximum.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).parent
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass
class Margin:
    """The worst ``error / bound`` of one test, and where it was found."""

    test: str
    ratio: float = 0.0
    error: float = 0.0
    bound: float = 0.0
    where: str = ""
    exact: int = 0
    passed: bool = True

    def note(self, error: float, bound: float) -> None:
        ratio = 0.0 if error == 0 else error / bound if bound else math.inf
        if ratio > self.ratio:
            self.ratio, self.error, self.bound, self.where = ratio, error, bound, caller()


current = Margin("")
"""The margin of the test that runs now."""


def caller() -> str:
    """``file:line`` of the innermost frame in a test file; empty if the library makes the comparison."""
    frame: FrameType | None = sys._getframe(1)
    while frame := frame and frame.f_back:
        file = frame.f_code.co_filename
        if file.startswith(f"{TESTS.parent / 'jaxpar'}/"):
            return ""
        if file.startswith(f"{TESTS}/") and file != __file__:
            return f"{file.removeprefix(f'{TESTS}/')}:{frame.f_lineno}"
    return ""


def fractions(*values: Any) -> list[np.ndarray] | None:
    """The values as fp64 or complex arrays, or ``None`` if none of them holds floating-point numbers."""
    if any("key<" in str(getattr(value, "dtype", "")) for value in values):
        return None
    arrays = [np.asarray(value) for value in values]
    real = any(x.dtype.kind == "c" or "float" in x.dtype.name for x in arrays)
    return [x if x.dtype.kind == "c" else x.astype(np.float64) for x in arrays] if real else None


def note_worst(error: Any, bound: Any, most: float = math.inf) -> None:
    """Record the element with the largest ratio, unless that ratio is above ``most``."""
    error, bound = np.broadcast_arrays(error, bound)
    with np.errstate(all="ignore"):
        ratio = np.where((error == 0) | ~np.isfinite(error), 0, error / bound)
    if ratio.size and ratio.max() <= most:
        current.note(float(error.flat[ratio.argmax()]), float(bound.flat[ratio.argmax()]))


def near(a: Any, b: Any, rtol: float, atol: float, most: float = math.inf) -> None:
    if arrays := fractions(a, b):
        with np.errstate(all="ignore"):
            note_worst(np.abs(arrays[0] - arrays[1]), atol + rtol * np.abs(arrays[1]), most)


def less(x: Any, y: Any, *_: Any, **__: Any) -> None:
    if arrays := fractions(x, y):
        note_worst(arrays[0], arrays[1])


def equal(actual: Any, desired: Any, *_: Any, **__: Any) -> None:
    if arrays := fractions(actual, desired):
        current.exact += any(bool((x % 1 != 0).any()) for x in arrays if x.dtype.kind == "f")


def approx(expected: Any, actual: Any) -> None:
    if all(isinstance(x, int | float | np.number) for x in (actual, expected.expected)):
        near(float(actual), float(expected.expected), 0, float(expected.tolerance), most=1)


def wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call ``before`` with the arguments of ``owner.name`` each time a test calls it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if caller():
            before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def number(node: ast.AST) -> float:
    """The value of one side of an explanation: a number, ``np.float32(…)``, ``Array(…)``, or arithmetic of those."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.Call(func=func, args=[first, *_]) if ast.unparse(func).startswith(("np.float", "Array", "array")):
            return float(number(first))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -number(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return ARITHMETIC[type(op)](number(left), number(right))
    raise ValueError("not a number")


def pytest_assertion_pass(expl: str) -> None:
    """Record an assert that passed; ``expl`` has values instead of expressions."""
    try:
        tree = ast.parse(expl.split("\n", 1)[0].strip(), mode="eval").body
    except SyntaxError:
        return
    for node in tree.values if isinstance(tree, ast.BoolOp) else [tree]:
        with contextlib.suppress(ValueError, KeyError, ArithmeticError):  # the sides are not numbers
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                left, right = number(node.left), number(node.comparators[0])
                if isinstance(left, int) and isinstance(right, int):
                    continue
                if isinstance(node.ops[0], ast.Gt | ast.GtE):
                    left, right = right, left
                if not isinstance(node.ops[0], ast.Eq | ast.NotEq) and right > 0:
                    current.note(max(left, 0.0), right)
                current.exact += isinstance(node.ops[0], ast.Eq) and left % 1 != 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--margins", default="margins.jsonl", help="append a JSON line a test to this (tests/margins.py)")


def pytest_configure() -> None:
    # Python must not read bytecode written without the hook, and pytest must rewrite asserts in helpers, too.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(TESTS.parent / ".pytest_cache" / "margins")
    already = {"conftest", "margins", "profiles"}  # pytest or conftest.py imported them; they compare no numbers
    pytest.register_assert_rewrite(*sorted({f.stem for f in TESTS.glob("*.py")} - already))
    wrap(np.testing, "assert_allclose", lambda a, b, rtol=1e-7, atol=0, *_, **__: near(a, b, rtol, atol))
    for name in ("allclose", "isclose"):  # a test may assert that two arrays differ
        wrap(np, name, lambda a, b, rtol=1e-5, atol=1e-8, *_, **__: near(a, b, rtol, atol, most=1))
    wrap(np.testing, "assert_array_less", less)
    wrap(np.testing, "assert_array_equal", equal)
    wrap(np, "array_equal", equal)
    wrap(type(pytest.approx(1.0)), "__eq__", approx)
    from jaxpar.analysis.compare import Verdict  # conftest.py must set up the devices before jax is imported

    def passed(self: Verdict) -> bool:
        if self.first is None:
            current.note(max(self.loss, self.gradients, self.updates), self.bound)
        return self.first is None

    Verdict.passed = property(passed)  # type: ignore[assignment, method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    global current
    current = Margin(item.nodeid)
    result = yield
    if current.ratio or current.exact or not current.passed:
        with open(item.config.getoption("--margins"), "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(current)) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    current.passed &= not report.failed


def main() -> None:
    """Print the tests within a factor of their bound in any run, one column per run; ``x`` where a test failed."""
    parser = argparse.ArgumentParser(description="Tests that are close to their bounds, the closest first.")
    parser.add_argument("files", nargs="+", type=Path, help="what runs with --margins wrote")
    parser.add_argument("--within", type=float, default=3, help="list tests with error >= bound / WITHIN (default 3)")
    parser.add_argument("--changing", action="store_true", help="leave out ratios that are equal in all runs")
    options = parser.parse_args()
    runs = [{line["test"]: line for line in map(json.loads, file.read_text().splitlines())} for file in options.files]
    rows = []
    for test in {test for run in runs for test in run}:
        worst = max((run[test] for run in runs if test in run), key=lambda one: one["ratio"])
        texts = [f"{run[test]['ratio']:.3f}" + "x" * (not run[test]["passed"]) if test in run else "-" for run in runs]
        close = worst["ratio"] * options.within >= 1 and (len({*texts} - {"-"}) > 1 or not options.changing)
        if close or "x" in "".join(texts):
            rows.append((worst["ratio"], [*texts, worst["where"], test]))
    print(*(file.stem for file in options.files), "where", "test", sep="\t")
    for _, row in sorted(rows, reverse=True):
        print(*row, sep="\t")


if __name__ == "__main__":
    main()
