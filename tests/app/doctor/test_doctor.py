"""Tests every check of ``jaxpar doctor`` on simulated machines, by its exact text."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar.analysis.compile import compilers
from jaxpar.app import cli
from jaxpar.app.doctor import machine
from jaxpar.app.doctor.machine import MachineCheck
from jaxpar.app.launch.cluster_detection import address_in
from jaxpar.errors import CompileError
from jaxpar.parallel.partitioner import programs

REQUIREMENTS = ["jax>=0.11", "optax>=0.2.6", "jax[tpu]>=0.11; extra == 'tpu'", "flatbuffers>=25.2; extra == 'tpu'"]
REQUIREMENTS += ["grain>=0.2.15; extra == 'train'"]
PINS = {"jax": "0.12.0", "jaxlib": "0.12.0", "optax": "0.2.8"}


def having(**versions: str) -> Callable[[str], str | None]:
    return versions.get


def test_versions_are_held_against_range_and_pin() -> None:
    found = machine.versions(REQUIREMENTS, PINS, having(jaxpar="0.1.0", jax="0.12.1", jaxlib="0.12.0", optax="0.2.5"))
    assert found == [
        MachineCheck("jaxpar", "ok", "0.1.0"),
        MachineCheck("jax", "warn", "0.12.1 (>=0.11, pinned 0.12.0)", "uv sync"),
        MachineCheck("jaxlib", "ok", "0.12.0 (pinned 0.12.0)"),
        MachineCheck("optax", "bad", "0.2.5, but jaxpar requires >=0.2.6", "pip install 'optax>=0.2.6'"),
    ]


def test_what_is_missing_is_named_with_its_remedy() -> None:
    found = machine.versions(REQUIREMENTS, {}, having(jax="0.12.0", jaxlib="0.12.0", libtpu="0.0.50"))
    assert found == [
        MachineCheck("jaxpar", "ok", "not installed"),
        MachineCheck("jax", "ok", "0.12.0 (>=0.11)"),
        MachineCheck("jaxlib", "ok", "0.12.0"),
        MachineCheck("libtpu", "ok", "0.0.50"),
        MachineCheck("optax", "bad", "not installed", "pip install 'optax>=0.2.6'"),
    ]
    assert machine.extras(REQUIREMENTS, having(grain="0.2.18", flatbuffers="25.2")) == [
        MachineCheck("extra tpu", "ok", "not installed: libtpu", "pip install 'jaxpar[tpu]'"),
        MachineCheck("extra train", "ok", "installed"),
    ]


def test_the_interpreter_is_held_against_the_project_s_range() -> None:
    assert machine.python_check((3, 12, 1), ">=3.12") == MachineCheck("python", "ok", "3.12.1 (>=3.12)")
    assert machine.python_check((3, 11, 9), ">=3.12") == MachineCheck(
        "python", "bad", "3.11.9, but jaxpar requires >=3.12", "install Python >=3.12"
    )


def test_pins_are_those_of_a_checkout_and_none_of_a_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[3] / "pyproject.toml"
    pins = machine.pins_of(root)
    assert "jax" in pins and all(version[0].isdigit() for version in pins.values())
    assert machine.pins_of(tmp_path / "pyproject.toml") == {}


def test_compilers_are_looked_at_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", lambda _: None)
    for compiler in compilers.COMPILERS.values():
        monkeypatch.delenv(compiler.variable, raising=False)
    assert machine.compilers() == []
    monkeypatch.setenv("JAXPAR_TPU_PYTHON", "/there/python")
    monkeypatch.setattr(compilers, "versions_of", lambda _: {"jax": "0.12.0", "libtpu": "0.0.50"})
    fits = "/there/python: libtpu 0.0.50 fits jax 0.12.0"
    assert machine.compilers() == [MachineCheck("compiler for TPU", "ok", fits)]

    def refuse(_: object) -> None:
        raise CompileError("/there/python has jax 1. Remedy: pip install jax==2 there.")

    monkeypatch.setattr(compilers, "versions_of", refuse)
    bad = MachineCheck("compiler for TPU", "bad", "/there/python has jax 1.", "pip install jax==2 there")
    assert machine.compilers() == [bad]


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_devices_are_asked_for_in_a_process_with_a_limit(tmp_path: Path) -> None:
    four = script(tmp_path / "four", """echo noise; echo '[["tpu", "TPU v5 lite", 4, 17179869184]]'""")
    assert machine.devices(20, four) == MachineCheck("devices", "ok", "4 × TPU v5 lite (tpu, 16.0 GiB each)")
    two = script(tmp_path / "two", """echo '[["cpu", "cpu", 2, null]]'""")
    assert machine.devices(20, two) == MachineCheck("devices", "ok", "2 × cpu (cpu)")
    hangs = script(tmp_path / "hangs", "exec sleep 20")
    assert machine.devices(0.2, hangs) == MachineCheck(
        "devices",
        "bad",
        "jax found no devices within 0.2 s",
        "find the process that holds the TPU or GPU, or set JAX_PLATFORMS=cpu",
    )
    dies = script(tmp_path / "dies", "echo first >&2; echo 'RuntimeError: no tpu' >&2; exit 1")
    assert machine.devices(20, dies) == MachineCheck(
        "devices",
        "bad",
        "jax fails to start: RuntimeError: no tpu",
        "set JAX_PLATFORMS to a platform of this machine, such as cpu",
    )


def test_variables_that_change_a_run_are_named() -> None:
    variables = {"JAX_DEBUG_NANS": "1", "JAX_DISABLE_JIT": "0", "HOME": "/", "XLA_FLAGS": "--xla_foo"}
    assert machine.environment(variables) == [
        MachineCheck(
            "environment", "warn", "JAX_DEBUG_NANS=1 makes every step slow", "unset JAX_DEBUG_NANS for real runs"
        ),
        MachineCheck("environment", "ok", "JAX_DISABLE_JIT=0"),
        MachineCheck(
            "environment",
            "warn",
            "XLA_FLAGS=--xla_foo affects programs on this machine, but not programs compiled ahead of time",
            "set it under 'compiler:' in the run's file",
        ),
    ]
    simulated = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    text = "XLA_FLAGS=--xla_force_host_platform_device_count=8: CPU devices are simulated"
    assert machine.environment(simulated) == [MachineCheck("environment", "warn", text, "unset XLA_FLAGS")]


def test_the_cache_is_counted_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "compiled"
    assert machine.cache(tmp_path) == MachineCheck("cache", "ok", f"{kept}: 0 programs, 0.0 MiB")
    assert not kept.exists()
    (kept / "a").mkdir(parents=True)
    (kept / "a" / "result.json").write_bytes(b" " * 2**20)
    assert machine.cache(tmp_path) == MachineCheck("cache", "ok", f"{kept}: 1 programs, 1.0 MiB")
    monkeypatch.setattr("os.access", lambda *_: False)
    finding = f"{kept}: 1 programs, 1.0 MiB; {kept} is not writable"
    assert machine.cache(tmp_path) == MachineCheck("cache", "bad", finding, "set JAXPAR_CACHE to a writable folder")


SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[003-007],other",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
REMEDY = "set JAX_COORDINATOR_BIND_ADDRESS (or coordinator_bind_address=) to {}, and keep the port behind a firewall"


@pytest.mark.parametrize(
    ("variables", "check"),
    [
        (
            {},
            MachineCheck(
                "coordinator",
                "ok",
                "no launcher configures a coordinator; jax.distributed.initialize() would listen on every interface",
                "pass coordinator_bind_address= when you call it",
            ),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"},
            MachineCheck(
                "coordinator",
                "warn",
                "JAX_COORDINATOR_ADDRESS sets 10.0.0.1:1234; it would listen on [::]:1234, every interface, without "
                "authentication",
                REMEDY.format("10.0.0.1:1234"),
            ),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "localhost:1234"},
            MachineCheck(
                "coordinator",
                "bad",
                "JAX_COORDINATOR_ADDRESS sets localhost:1234; but it would listen on [::]:1234, every interface, "
                "without authentication",
                REMEDY.format("localhost:1234"),
            ),
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "localhost:1234", BIND: "127.0.0.1:1234"},
            MachineCheck(
                "coordinator", "ok", "JAX_COORDINATOR_ADDRESS sets localhost:1234; listens on 127.0.0.1:1234 only"
            ),
        ),
        (
            SLURM,
            MachineCheck(
                "coordinator",
                "warn",
                "Slurm sets node003:61441; it would listen on [::]:61441, every interface, without authentication",
                REMEDY.format("node003:61441"),
            ),
        ),
        (
            {"TPU_WORKER_HOSTNAMES": "t0,t1", BIND: "0.0.0.0:8482"},
            MachineCheck(
                "coordinator",
                "warn",
                "TPU_WORKER_HOSTNAMES sets t0:8482; it would listen on 0.0.0.0:8482, every interface, without "
                "authentication",
                REMEDY.format("t0:8482"),
            ),
        ),
    ],
    ids=("alone", "address", "localhost", "bound", "slurm", "tpu"),
)
def test_an_exposed_coordinator_is_said(variables: dict[str, str], check: MachineCheck) -> None:
    assert machine.coordinator(variables) == check


def test_a_slurm_list_of_single_nodes() -> None:
    assert address_in(SLURM | {"SLURM_STEP_NODELIST": "a1,a2"})[0] == "a1:61441"


def test_the_port_is_tried() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        held = machine.port({"JAX_COORDINATOR_ADDRESS": f"host:{port}"})
    assert (held.status, held.remedy) == ("bad", "end the process that uses it, or use another port")
    assert held.finding == f"the coordinator's port {port} is not available: Address already in use"
    free = machine.port({"JAX_COORDINATOR_ADDRESS": f"host:{port}"})
    assert free == MachineCheck("port", "ok", f"the coordinator's port {port} is free")
    finding = "the coordinator's address 'host' has no valid port"
    assert machine.port({"JAX_COORDINATOR_ADDRESS": "host"}) == MachineCheck("port", "bad", finding, "write HOST:PORT")


CHECKS = [MachineCheck("python", "ok", "3.12.1"), MachineCheck("jax", "bad", "not installed", "pip install jax")]


def test_what_the_installed_xla_computes_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {number: "right" for number in range(len(programs.PROGRAMS))} | {0: "wrong", 1: "wrong", 8: "fails"}
    monkeypatch.setattr(programs, "present", lambda timeout: results)
    assert machine.partitioner(60) == MachineCheck(
        "XLA partitioner",
        "ok",
        "wrong: convolution of slices; fails: Fourier transform of several dims; 8 of 11 known faults are mended; "
        "jaxpar's steps avoid them all",
        "in programs of your own, compare with one device: jp.testing.assert_matches_single_device",
    )

    def slow(timeout: float) -> dict[int, str]:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(programs, "present", slow)
    finding = "not examined: its programs took more than 60 s"
    assert machine.partitioner(60) == MachineCheck("XLA partitioner", "warn", finding, "--timeout 600")


def test_the_report_is_a_line_a_check_with_the_remedy_below() -> None:
    assert machine.report(CHECKS, as_json=False) == (
        "ok    python  3.12.1\n"
        "bad   jax     not installed\n"
        "              Remedy: pip install jax.\n"
        "2 checks: jax is bad\n"
    )
    assert machine.report(CHECKS[:1], as_json=False).endswith("1 checks: all ok\n")


@pytest.mark.parametrize(("checks", "status"), [(CHECKS, 1), (CHECKS[:1], 0)])
def test_the_command_prints_json_and_exits_by_the_worst(
    checks: list[MachineCheck], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "examine", lambda *, timeout: checks)
    assert cli.main(["doctor", "--json"]) == status
    data = json.loads(capsys.readouterr().out)
    assert data["worst"] == checks[-1].status and len(data["checks"]) == len(checks)


def test_this_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "devices", lambda _: MachineCheck("devices", "ok", "none asked"))
    names = [check.name for check in machine.examine(timeout=1)]
    assert {"python", "jaxpar", "jax", "jaxlib", "extra tpu", "devices", "cache", "coordinator", "port"} <= set(names)
    assert sys.version_info >= (3, 12)
