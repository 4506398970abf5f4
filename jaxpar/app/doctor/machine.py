"""``jaxpar doctor``: check whether this machine can run jaxpar; each check gives a finding and a remedy.

Nothing is written, and nothing blocks on a TPU that is missing: a subprocess with a time limit looks for devices.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from packaging.specifiers import SpecifierSet

from jaxpar.app.launch.cluster_detection import TPU_PORT, address_in
from jaxpar.app.launch.process_group import BIND
from jaxpar.errors import JaxparError

Status = Literal["ok", "warn", "bad"]
_SLOW = ("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_CHECK_TRACER_LEAKS")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_EXACT = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""Packages that must match each other exactly, so a version other than the pinned one is a warning."""
_DEVICES = """
import collections, json, jax
kinds = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
stats = jax.local_devices()[0].memory_stats() or {}
print(json.dumps([[*kind, n, stats.get("bytes_limit")] for kind, n in kinds.items()]))
"""


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check.

    Attributes:
      name: the subject.
      status: ``bad`` prevents a run, ``warn`` may.
      finding: the result, as text.
      remedy: the suggested action, if any.
    """

    name: str
    status: Status
    finding: str
    remedy: str = ""


def examine(*, timeout: float = 60.0) -> list[MachineCheck]:
    """Returns all checks of this machine, in print order; ``timeout`` in seconds bounds the search for devices."""
    requirements = importlib.metadata.requires("jaxpar") or []
    pins = pins_of(Path(__file__).parents[3] / "pyproject.toml")
    return [
        python_check(sys.version_info[:3], importlib.metadata.metadata("jaxpar").get("Requires-Python") or ""),
        *versions(requirements, pins, installed),
        *extras(requirements, installed),
        *compilers(),
        devices(timeout),
        partitioner(timeout),
        *environment(os.environ),
        cache(Path(os.environ.get("JAXPAR_CACHE", Path.home() / ".cache" / "jaxpar"))),
        coordinator(os.environ),
        port(os.environ),
    ]


def installed(package: str) -> str | None:
    """Returns the installed version of a package, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins_of(file: Path) -> dict[str, str]:
    """Returns the pinned versions of a checkout's ``pyproject.toml``; empty for an installed wheel, which has none."""
    if not file.is_file():
        return {}
    project = tomllib.loads(file.read_text(encoding="utf-8"))
    lines = project.get("tool", {}).get("uv", {}).get("constraint-dependencies", [])
    return {name: version for name, _, version in (line.partition(";")[0].strip().partition("==") for line in lines)}


def python_check(version: Sequence[int], required: str) -> MachineCheck:
    """Check the interpreter against the range that the project requires."""
    text = ".".join(map(str, version))
    if SpecifierSet(required).contains(text, prereleases=True):
        return MachineCheck("python", "ok", f"{text} ({required})")
    return MachineCheck("python", "bad", f"{text}, but jaxpar requires {required}", f"install Python {required}")


def versions(
    requirements: Iterable[str], pins: Mapping[str, str], version_of: Callable[[str], str | None]
) -> list[MachineCheck]:
    """Check each required package, and the installed compilers, against range and pin."""
    always = {name: spec for name, spec, extra in map(_parse, requirements) if not extra}
    names = sorted({*always, "jaxlib"} | {p for p in _EXACT if version_of(p)})
    found = [_version(name, version_of(name), always.get(name, ""), pins.get(name, "")) for name in names]
    return [MachineCheck("jaxpar", "ok", version_of("jaxpar") or "not installed"), *found]


def _version(name: str, version: str | None, required: str, pin: str) -> MachineCheck:
    if version is None:
        return MachineCheck(name, "bad", "not installed", f"pip install '{name}{required}'")
    if not SpecifierSet(required).contains(version, prereleases=True):
        wrong = f"{version}, but jaxpar requires {required}"
        return MachineCheck(name, "bad", wrong, f"pip install '{name}{required}'")
    details = ", ".join(text for text in (required, f"pinned {pin}" if pin else "") if text)
    finding = f"{version} ({details})" if details else version
    if pin and pin != version and name in _EXACT:
        return MachineCheck(name, "warn", finding, "uv sync")
    return MachineCheck(name, "ok", finding)


def extras(requirements: Iterable[str], version_of: Callable[[str], str | None]) -> list[MachineCheck]:
    """List each extra and its missing packages; a missing extra is not a fault."""
    packages_of: dict[str, list[str]] = {}
    plugins = {"jax[tpu]": "libtpu", "jax[cuda13]": "jax-cuda13-plugin"}
    for line in requirements:
        name, _, extra = _parse(line)
        if extra:
            packages_of.setdefault(extra, []).append(plugins.get(re.split(r"[<>=!~ ;]", line)[0], name))
    found = []
    for extra, packages in sorted(packages_of.items()):
        missing = [package for package in packages if version_of(package) is None]
        finding = f"not installed: {', '.join(missing)}" if missing else "installed"
        found.append(MachineCheck(f"extra {extra}", "ok", finding, f"pip install 'jaxpar[{extra}]'" if missing else ""))
    return found


def compilers() -> list[MachineCheck]:
    """Check that the TPU and GPU compilers, installed or set by a variable, match this jax."""
    from jaxpar.analysis.compile.compilers import COMPILERS, versions_of

    found = []
    for compiler in COMPILERS.values():
        if installed(compiler.plugin) is None and compiler.variable not in os.environ:
            continue
        name = f"compiler for {compiler.device.split()[-1]}"
        try:
            version = versions_of(compiler)
        except JaxparError as error:
            finding, _, remedy = str(error).partition(" Remedy: ")
            found.append(MachineCheck(name, "bad", finding, remedy.rstrip(".")))
        else:
            at = f"{compiler.python}: {compiler.plugin} {version[compiler.plugin]} fits jax {version['jax']}"
            found.append(MachineCheck(name, "ok", at))
    return found


def devices(timeout: float, python: str = sys.executable) -> MachineCheck:
    """List the devices that jax finds in a subprocess with a time limit; without it, a TPU in use would block."""
    try:
        run = subprocess.run(
            [python, "-P", "-c", _DEVICES], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        remedy = "find the process that holds the TPU or GPU, or set JAX_PLATFORMS=cpu"
        return MachineCheck("devices", "bad", f"jax found no devices within {timeout:g} s", remedy)
    lines = run.stdout.splitlines()
    if run.returncode or not lines:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = "set JAX_PLATFORMS to a platform of this machine, such as cpu"
        return MachineCheck("devices", "bad", f"jax fails to start: {last}", remedy)
    texts = []
    for platform, kind, count, limit in json.loads(lines[-1]):
        memory = "" if limit is None else f", {limit / 2**30:.1f} GiB each"
        texts.append(f"{count} × {kind} ({platform}{memory})")
    return MachineCheck("devices", "ok", ", ".join(texts))


def partitioner(timeout: float) -> MachineCheck:
    """Say what the installed XLA computes wrongly of what jaxpar's steps avoid, on simulated devices."""
    from jaxpar.parallel.partitioner.programs import PROGRAMS, present

    name, remedy = (
        "XLA partitioner",
        "in programs of your own, compare with one device: jp.testing.assert_matches_single_device",
    )
    try:
        results = present(timeout)
    except subprocess.TimeoutExpired:
        return MachineCheck(name, "warn", f"not examined: its programs took more than {timeout:g} s", "--timeout 600")
    faults: dict[str, list[str]] = {}
    for number, result in sorted(results.items()):
        faults.setdefault(result, []).append(PROGRAMS[number].fault.name)
    texts = [f"{result}: {', '.join(dict.fromkeys(names))}" for result, names in faults.items() if result != "right"]
    right = f"{len(faults.get('right', ()))} of {len(PROGRAMS)} known faults are mended"
    return MachineCheck(name, "ok", "; ".join([*texts, right, "jaxpar's steps avoid them all"]), remedy)


def environment(variables: Mapping[str, str]) -> list[MachineCheck]:
    """List the variables that change the behavior of jax."""
    found = []
    for name in sorted(variables):
        value = f"{name}={variables[name]}"
        if name in _SLOW and variables[name].lower() not in ("", "0", "false"):
            finding, remedy = f"{value} makes every step slow", f"unset {name} for real runs"
        elif name in _FLAGS and "host_platform_device_count" in variables[name]:
            finding, remedy = f"{value}: CPU devices are simulated", f"unset {name}"
        elif name in _FLAGS:
            finding = f"{value} affects programs on this machine, but not programs compiled ahead of time"
            remedy = "set it under 'compiler:' in the run's file"
        elif name.startswith(("JAX_", "JAXPAR_")):
            finding, remedy = value, ""
        else:
            continue
        found.append(MachineCheck("environment", "warn" if remedy else "ok", finding, remedy))
    return found


def cache(folder: Path) -> MachineCheck:
    """Check the cache of programs compiled ahead of time: number, size, and whether it is writable."""
    kept = folder / "compiled"
    programs = list(kept.glob("*/result.json"))
    size = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
    nearest = next(path for path in (kept, *kept.parents) if path.exists())
    finding = f"{kept}: {len(programs)} programs, {size / 2**20:.1f} MiB"
    if not os.access(nearest, os.W_OK) or not nearest.is_dir():
        finding += f"; {nearest} is not writable"
        return MachineCheck("cache", "bad", finding, "set JAXPAR_CACHE to a writable folder")
    return MachineCheck("cache", "ok", finding)


def coordinator(variables: Mapping[str, str]) -> MachineCheck:
    """Check whether jax's coordinator, which has no authentication, would listen on more interfaces than it must."""
    address, source = address_in(variables)
    bind = variables.get(BIND, "")
    # By default jax.distributed.initialize listens on every interface, on the coordinator's port.
    listens = bind or f"[::]:{address.rpartition(':')[2]}"
    target = address or "the cluster network address"
    remedy = f"set {BIND} (or coordinator_bind_address=) to {target}, and keep the port behind a firewall"
    if not address and not bind:
        finding = "no launcher configures a coordinator; jax.distributed.initialize() would listen on every interface"
        return MachineCheck("coordinator", "ok", finding, "pass coordinator_bind_address= when you call it")
    prefix = f"{source} sets {address}; " if address else ""
    if _host(listens) not in ("", "::", "0.0.0.0", "0", "*"):
        return MachineCheck("coordinator", "ok", f"{prefix}listens on {listens} only")
    finding = f"it would listen on {listens}, every interface, without authentication"
    if _host(address) in ("localhost", "::1") or _host(address).startswith("127."):
        return MachineCheck("coordinator", "bad", f"{prefix}but {finding}", remedy)
    return MachineCheck("coordinator", "warn", f"{prefix}{finding}", remedy)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def port(variables: Mapping[str, str]) -> MachineCheck:
    """Check that the coordinator's port is free on this machine."""
    address = variables.get(BIND) or address_in(variables)[0]
    text = address.rpartition(":")[2] or str(TPU_PORT)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        finding = f"the coordinator's address {address!r} has no valid port"
        return MachineCheck("port", "bad", finding, "write HOST:PORT")
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", int(text)))
        except OSError as error:
            finding = f"the coordinator's port {text} is not available: {error.strerror}"
            return MachineCheck("port", "bad", finding, "end the process that uses it, or use another port")
    return MachineCheck("port", "ok", f"the coordinator's port {text} is free")


def _parse(requirement: str) -> tuple[str, str, str]:
    """Name, version range and extra of a requirement in package metadata."""
    found = re.match(
        r"([\w.-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?", requirement
    )
    return (found[1].lower(), found[2].strip(), found[3] or "") if found else (requirement, "", "")


def worst(checks: Iterable[MachineCheck]) -> Status:
    """Returns the worst status of all checks."""
    return max((check.status for check in checks), key=get_args(Status).index, default="ok")


def summary(checks: Sequence[MachineCheck]) -> str:
    """Returns one line about all checks.

    >>> summary([MachineCheck("python", "ok", "3.12"), MachineCheck("jax", "bad", "not installed")])
    '2 checks: jax is bad'
    """
    troubled = [f"{check.name} is {check.status}" for check in checks if check.status != "ok"]
    return f"{len(checks)} checks: {', '.join(troubled) or 'all ok'}"


def report(checks: Sequence[MachineCheck], *, as_json: bool) -> str:
    """Returns all checks as text, each with its remedy below, or as JSON."""
    if as_json:
        return json.dumps({"worst": worst(checks), "checks": [asdict(check) for check in checks]}, indent=1) + "\n"
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:4}  {check.name:{width}}  {check.finding}")
        if check.remedy:
            label = "To change it" if check.status == "ok" else "Remedy"
            lines.append(f"{'':4}  {'':{width}}  {label}: {check.remedy}.")
    return "\n".join([*lines, summary(checks)]) + "\n"
