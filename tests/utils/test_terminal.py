"""Text fits a terminal: lines end between words, tables keep their columns, commands can be pasted."""

from __future__ import annotations

import io
import shlex
import sys
from typing import Any

import numpy as np
import optax
import pytest
from by_hand import collective
from hypothesis import given
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.analysis.hlo.audit import Audit
from jaxpar.analysis.units import table_lines
from jaxpar.app.console import RunConsole
from jaxpar.app.help import shown as shown_help
from jaxpar.app.train.next_commands import shown as shown_commands
from jaxpar.utils.terminal import fit, fit_command, say

WORDS = st.lists(st.text("ab×(.", min_size=1, max_size=9), min_size=1, max_size=30)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@given(WORDS, st.integers(20, 60))
def test_no_word_is_cut_and_none_is_lost(words: list[str], width: int) -> None:
    lines = fit(" ".join(words), width).split("\n")
    assert " ".join(lines).split() == words and max(map(len, lines)) <= width


def test_further_lines_stand_below_the_text_of_a_label() -> None:
    line = "memory  7.51 MiB of parameters, 970.51 KiB on each device"
    assert fit(line, 40) == "memory  7.51 MiB of parameters, 970.51\n        KiB on each device"
    assert fit("  from a.py, b.py and c.py", 20) == "  from a.py, b.py\n    and c.py"
    assert fit(line, None) == line and fit("short\n\nlines", 20) == "short\n\nlines"


@given(st.lists(st.text("a '\"$#\\-é", min_size=1, max_size=9), max_size=8), st.integers(20, 60))
def test_a_command_in_lines_is_the_same_command(values: list[str], width: int) -> None:
    command = shlex.join(["jaxpar", "train", *(word for value in values for word in ("--set", f"a={value}"))])
    assert shlex.split(fit_command(command, width, "  ").replace("\\\n", "")) == shlex.split(command)


def test_a_command_is_cut_before_options_only() -> None:
    command = "jaxpar generate my.yaml --checkpoint runs/one/checkpoints --prompt 'def --x '"
    assert fit_command(command, 60) == (
        "jaxpar generate my.yaml --checkpoint runs/one/checkpoints \\\n    --prompt 'def --x '"
    )
    assert fit_command(command, None) == command
    assert shown_commands([command], None) == f"next              {command}"


def test_a_wide_table_has_its_last_cells_below() -> None:
    rows = [("what", "bytes", "from"), ("all-gather", "2 B", "a.py:3"), ("all-to-all", "12 B", "")]
    assert table_lines(rows, 20) == ["what        bytes", "all-gather  2 B", "    a.py:3", "all-to-all  12 B"]
    assert table_lines(rows, 80) == ["what        bytes  from", "all-gather  2 B    a.py:3", "all-to-all  12 B"]


def test_the_collectives_of_an_audit_fit_a_terminal() -> None:
    place, form = "Attention.output (layers.py:195)", "all-reduce in a scatter fusion"
    fields: dict[str, Any] = {
        "form": form,
        "dtype": "f32",
        "arrays": 2,
        "result_bytes": 1024,
        "count": 3,
        "source": place,
    }
    sent = collective(kind="reduce-scatter", axes=("data",), wire_bytes=2048, **fields)
    report = Audit({"data": 4}, 2**30, 0, 2**20, (sent,), (), (), (), {})
    narrow = report.to_text(80).splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[-4:] == [
        "collective      axes  count  dtype  results   on the wire",
        "reduce-scatter  data  3      f32    3.00 KiB  6.00 KiB",
        "    as all-reduce in a scatter fusion; 2 arrays; from Attention.output",
        "      (layers.py:195)",
    ]
    assert str(report) == report.to_text() == report.to_text(300)


def test_the_console_of_a_run_cuts_between_words() -> None:
    out = io.StringIO()
    console = RunConsole(file=out, force_terminal=True, color_system="standard", width=30)
    console.print("[bold]run one[/]  mesh: data 4 × model 2 = 8 devices")
    console.print()
    console.print(r"\[1, 2\]")
    assert out.getvalue() == "\x1b[1mrun one\x1b[0m  mesh: data 4 × model\n         2 = 8 devices\n\n[1, 2\\]\n"
    pipe = io.StringIO()
    RunConsole(file=pipe, width=30).print("[bold]run one[/]  mesh: data 4 × model 2 = 8 devices")
    assert pipe.getvalue() == "run one  mesh: data 4 × model 2 = 8 devices\n"


def test_messages_are_cut_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        say("one two three four five", file=stream)
    assert (terminal.getvalue(), pipe.getvalue()) == ("one two three four\n  five\n", "one two three four five\n")


def test_help_is_cut_between_words() -> None:
    box = "│ --a {b,c} │\n│           │\n╰───────────╯"
    text = f"usage: jaxpar [-h] {{train,explain}}\n\nTrain a model, with progress\n\n{box}"
    assert shown_help(text, 22) == (
        "usage: jaxpar [-h]\nCOMMAND\n\nTrain a model, with\nprogress\n\n│ --a {b,c} │\n╰───────────╯"
    )


def test_a_report_in_a_narrow_terminal_is_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = jp.Layout(jp.MeshSpec(data=8).abstract(), jp.Rules(embed="data"))
    report = jp.explain(layout, lambda key: {"w": jp.tag(np.zeros((16, 4)), "embed", "embed")}, optax.sgd(0.1))
    assert str(report) == report.to_text()
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    narrow = str(report)
    assert max(map(len, narrow.splitlines())) <= 60 and narrow.startswith(report.summary(60))
    monkeypatch.setenv("COLUMNS", "300")
    assert str(report) == report.to_text()


def test_the_cells_of_a_plan_stand_below_its_numbers() -> None:
    rows = [("", "plan", "step", "peak", ""), ("1", "data 4 × model 2", "2 ms", "3 MiB", "as given")]
    assert table_lines(rows, 24, below=(1, -1)) == ["   step  peak", "1  2 ms  3 MiB", "    data 4 × model 2, as given"]
    assert table_lines(rows, 24, below=(1, 3), labels=True)[1:] == [
        "1  2 ms  as given",
        "    plan data 4 × model 2, peak 3 MiB",
    ]
