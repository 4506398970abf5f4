"""A run of two hosts in network namespaces, with a link that is slow, lossy or cut; by hand, and on Ray.

    uv run --with ray python benchmarks/reliability/network_faults.py [--on hosts ray] [--faults none delay loss cut]

Needs root. The hosts are network namespaces with their own names and addresses, 10.77.0.1 and 10.77.0.2. This process
carries the packets between them, so it can delay them (200 ms for a round trip), drop them (5 %, both ways) or cut the
link. ``hosts``: ``jaxpar train --coordinator ... --processes 1`` on each; if one ends with a status after which a
scheduler starts a run again, both are started again. ``ray``: a Ray daemon on each host, restarted if it ends, and
``jaxpar train --ray`` on the first.

Prints the seconds of a step (median), what was reported, after how many seconds the run steps again, and whether the
final state equals bitwise that of the run without a fault.

Goals: every run ends with status 0, and in the same state. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from benchmarks.shared.observed_run import ObservedRun, Screen, prepared
from benchmarks.shared.processes import environment

RAY = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
NAMES, ADDRESSES = ("jaxpar-1", "jaxpar-2"), ("10.77.0.1", "10.77.0.2")
STEPS, EVERY = 60, 20
TOKENS = 8 * 16
AGAIN = {75, 85, 134, 137, 143, -6, -9, -15}
"""Statuses after which a scheduler starts a run again, as in configs/schedulers; a parent sees signals negative."""
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("no fault", {}),
    "delay": ("round trip of 200 ms", {"delay": 0.1}),
    "loss": ("5 % of the packets lost", {"loss": 0.05}),
    "cut": ("link cut for 30 s, step_timeout 20 s", {"cut": 30.0}),
    "patient": ("link cut for 30 s, step_timeout 90 s", {"cut": 30.0, "step_timeout": 90}),
    "short": ("link cut for 10 s, step_timeout 90 s", {"cut": 10.0, "step_timeout": 90}),
}


class Link:
    """A link between the two hosts.

    Attributes:
      up: whether packets pass.
      delay: seconds of a packet's way.
      loss: probability that a packet is lost.
    """

    def __init__(self) -> None:
        self.up, self.delay, self.loss = True, 0.0, 0.0
        ends = [_tunnel(*host) for host in zip(NAMES, ADDRESSES, strict=True)]
        for source, target in (ends, ends[::-1]):
            queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
            threading.Thread(target=self._read, args=(source, queue), daemon=True).start()
            threading.Thread(target=self._write, args=(target, queue), daemon=True).start()

    def _read(self, source: int, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        dice = random.Random(source)
        while True:
            packet = os.read(source, 65536)
            if self.up and dice.random() >= self.loss:
                queue.put((time.monotonic() + self.delay, packet))

    def _write(self, target: int, queue: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, packet = queue.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(target, packet)


def _tunnel(name: str, address: str) -> int:
    """Open a network interface in a namespace; returns the file that carries its packets."""
    opened: list[int] = []

    def enter() -> None:  # in a thread of its own, which stays in the namespace
        with Path(f"/run/netns/{name}").open() as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", b"wire", 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
        opened.append(tun)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    for words in (f"addr add {address}/24 dev wire", "link set wire up", "link set lo up"):
        subprocess.run(["ip", "-n", name, *words.split()], check=True)
    return opened[0]


@contextmanager
def two_hosts() -> Iterator[Link]:
    """The namespaces, in which the hosts' names resolve to their addresses, and the link between them."""
    made = []
    try:
        for name in NAMES:
            subprocess.run(["ip", "netns", "add", name], check=True)
            folder = Path("/etc/netns") / name
            made.append(folder)
            folder.mkdir(parents=True)
            names = [f"{address} {host}\n" for host, address in zip(NAMES, ADDRESSES, strict=True)]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        yield Link()
    finally:
        for folder in made:
            subprocess.run(["ip", "netns", "del", folder.name], check=False)
            shutil.rmtree(folder, ignore_errors=True)


def on_host(rank: int, command: list[str], screen: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command on a host, in a session of its own; its output is appended to a file."""
    enter = ["ip", "netns", "exec", NAMES[rank], "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    env = environment(PYTHONUNBUFFERED="1", JAX_PLATFORMS="cpu", **variables)
    with screen.open("a") as file:
        return subprocess.Popen(
            [*enter, NAMES[rank], *command], env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def jaxpar(config: Path, *words: str) -> list[str]:
    """The command that trains."""
    return [sys.executable, "-P", "-m", "jaxpar.app.cli", "train", str(config), *words]


class Hosts:
    """A supervisor on each host, started by hand; both are started again after a status that allows it."""

    def __init__(self, root: Path):
        self._root = root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, config: Path) -> ObservedRun:
        statuses: list[int] = []
        threading.Thread(target=self._keep, args=(config, statuses), daemon=True).start()
        screen = Screen(config.parent / "screen")
        return ObservedRun(config.parent, screen, lambda: statuses[0] if statuses else None)

    def _keep(self, config: Path, statuses: list[int]) -> None:
        place = ("--coordinator", f"{ADDRESSES[0]}:8476", "--process-count", "2", "--processes", "1")
        for attempt in range(6):
            words = (*place, *(("--set", "checkpoint.resume=auto") if attempt else ()))
            runs = [
                on_host(rank, jaxpar(config, *words, "--process-id", str(rank)), config.parent / "screen")
                for rank in range(2)
            ]
            found = [run.wait() for run in runs]
            with (config.parent / "screen").open("a") as screen:
                screen.write(f"starter: hosts ended with {found}\n")
            if all(status == 0 or status not in AGAIN for status in found):
                break
        statuses.append(max(found, key=abs))


class RayHosts:
    """A Ray daemon on each host, each started again when it ends; the driver runs on the first."""

    def __init__(self, root: Path):
        self._root, self._ended = root, False

    def __enter__(self) -> Self:
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._root / 'ray'}"]
        self._daemons = [self._daemon(0, head)]
        while "Ray runtime started" not in (self._root / "daemon-0").read_text():
            time.sleep(0.2)
        self._daemons.append(self._daemon(1, [f"--address={ADDRESSES[0]}:6379"]))
        threading.Thread(target=self._keep, daemon=True).start()
        return self

    def _daemon(self, rank: int, words: list[str]) -> subprocess.Popen[bytes]:
        own = ["--block", "--num-cpus=1", f"--node-ip-address={ADDRESSES[rank]}", "--object-store-memory=100000000"]
        ray = [sys.executable, "-P", "-c", "from ray.scripts.scripts import main; main()", "start", *words, *own]
        return on_host(rank, ray, self._root / f"daemon-{rank}", **RAY)

    def _keep(self) -> None:
        while not self._ended:
            if self._daemons[1].poll() is not None:
                self._daemons[1] = self._daemon(1, [f"--address={ADDRESSES[0]}:6379"])
            time.sleep(1)

    def __exit__(self, *error: object) -> None:
        self._ended = True
        time.sleep(1.5)
        for daemon in reversed(self._daemons):
            os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)

    def start(self, config: Path) -> ObservedRun:
        command = jaxpar(config, "--ray", "--processes", "2")
        address = f"{ADDRESSES[0]}:6379"
        run = on_host(0, command, config.parent / "screen", RAY_ADDRESS=address, **RAY)
        return ObservedRun(config.parent, Screen(config.parent / "screen"), run.poll)


def measure(engine: Any, name: str, folder: Path, link: Link, want: Any) -> Any:
    """Train with a fault, and print what happens; returns the final state, or ``None`` if the run does not end well."""
    title, options = FAULTS[name]
    link.delay, link.loss = options.get("delay", 0.0), options.get("loss", 0.0)
    timeout = options.get("step_timeout", 20)
    run = engine.start(prepared(folder, STEPS, EVERY, supervise={"step_timeout": timeout}))
    told = ""
    if "cut" in options:
        told = _cut(run, link, options["cut"])
    status = run.finish(900)
    if status != 0:
        print(f"{type(engine).__name__}: {title}: {told}status {status}\n{run.screen.last()}", flush=True)
        return None
    state = run.sums(STEPS)
    same = state == (want or state)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [record["tokens_per_second"] for record in map(json.loads, lines) if "tokens_per_second" in record]
    step = f"{TOKENS / statistics.median(rates):.2f} s per step"
    print(
        f"{type(engine).__name__}: {title}: {step}; {told}status {status}, "
        f"final state {'equals' if same else 'DIFFERS'}",
        flush=True,
    )
    return state if same else None


def _cut(run: ObservedRun, link: Link, seconds: float) -> str:
    """Cut the link in the middle of the run, and wait for the next step."""
    run.until(lambda: (run.steps() or [0])[-1] > EVERY + 5, "the first steps")
    link.up, cut = False, time.monotonic()
    threading.Timer(seconds, lambda: setattr(link, "up", True)).start()
    time.sleep(2)
    before = (run.steps() or [0])[-1]

    def moved() -> bool:
        """The run has gone beyond the step of the cut."""
        return (run.steps() or [0])[-1] > before

    again = run.until(moved, "a step after the cut") - cut
    found = run.screen.find(r"^process(es)? .* of 2 ", cut)
    report = f"reported after {found[0] - cut:.1f} s ({found[1]}); " if found else "not reported; "
    return f"{report}beyond step {before} after {again:.1f} s; "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines: dict[str, Callable[[Path], Any]] = {"hosts": Hosts, "ray": RayHosts}
    parser.add_argument("--on", nargs="+", choices=engines, default=list(engines), help="what starts the processes")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    options = parser.parse_args()
    good, want = True, None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, two_hosts() as link:
        for name in options.on:
            with engines[name](Path(folder)) as engine:
                for fault in options.faults:
                    state = measure(engine, fault, Path(folder) / f"{name}-{fault}", link, want)
                    want, good = want or state, good and state is not None
                link.delay = link.loss = 0.0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
