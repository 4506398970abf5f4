"""Tests launcher detection from environment variables, ranks by hand, device assignment, and elastic refits."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from error_texts import raises

from jaxpar.app.launch import device_assignment
from jaxpar.app.launch.cluster_detection import Cluster, detect
from jaxpar.app.launch.exit_codes import ExitCode, exit_code
from jaxpar.app.launch.join import ProcessPlace, bind_of, place_of, wait_for_name
from jaxpar.errors import LaunchError
from jaxpar.parallel.zero.stages import Zero

SLURM = {
    "SLURM_JOB_ID": "4096",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],x",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2", "TPU_WORKER_ID": "1"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0:81"}
POD = {"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "5"}


def look(variables: Mapping[str, str], *installed: str, files: tuple[str, ...] = ()) -> Cluster | None:
    return detect(variables, installed=lambda name: name in installed, exists=lambda path: path in files)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (SLURM, "Slurm: process 3 of 8, coordinator gpu007:61440"),
        (SLURM | {"JAX_COORDINATOR_PORT": "99", "SLURM_STEP_NODELIST": "n"}, "Slurm: process 3 of 8, coordinator n:99"),
        (OMPI | {"OMPI_MCA_orte_hnp_uri": "0;tcp://1"}, "Open MPI: process 2 of 4"),
        (TPU, "Cloud TPU: process 1 of 3, coordinator t0:8482"),
        (TPU | SLICES, "Cloud TPU: process 4 of 6, coordinator s0:8482"),
    ],
)
def test_a_launcher_is_found_by_its_variables(variables: dict[str, str], text: str) -> None:
    assert str(look(variables)) == text


def test_a_launcher_that_asks_a_server_is_found() -> None:
    assert str(look(POD, "kubernetes")) == "Kubernetes: jax.distributed queries rank and count"
    assert str(look(OMPI, "mpi4py")) == "Open MPI: process 2 of 4"
    chips = ("/dev/accel0",)
    assert look({}, "libtpu", files=chips) == Cluster("Cloud TPU", None)
    for variables in ({"TPU_SKIP_MDS_QUERY": "1"}, {"JAX_PLATFORMS": "cpu"}):
        assert look(variables, "libtpu", files=chips) is None
    assert look({}, "libtpu") is None and look({}, files=chips) is None


def test_alone_is_alone() -> None:
    one = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}  # an interactive shell of one task
    pod = {"KUBERNETES_SERVICE_HOST": "k"}  # any pod
    for variables in ({}, one, pod, {"OMPI_COMM_WORLD_SIZE": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}):
        assert look(variables) is None
    assert place_of(None, 1, None, SLURM) is None
    assert place_of("h:1", 2, 0, SLURM) == ProcessPlace(2, 0, "h:1")
    assert str(place_of(None, None, None, SLURM))[:5] == "Slurm"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "Slurm: SLURM_NTASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (OMPI, "0"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID"),
        (TPU | {"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID"),
        (POD, "Kubernetes: this"),
        (SLURM | {"SLURM_PROCID": "8"}, "Slurm: SLURM_PROCID"),
        ({"SLURM_NTASKS": "four"}, "four"),
    ],
)
def test_what_is_half_set_is_said(variables: dict[str, str], name: str) -> None:
    with raises(LaunchError, name):
        look(variables)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("h:1", None, None), "h:1"),
        ((None, 4, 1), "--process-count 4"),
        (("h:1", 0, 0), "least 1"),
        (("h:1", 2, 2), "2"),
        (("h", 2, 1), "HOST"),
    ],
)  # fmt: skip
def test_a_place_by_hand_is_whole(given: tuple[Any, Any, Any], name: str) -> None:
    with raises(LaunchError, name):
        place_of(*given)


def test_a_coordinator_listens_no_wider_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_ADDRESS", *SLURM, "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    assert bind_of(Cluster("x", None, 2, 0, "192.0.2.7:12")) == "192.0.2.7:12"
    monkeypatch.setattr("socket.getaddrinfo", lambda host, port, type: [(2, 1, 6, "", ("127.0.1.1", port))])
    # The hosts file of this host maps its name to a loopback address.
    assert bind_of(Cluster("x", None, 2, 0, "node7:12")) is None
    assert bind_of(Cluster("x", None, 2, 0, "localhost:12")) == "127.0.1.1:12"
    assert bind_of(Cluster("x", None)) is None
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:5")
    assert bind_of(Cluster("x", None, 2, 0, "192.0.2.7:12")) == "127.0.0.1:5"


def test_the_name_of_process_0_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [socket.gaierror(-2, "Name or service not known")] * 2

    def look_up(host: str, port: int, type: int) -> None:
        assert (host, port) == ("pod-0.run", 12)
        if answers:
            raise answers.pop()

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    wait_for_name("pod-0.run:12", pause=0)
    assert answers == []
    answers += [socket.gaierror(-2, "Name or service not known")]
    with raises(LaunchError, "pod-0.run") as found:
        wait_for_name("pod-0.run:12", patience=0)
    assert exit_code(found.value) == ExitCode.RETRYABLE


@pytest.mark.parametrize(
    ("devices", "count", "name"),
    [
        (2, 3, "GPUs"),
        (8, 3, "8"),
    ],
)  # fmt: skip
def test_devices_are_shared_out_evenly(devices: int, count: int, name: str) -> None:
    with raises(LaunchError, name):
        device_assignment.share(devices, count, "GPUs")


def test_the_devices_of_this_host(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "accel0"):
        (tmp_path / name).touch()
    assert device_assignment.gpus({}, tmp_path) == ["0", "2", "10"]
    assert device_assignment.gpus({"JAX_PLATFORMS": "cpu"}, tmp_path) == []
    assert device_assignment.gpus({"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "GPU-a,3"}, tmp_path) == [
        "GPU-a",
        "3",
    ]
    assert device_assignment.gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert device_assignment.has_tpu({}, tmp_path) and not device_assignment.has_tpu({"JAX_PLATFORMS": "cpu"}, tmp_path)
    assert device_assignment.simulated(4, {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=8"}) == 8
    assert device_assignment.simulated(4, {}) == 4


@pytest.mark.parametrize(
    ("count", "each", "mesh", "rules", "zero", "why"),
    [
        (3, 2, {"data": -1, "model": 2}, {"batch": "data"}, Zero(0), None),
        (3, 2, {"data": 2, "model": 2}, {}, Zero(0), (
            "6 devices do not match the 4 of data=2, model=2, and no axis is -1")),
        (3, 2, {"data": -1, "model": 4}, {}, Zero(0), "6 devices are not a multiple of model=4"),
        (5, 2, {"data": -1}, {"batch": "data"}, Zero(0), "a batch of 24 rows cannot be divided by 5 processes"),
        (4, 4, {"data": -1}, {"batch": "data"}, Zero(0),
         "a batch of 24 rows cannot be divided by the 16 devices of its axes"),
        (4, 4, {"data": -1}, {"batch": [["data"], None]}, Zero(0), None),
        (2, 6, {"data": -1, "model": 4}, {}, Zero(0),
         "the 4 devices from model inwards would span several processes of 6 devices"),
        (3, 2, {"data": -1}, {}, Zero(1, fsdp_group_size=4),
         "optimizer: fsdp_group_size=4 does not divide the axis data of size 6 (on 6 devices)"),
    ],
)  # fmt: skip
def test_whether_a_run_fits(
    count: int, each: int, mesh: dict[str, int], rules: dict[str, Any], zero: Zero, why: str | None
) -> None:
    rules = {name: {"first_of": rule} if rule == [["data"], None] else rule for name, rule in rules.items()}
    assert device_assignment.misfit(count, each, 24, mesh, rules, zero.mesh) == why


def test_the_largest_number_that_fits_is_taken() -> None:
    assert device_assignment.refit(3, 2, lambda count: None) == (3, "")
    assert device_assignment.refit(3, 2, lambda count: "of this" if count > 1 else None) == (
        1,
        "3 processes x 2 devices = 6 devices do not fit: of this. 1 process would fit",
    )
    assert device_assignment.refit(2, 2, lambda count: "of this") == (
        0,
        "2 processes x 2 devices = 4 devices do not fit: of this. No smaller number would fit",
    )
    assert device_assignment.refit(0, 2, lambda count: None) == (0, "no process remains")
