"""``next_commands``: what a person may run after a run that has finished, ready to paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxpar.app.config import RunConfig
from jaxpar.utils.terminal import fit_command

_PROMPTS = {"stdlib": "def "}
"""A beginning that suits a built-in text."""
_OF_THIS_RUN = ("train.steps", "train.eval_", "train.profile", "trackers.", "output=", "supervise.")
"""Settings that change nothing in the commands."""
_LABEL = 18
"""The columns of the labels in the summary of a run."""
_TOPOLOGIES = {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"}
"""A topology with this number of chips."""


def next_commands(file: Path, settings: Sequence[str], config: RunConfig) -> list[str]:
    """Returns command lines: generate from the run's checkpoints, explain its layout, compile it for a topology.

    Args:
      file: the run's YAML file, as the user wrote it.
      settings: the changes to it, as ``a.b=c``.
      config: what both give.

    >>> config = RunConfig(model={"family": "llama"})
    >>> next_commands(Path("my run.yaml"), ["mesh.model=4"], config)[0].removeprefix("uv run ")
    "jaxpar explain 'my run.yaml' --set mesh.model=4"
    """
    kept = [setting for setting in settings if not setting.startswith(_OF_THIS_RUN)]
    run = shlex.join([str(file), *(word for setting in kept for word in ("--set", setting))])
    uv = "uv run " if "UV_RUN_RECURSION_DEPTH" in os.environ else ""  # uv sets it for what it runs
    commands = [f"{uv}jaxpar explain {run}"]
    if config.checkpoint is not None and ("family" in config.model or "decoder" in config.model):
        saved = config.checkpoint.directory or f"{config.output}/checkpoints"
        prompt = _PROMPTS.get(str(config.data.source), "TEXT")
        ask = f"--checkpoint {shlex.quote(saved)} --prompt {shlex.quote(prompt)}"
        commands.insert(0, f"{uv}jaxpar generate {run} {ask}")
    if (topology := _TOPOLOGIES.get(config.cpu_devices or 0)) is not None:
        extra = uv and f"{uv}--extra tpu "
        commands.append(f"{extra}jaxpar check {run} --topology {topology}{'' if extra else '  # extra tpu'}")
    return commands


def shown(commands: Sequence[str], width: int | None) -> str:
    """Returns command lines as a run ends with them; lines for a terminal of ``width`` columns can be pasted too.

    >>> print(shown(["jaxpar explain my.yaml", "jaxpar check my.yaml"], None))
    next              jaxpar explain my.yaml
                      jaxpar check my.yaml
    >>> print(shown(["jaxpar explain my.yaml --set mesh.model=4"], 36))
    next:
      jaxpar explain my.yaml \\
          --set mesh.model=4
    """
    if width is None or _LABEL + max(map(len, commands)) <= width:
        return "\n".join(f"{'' if i else 'next':<{_LABEL}}{line}" for i, line in enumerate(commands))
    return "\n".join(["next:", *(fit_command(line, width, "  ") for line in commands)])
