"""A supervised run restarts after one of its processes is killed or stopped.

    uv run python benchmarks/reliability/killed_processes.py [--processes 2 --trials 2]

Kills processes with SIGKILL, then stops processes with SIGSTOP, every second time during a save. Prints seconds from
the signal to the supervisor's line that names the process, and to the first step after the restart. Compile time of the
restart, as the run prints it, is listed separately. The processes are those of ``benchmarks/shared/supervised_run.py``.

Goals: ``RESTART_SECONDS`` from SIGKILL to the next step; a stopped process named within ``STEP_TIMEOUT`` seconds of the
last step. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.supervised_run import RESTART_SECONDS, STEP_TIMEOUT, Run, stepping


def hit(run: Run, rank: int, number: signal.Signals, *, in_save: bool) -> tuple[float, float, float, str]:
    """Signal a process and wait for the restart.

    Returns:
      Seconds until the process is named, seconds until the run steps again, seconds spent compiling in between, and the
      line that names the process.
    """
    before = len(run.lines)
    run.progress()
    child = run.child(rank)
    if in_save:  # Without a restart the other processes would wait ten minutes for this one's part of the save.
        run.until(lambda: any((run.folder / "run/checkpoints").glob("*.unfinished")), "a save")
    os.kill(child, number)
    sent = time.monotonic()
    run.until(lambda: run.find(r"^restart ", before) is not None, "a restart")
    named = run.find(rf"^process(es)? .*{rank}.* of ", before)
    assert named is not None
    again, compiling = stepping(run, before)
    return named[0] - sent, again - sent, compiling, named[1]


def processes(count: int, trials: int, dice: random.Random, root: Path) -> bool:
    """Kill and stop processes, ``trials`` times each, and print the results; return whether the goals are met."""
    run, good = Run(root / "processes", count), True
    try:
        run.until(lambda: run.step() > 20, "the first steps")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            ranks = [dice.randrange(count) for _ in range(trials)]
            results = [hit(run, rank, number, in_save=trial % 2 == 1) for trial, rank in enumerate(ranks)]
            named, again = max(r[0] for r in results), max(r[1] - r[2] for r in results)
            right = sum(f"process {rank} of {count}" in r[3] for rank, r in zip(ranks, results, strict=True))
            compiles = ", ".join(f"{r[2]:.0f}" for r in results)
            if number == signal.SIGKILL:
                met, goal = again <= RESTART_SECONDS, f"the next step after {RESTART_SECONDS:g} s at most"
            else:
                met, goal = named <= STEP_TIMEOUT + 1, f"reported within {STEP_TIMEOUT:g} s of the last step"
            met &= right == trials
            good &= met
            print(
                f"{'pass' if met else 'FAIL'}  {number.name}, {count} processes: {right} of {trials} reported, after "
                f"{named:.1f} s at most; the next step after {again:.1f} s at most, without compiles of {compiles} s "
                f"(goal: {goal})",
                *(f"      {r[3]}" for r in results),
                sep="\n",
                flush=True,
            )
    finally:
        run.end()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="processes of the run (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=2, help="kills, and stops, of a process (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed that selects the processes (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = processes(options.processes, options.trials, random.Random(options.seed), Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
