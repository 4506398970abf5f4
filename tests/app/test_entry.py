"""Ctrl-C before a command has begun ends it with one line and status 130."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from profiles import few

# A shell's background jobs ignore SIGINT, and so does what they start.
HEED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
SCRIPT = f"{HEED}\nimport sys; from jaxpar.app.entry import run; sys.exit(run())"


@pytest.mark.parametrize("command", few(["train", "explain"], 1))
def test_ctrl_c_while_a_command_starts(command: str, tmp_path: Path) -> None:
    (tmp_path / "slow_model.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "run.yaml").write_text("model: {factory: 'slow_model:make', loss: 'slow_model:loss'}\n")
    words = [sys.executable, "-c", SCRIPT, command, "run.yaml", "--set", "cpu_devices=1"]
    with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline().strip()]
        process.send_signal(signal.SIGINT)
        lines += process.stderr.read().splitlines()
    assert (process.returncode, lines) == (130, ["imported", "stopped by Ctrl-C"])


def test_an_ignored_signal_stays_ignored() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv[1:] = ['--version']\n"
        "from jaxpar.app import entry; entry.run(); print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
