"""Trip counts of loops as compilers write them: through copies, tuples, fusions and enclosing loops."""

from __future__ import annotations

import re

import pytest

from jaxpar.analysis.hlo.dataflow import Flow
from jaxpar.analysis.hlo.parser import parse
from jaxpar.analysis.hlo.trip_counts import trip_count

CARRY = "(s32[], s32[])"
"""A counter and its bound."""


def computation(name: str, lines: str, *, entry: bool = False) -> str:
    """A computation whose parameter is ``%c`` with the elements ``%i`` and ``%n``; the last line is its result."""
    *first, last = [f"%{line.strip()}" for line in lines.strip().splitlines()]
    given = ["%c = (s32[], s32[]) parameter(0)"]
    given += [f"%{element} = s32[] get-tuple-element(%c), index={i}" for i, element in enumerate("in")]
    body = "\n".join(f"  {line}" for line in (*given, *first, f"ROOT {last}"))
    return f"{'ENTRY ' * entry}%{name} (c: {CARRY}) -> s32[] {{\n{body}\n}}\n"


COUNT = """
one = s32[] constant(1)
next = s32[] add(%i, %one)
t = (s32[], s32[]) tuple(%next, %n)
"""
LESS = "less = pred[] compare(%i, %n), direction=LT"
LOOP = f"loop = {CARRY} while(%first), condition=%condition, body=%body"


def program(*, before: str, condition: str = LESS, body: str = COUNT, others: str = "", loop: str = LOOP) -> str:
    parts = (others, computation("body", body), computation("condition", condition))
    return "HloModule m\n\n" + "\n".join((*parts, computation("main", f"{before.strip()}\n{loop}", entry=True)))


def runs(text: str, name: str = "loop") -> object:
    module = parse(text)
    where = next(c for c in module.computations.values() if name in {i.name.lstrip("%") for i in c})
    loop = next(i for i in where if i.name.lstrip("%") == name)
    return trip_count(loop, where, Flow(module))


def start(first: int = 2, bound: int = 9) -> str:
    return f"""
    zero = s32[] constant({first})
    most = s32[] constant({bound})
    first = {CARRY} tuple(%zero, %most)
    """


FUSED = """
%fused (a: s32[], b: s32[]) -> (s32[], s32[]) {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %two = s32[] constant(2)
  %sum = s32[] add(%a, %two)
  ROOT %pair = (s32[], s32[]) tuple(%b, %sum)
}
"""
FUSED_START = f"""
zero = s32[] constant(2)
most = s32[] constant(9)
pair = {CARRY} fusion(%zero, %most), kind=kLoop, calls=%fused
a = s32[] get-tuple-element(%pair), index=1
b = s32[] get-tuple-element(%pair), index=0
first = {CARRY} tuple(%a, %b)
"""
AFTER_ANOTHER = f"""
zero = s32[] constant(2)
most = s32[] constant(9)
pair = {CARRY} tuple(%zero, %most)
earlier = {CARRY} while(%pair), condition=%condition, body=%body
kept = s32[] get-tuple-element(%earlier), index=1
barrier = {CARRY} opt-barrier(%pair)
again = s32[] get-tuple-element(%barrier), index=0
first = {CARRY} tuple(%again, %kept)
"""
COPIED = """
less = pred[] compare(%i, %n), direction=LT
result = pred[] copy(%less)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(program(before=start()), 7, id="plain"),
        pytest.param(program(before=start(9, 2)), 0, id="never"),
        pytest.param(program(before=start(3, 3), condition=LESS.replace("LT", "EQ")), 1, id="once"),
        pytest.param(program(before=start(3, 4), condition=LESS.replace("LT", "EQ")), 0, id="not-once"),
        pytest.param(program(before=start(9, 2), condition=LESS.replace("LT", "GT")), None, id="for-ever"),
        pytest.param(program(before=start(), condition=COPIED), 7, id="copied-comparison"),
        pytest.param(program(before=FUSED_START, others=FUSED), 5, id="fused-start"),
        pytest.param(program(before=AFTER_ANOTHER), 7, id="bound-of-an-earlier-loop"),
        pytest.param(
            program(before=start(), condition="odd = pred[] is-finite(%n)"), None, id="condition-that-compares-nothing"
        ),
        pytest.param(
            program(before=start(), body=f"t = {CARRY} copy(%c)"), None, id="body-whose-result-is-not-written-out"
        ),
        pytest.param(program(before=f"first = {CARRY} copy(%c)"), None, id="start-that-is-an-argument-of-the-program"),
        pytest.param(
            program(
                before=f"""
                twice = s32[] multiply(%i, %i)
                most = s32[] constant(9)
                first = {CARRY} tuple(%twice, %most)
                """
            ),
            None,
            id="start-that-is-computed",
        ),
        pytest.param(
            program(before=start(), body=COUNT.replace("add(%i, %one)", "subtract(%one, %i)")), None, id="one-less-i"
        ),
        pytest.param(program(before=start(), body=COUNT.replace("(%i, %one)", "(%i, %n)")), None, id="step-of-a-bound"),
    ],
)
def test_how_often_a_loop_runs(text: str, expected: int | None) -> None:
    assert runs(text) == expected


OUTER = f"""
three = s32[] constant(3)
from = s32[] subtract(%n, %three)
first = {CARRY} tuple(%from, %n)
inner = {CARRY} while(%first), condition=%condition, body=%body
one = s32[] constant(1)
next = s32[] add(%i, %one)
t = {CARRY} tuple(%next, %n)
"""


@pytest.mark.parametrize(("kept", "expected"), [("%n", 3), ("%next", None)])
def test_a_bound_that_an_enclosing_loop_leaves_as_it_is_is_a_constant(kept: str, expected: int | None) -> None:
    outer = computation("outer", re.sub(r"tuple\(%next, %n\)", f"tuple(%next, {kept})", OUTER))
    loop = LOOP.replace("body=%body", "body=%outer")
    assert runs(program(before=start(), others=outer, loop=loop), "inner") == expected
