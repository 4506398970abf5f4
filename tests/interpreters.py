"""Fresh Python interpreters, which do not have the simulated devices of this test session, and waiting for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpar.app.launch.process_group import free_port


def python(code: str, **env: str) -> str:
    """What a fresh interpreter prints."""
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**clean, **env}, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@contextmanager
def two_processes(script: str, *words: object, flags: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of a script, killed at the end.

    The script's arguments are the coordinator's address, the process's rank and ``words``; ``flags`` are for XLA.
    """
    address, env = f"127.0.0.1:{free_port()}", {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    commands = [[sys.executable, script, address, str(rank), *map(str, words)] for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    workers = [subprocess.Popen(command, env=env, text=True, **pipes) for command in commands]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def outputs_of(workers: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    """What the processes print until they end, all with status 0."""
    outputs = [worker.communicate(timeout=timeout)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), outputs
    return outputs


def wait_for[T](ready: Callable[[], T], seconds: float = 300) -> T:
    """The first true value that ``ready`` returns."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
