"""In a terminal the compiler's paragraphs about replicated tensors are one line; everything else passes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import os, sys
from jaxpar.app.train.compiler_log import shorter_log
warning = b"W1126 [SPMD] Involuntary full rematerialization. From {a} for HLO operation %p.2 = f32[4,8]{1,0} ...\\n"
with shorter_log(print):
    os.write(2, warning + b"another line\\n" + warning)
os.write(2, b"after it\\n")
"""
LINE = (
    "compiler  replicates a tensor f32[4,8] (2 x) on every device to change its sharding; `check --topology` says where"
)


def test_a_terminal_shows_one_line() -> None:
    main, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=terminal, stdout=subprocess.PIPE, text=True, check=True
    )
    os.close(terminal)
    assert done.stdout == f"{LINE}\n"
    assert os.read(main, 4096).decode().splitlines() == ["another line", "after it"]
    os.close(main)


def test_a_log_keeps_every_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [line[:8] for line in done.stderr.splitlines()] == ["W1126 [S", "another ", "W1126 [S", "after it"]
