"""Checkpoints survive kills at any moment, and every corruption of a checkpoint is detected.

    uv run python benchmarks/reliability/kills_and_corruptions.py [--kills 50 --corruptions 1000]

Kills: a small run (Adam, dropout by key, shuffled data, gradient accumulation, a loss scale) saves every step. It is
killed by SIGKILL at a random moment, during a save, or during start and restore (``--aim``; all three by default), and
restarted until it reaches its last step. After each kill, the checksums of every saved step are compared with those of
a run that was never killed. The runs are forked from one process that has imported everything, and share jax's
persistent compilation cache: a kill costs about two CPU seconds. With ``--plain`` steps are numpy and nothing is
compiled; saves and restores are the real ones.

Corruptions: a checkpoint of 1 MiB is damaged in random ways.

Goals: every step equals that of the run never killed, every corruption is detected, and no restore returns wrong
values. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxpar as jp
from benchmarks.shared.forked import Forked, load
from jaxpar.checkpoint.leftovers import leftovers_in
from jaxpar.checkpoint.manifest import NAME
from jaxpar.checkpoint.verify import check, problems_of, steps_in

DEVICES, ROWS, WIDTH = 4, 16, 64
STARTING = 1.0
"""CPU seconds that a run needs to start, restore and run its first step."""


def plain(folder: Path, steps: int) -> None:
    """Run numpy steps from the latest checkpoint in ``folder`` to the last step."""
    jp.simulate_devices(2)
    import jax
    import numpy as np

    spread = jax.sharding.NamedSharding(jp.MeshSpec(data=-1).build(), jax.sharding.PartitionSpec("data"))
    like = {name: jax.ShapeDtypeStruct((16, 16), "float32", sharding=spread) for name in ("mean", "weights")}
    with jp.CheckpointManager(folder, keep=None) as manager:
        found = manager.restore_latest(like)
        last = 0 if found is None else found.step
        mean, weights = np.zeros((2, 16, 16), np.float32) if found is None else map(np.asarray, found.state.values())
        for number in range(last + 1, steps + 1):
            noise = np.random.default_rng(number).normal(size=weights.shape).astype(np.float32)
            mean = np.float32(0.9) * mean + np.tanh(weights + noise)
            weights = weights - np.float32(0.1) * mean
            manager.save(number, jax.device_put({"mean": mean, "weights": weights}, spread))


def child(folder: Path, steps: int) -> None:
    """Run training steps from the latest checkpoint in ``folder`` to the last step."""
    jp.simulate_devices(DEVICES)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxpar.data import batches

    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(batch="data", embed=None, params={"embed": "data"}))

    def make_model(key: jax.Array) -> Any:
        one, two = jax.random.split(key)
        return {
            "up": jp.tag(jax.random.normal(one, (WIDTH, WIDTH)) / 8, "embed", None),
            "down": jp.tag(jax.random.normal(two, (WIDTH, WIDTH)) / 8, "embed", None),
        }

    def loss_fn(model: Any, batch: Any, key: jax.Array) -> jax.Array:
        x = batch["tokens"].astype(jnp.float32) / 64 - 1
        hidden = jnp.tanh(x @ model["up"]) * jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.mean((hidden @ model["down"] - x) ** 2)

    tx, precision = optax.adam(1e-2), jp.Precision.of({"scale": {"interval": 3}})
    stream = batches(np.random.default_rng(0).integers(0, 128, 20_000), batch=ROWS, seq=WIDTH, seed=1)
    with jp.CheckpointManager(folder, keep=None, save_interval_steps=1) as manager:
        found = manager.restore_latest(jp.abstract_state(layout, make_model, tx, precision))
        state = jp.init(layout, make_model, tx, precision=precision) if found is None else found.state
        if found is not None:
            stream.set_state(found.manifest.metadata["position"])
        step = jp.train_step(layout, loss_fn, grad_accum_steps=2, grad_reduction="per_microbatch", precision=precision)
        for number in range(found.step + 1 if found else 1, steps + 1):
            batch = {name: jp.shard_array(layout, x, "batch", None) for name, x in next(stream).items()}
            state, _ = step(state, batch)
            manager.save(number, state, layout=layout, metadata={"position": stream.get_state()})
    stream.close()


def sums(folder: Path, step: int) -> Any:
    return {path: tensor.sums for path, tensor in check(folder / str(step), step).tensors.items()}


def kills(
    work: Callable[[Path, int], None], number: int, steps: int, aims: list[str], dice: random.Random, root: Path
) -> bool:
    """Kill runs ``number`` times and print the result; return whether the goal is met."""
    reference, folder = root / "never", root / "killed"
    if Forked(work, reference, steps).wait():
        print("FAIL  the run that is never killed failed")
        return False
    true = {step: sums(reference, step) for step in steps_in(reference)}
    wrong, done, runs, in_save, early = 0, 0, 0, 0, 0
    while done < number:
        left, before = _half_written(folder), len(steps_in(folder))
        run = Forked(work, folder, steps)
        _wait_for(run, folder, before, dice.choice(aims), dice)
        run.kill()
        ended = run.wait() == 0
        done += not ended
        if done % 10 == 0 and not ended:
            print(f"{done} kills so far, {wrong} steps differ", file=sys.stderr, flush=True)
        in_save += not ended and bool(_half_written(folder) - left)
        early += not ended and len(steps_in(folder)) == before
        wrong += _differing(folder, true)
        if ended:
            runs += 1
            wrong += steps_in(folder) != list(true)
            shutil.rmtree(folder)
    if folder.exists():
        wrong += Forked(work, folder, steps).wait() != 0 or steps_in(folder) != list(true)
        wrong += _differing(folder, true)
        runs += 1
    verdict = "every step equals that of a run never killed" if not wrong else f"{wrong} steps differ"
    where = f"{in_save} during a save, {early} before it had saved anything"
    print(
        f"{'FAIL' if wrong else 'pass'}  SIGKILL: {done} kills ({where}) in {runs} runs of {steps} steps: {verdict}",
        flush=True,
    )
    return not wrong


def _wait_for(run: Forked, folder: Path, before: int, aim: str, dice: random.Random) -> None:
    """Wait for the moment to kill: soon after the start, or after a saved step, at random or during a save."""
    early = dice.uniform(0, STARTING)
    while run.poll() is None and (_cpu(run) < early if aim == "start" else len(steps_in(folder)) == before):
        time.sleep(0.004)
    if aim == "start":
        return
    until = time.monotonic() + dice.uniform(0, 0.3)
    while run.poll() is None and (time.monotonic() < until or (aim == "save" and not _saving(folder))):
        time.sleep(0.002)


def _half_written(folder: Path) -> set[tuple[str, int]]:
    """Return the unfinished saves; the inode distinguishes folders of the same name."""
    return {(one.name, (folder / one.name).stat().st_ino) for one in leftovers_in(folder)}


def _cpu(run: Forked) -> float:
    """Return the CPU seconds that a process has used, which do not depend on the load of the machine."""
    *_, user, system = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _differing(folder: Path, true: dict[int, Any]) -> int:
    """Return how many steps differ from those of the run that was never killed."""
    wrong = 0
    for step in steps_in(folder):
        try:
            wrong += sums(folder, step) != true[step]
        except jp.errors.JaxparError as error:
            print(error)
            wrong += 1
    return wrong


def _saving(folder: Path) -> bool:
    return any(not one.complete for one in leftovers_in(folder))


def corruptions(number: int, dice: random.Random, root: Path) -> bool:
    """Damage a checkpoint of 1 MiB ``number`` times and print the result; return whether the goal is met."""
    jp.simulate_devices(DEVICES)
    import jax
    import numpy as np

    layout = jp.Layout(jp.MeshSpec(data=-1).build(), jp.Rules(embed="data"))
    values = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    jp.save(root / "one", {name: jp.shard_array(layout, values * i, "embed", None) for i, name in enumerate("abcd", 1)})
    like = {name: jax.ShapeDtypeStruct(values.shape, values.dtype) for name in "abcd"}
    copy, missed, silent = root / "copy", 0, 0
    shutil.copytree(root / "one", copy)
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    for _ in range(number):
        touched = list(damage(files, dice))
        found = " ".join(problems_of(copy))
        missed += not all(str(file) in found or NAME in {f.name for f in touched} for file in touched) or not found
        try:
            got = jp.restore(copy, like)
            silent += any(not np.array_equal(got[name], values * np.float32(i)) for i, name in enumerate("abcd", 1))
        except jp.errors.CheckpointError:
            pass
        for file in touched:
            shutil.copyfile(root / "one" / file.relative_to(copy), file)
    size = sum(p.stat().st_size for p in files) / 2**20
    good = missed == silent == 0
    print(
        f"{'pass' if good else 'FAIL'}  corruptions of {size:.1f} MiB: {number - missed} of {number} detected and the "
        f"files named; {silent} restores returned wrong values without an error",
        flush=True,
    )
    return good


def damage(files: list[Path], dice: random.Random) -> Iterator[Path]:
    """Damage a file in one random way: flip, cut, lengthen, zero, delete, rotate or swap; yield the changed files."""
    file, other = dice.sample(files, 2)
    data = file.read_bytes()
    spoilt, at = bytearray(data), dice.randrange(len(data))
    spoilt[at] ^= 1 << dice.randrange(8)
    block = data[:at] + os.urandom(min(512, len(data) - at)) + data[at + 512 :]
    turned = data[len(data) // 2 :] + data[: len(data) // 2]
    ways = [bytes(spoilt), bytes(spoilt), data[:at], data + b"\0", bytes(len(data)), turned, block, None]
    made = dice.choice(["swap", *(way for way in ways if way != data)])
    if made == "swap" and other.read_bytes() != data:
        shutil.copyfile(other, file)
        other.write_bytes(data)
        yield other
    elif made is None or made == "swap":
        file.unlink()
    elif isinstance(made, bytes):
        file.write_bytes(made)
    yield file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="number of kills (default: %(default)s)")
    parser.add_argument("--corruptions", type=int, default=1000, help="number of corruptions (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kills and corruptions (default: %(default)s)")
    parser.add_argument(
        "--aim", choices=("any", "save", "start"), help="moment of all kills (default: each in turn at random)"
    )
    parser.add_argument("--plain", action="store_true", help="run NumPy steps, which need no compile")
    options = parser.parse_args()
    dice, good = random.Random(options.seed), True
    with tempfile.TemporaryDirectory() as folder:
        if options.kills:  # before this process has a jax backend, which does not survive a fork
            load(*(() if options.plain else ("optax", "jaxpar.data", "jaxpar.training.step", "jaxpar.training.state")))
            aims = [options.aim] if options.aim else ["any", "save", "start"]
            good &= kills(plain if options.plain else child, options.kills, options.steps, aims, dice, Path(folder))
        if options.corruptions:
            good &= corruptions(options.corruptions, dice, Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
