"""How close each test is to its numeric bounds: a pytest plugin, and a command that prints a table of what it recorded.

Rounding depends on the processor, so a comparison that stays close below its bound on one machine fails on another. Run the plugin once
for each instruction set (SSE4_2, AVX, AVX2, AVX512), in one process, then print the tests within a factor of 3 of a bound in any run::

    XLA_FLAGS=--xla_cpu_max_isa=AVX2 uv run python -m pytest tests -n 0 -p tests.margins \\
        -o enable_assertion_pass_hook=true --margins avx2.jsonl
    uv run python tests/margins.py avx2.jsonl sse4_2.jsonl --within 3

The plugin sees ``numpy.testing.assert_allclose``, ``assert_array_less`` and ``assert_array_equal``, ``numpy.array_equal``, ``allclose`` and ``isclose``,
``pytest.approx``, chex's asserts (numpy's underneath), ``jaxpar.testing.assert_matches_single_device``, and every assert that passes and
reads ``a < b``, ``a <= b``, ``a > b``, ``a >= b`` or ``a == b`` between numbers, computed or not. It sees no comparison inside
``all(...)`` or ``(...).all()``: write those as a maximum. Two integers are never counted.

A test's ratio is the largest of its ``error / bound``: 1 is at the bound. ``exact`` counts its comparisons of fractions that must be
equal bit for bit; those have no ratio, but may depend on the processor too.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).parent
OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


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
"""Of the test that runs now."""


def caller() -> str:
    """``file:line`` of the innermost frame in a test file; empty where the library compares for itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame := frame and frame.f_back:
        file = frame.f_code.co_filename
        if file.startswith(f"{TESTS.parent / 'jaxpar'}/"):
            return ""
        if file.startswith(f"{TESTS}/") and file != __file__:
            return f"{file.removeprefix(f'{TESTS}/')}:{frame.f_lineno}"
    return ""


def fractions(*values: Any) -> list[np.ndarray] | None:
    """The values as fp64 or complex arrays, or ``None`` unless one of them holds floating-point numbers."""
    if any("key<" in str(getattr(value, "dtype", "")) for value in values):
        return None
    arrays = [np.asarray(value) for value in values]
    if not any(x.dtype.kind == "c" or "float" in x.dtype.name for x in arrays):
        return None
    return [x if x.dtype.kind == "c" else x.astype(np.float64) for x in arrays]


def note_close(actual: Any, desired: Any, rtol: float, atol: float, *, only_passed: bool = False) -> None:
    """The element with the largest ``|a - b| / (atol + rtol |b|)``."""
    if (arrays := fractions(actual, desired)) is None or not arrays[0].size or not arrays[1].size:
        return
    with np.errstate(all="ignore"):
        error, bound = np.broadcast_arrays(np.abs(arrays[0] - arrays[1]), atol + rtol * np.abs(arrays[1]))
        ratio = np.where((error == 0) | ~np.isfinite(error), 0, error / bound)
    if not (only_passed and ratio.max() > 1):
        at = int(ratio.argmax())
        current.note(float(error.flat[at]), float(bound.flat[at]))


def wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call ``before`` with the arguments of ``owner.name`` each time that it is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if caller():
            before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, replaced)


def on_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, *_: Any, **__: Any) -> None:
    note_close(actual, desired, rtol, atol)


def on_close(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, *_: Any, **__: Any) -> None:
    note_close(a, b, rtol, atol, only_passed=True)  # a test may claim that two arrays differ


def on_less(x: Any, y: Any, *_: Any, **__: Any) -> None:
    if (arrays := fractions(x, y)) is not None:
        with np.errstate(all="ignore"):
            error, bound = np.broadcast_arrays(*arrays)
            at = int(np.nan_to_num(error / bound).argmax())
        current.note(float(error.flat[at]), float(bound.flat[at]))


def on_equal(actual: Any, desired: Any, *_: Any, **__: Any) -> None:
    if (arrays := fractions(actual, desired)) is not None:
        current.exact += any(bool((x % 1 != 0).any()) for x in arrays if x.dtype.kind == "f")


def on_approx(approx: Any, actual: Any) -> None:
    if isinstance(actual, int | float | np.number) and isinstance(approx.expected, int | float | np.number):
        note_close(float(actual), float(approx.expected), 0, float(approx.tolerance), only_passed=True)


def number(node: ast.AST) -> float:
    """What an explanation's text says of one side: a number, ``np.float32(…)``, ``Array(…)``, or arithmetic of those."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("np.float", "Array", "array")):
        value = number(node.args[0])
        return float(value)
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.operand,)
        return OPERATORS[type(node.op)](*map(number, parts))
    raise ValueError("not a number")


def note_explained(node: ast.AST) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            note_explained(value)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return
    try:
        left, right = float(a) if isinstance(a := number(node.left), float) else a, number(node.comparators[0])
    except (ValueError, KeyError, ArithmeticError):
        return
    if isinstance(left, int) and isinstance(right, int):
        return
    match node.ops[0]:
        case ast.Lt() | ast.LtE() if right > 0:
            current.note(abs(left), right)
        case ast.Gt() | ast.GtE() if left > 0:
            current.note(abs(right), left)
        case ast.Eq():
            current.exact += left % 1 != 0


def pytest_assertion_pass(expl: str) -> None:
    text = re.sub(r"^assert ", "", expl.split("\n", 1)[0])
    if len(text) < 500:
        try:
            note_explained(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError:
            return


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--margins", default="margins.jsonl", help="file to append one JSON line a test to (tests/margins.py)"
    )


def pytest_configure() -> None:
    # Python reads no bytecode that was written without the hook, and pytest rewrites asserts in the tests' helpers too.
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(TESTS.parent / ".pytest_cache" / "margins")
    pytest.register_assert_rewrite(*(f.stem for f in TESTS.glob("*.py") if f.stem not in ("conftest", "margins")))
    wrap(np.testing, "assert_allclose", on_allclose)
    wrap(np.testing, "assert_array_less", on_less)
    wrap(np.testing, "assert_array_equal", on_equal)
    wrap(np, "array_equal", on_equal)
    wrap(np, "allclose", on_close)
    wrap(np, "isclose", on_close)
    wrap(type(pytest.approx(1.0)), "__eq__", on_approx)


def pytest_sessionstart() -> None:
    from jaxpar.inspect.compare import Verdict  # only now: conftest.py sets up the devices before jax is imported

    def noted(self: Verdict) -> bool:
        if self.first is None:
            current.note(max(self.loss, self.gradients), self.bound)
        return self.first is None

    Verdict.passed = property(noted)  # type: ignore[assignment, method-assign]


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
    """Print the tests within a factor of their bound in any of the runs, one column a run; ``x`` where a test failed."""
    parser = argparse.ArgumentParser(description="Tests that are close to their bounds, the closest first.")
    parser.add_argument("files", nargs="+", type=Path, help="what runs with --margins wrote")
    parser.add_argument("--within", type=float, default=3, help="list tests with error >= bound / WITHIN (default 3)")
    parser.add_argument("--changing", action="store_true", help="leave out ratios that are equal in all runs")
    options = parser.parse_args()
    runs = [{line["test"]: line for line in map(json.loads, file.read_text().splitlines())} for file in options.files]
    worst = {test: max(run[test]["ratio"] for run in runs if test in run) for run in runs for test in run}
    print(*(file.stem for file in options.files), "where", "test", sep="\t")
    for test in sorted(worst, key=lambda test: -worst[test]):
        found = [run.get(test) for run in runs]
        ratios = [f"{one['ratio']:.3f}" + "x" * (not one["passed"]) if one else "-" for one in found]
        if worst[test] * options.within < 1 and "x" not in "".join(ratios):
            continue
        if not options.changing or len(set(ratios) - {"-"}) > 1 or "x" in "".join(ratios):
            where = max((one for one in found if one), key=lambda one: one["ratio"])["where"]
            print(*ratios, where, test, sep="\t")


if __name__ == "__main__":
    main()
