"""Detect the launcher that started this process, from the environment: Slurm, Open MPI, Kubernetes, Cloud TPU.

The result is passed to ``jax.distributed.initialize``, whose own detection does the rest. In a partly set environment
jax silently starts a single process; here that is an error.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.errors import LaunchError

TPU_PORT = 8482
"""Port of jax's coordinator among TPU hosts."""
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_TPU = ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_EXPLICIT_OPTIONS = (
    "or pass --coordinator HOST:PORT --process-count N --process-id I (--process-count 1 for a single process)"
)


@dataclass(frozen=True)
class Cluster:
    """A detected launcher.

    Attributes:
      name: the launcher's name.
      method: jax's name for it, or ``None`` if jax finds it only by itself.
      count, rank: number of processes and rank of this one; ``None`` if only the launcher's server knows.
      address: ``HOST:PORT`` of process 0, if known.
    """

    name: str
    method: str | None
    count: int | None = None
    rank: int | None = None
    address: str | None = None

    def __str__(self) -> str:
        rank = "jax.distributed queries rank and count" if self.rank is None else f"process {self.rank} of {self.count}"
        return f"{self.name}: {rank}" + (f", coordinator {self.address}" if self.address else "")


def detect(
    variables: Mapping[str, str],
    *,
    installed: Callable[[str], bool] = lambda module: importlib.util.find_spec(module) is not None,
    exists: Callable[[str], bool] = lambda path: Path(path).exists(),
) -> Cluster | None:
    """Returns the launcher of several processes that the environment describes, or ``None`` for a single process.

    Args:
      variables: the environment.
      installed: whether a module can be imported.
      exists: whether a file exists.

    Raises:
      LaunchError: a launcher's variables are partly set, contradict each other, or need a package that is not
        installed.

    >>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[01-04]", "SLURM_NTASKS": "4"}
    >>> print(detect({**slurm, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}))
    Slurm: process 2 of 4, coordinator node01:61447
    >>> detect({}) is None
    True
    """
    for find in (_slurm, _ompi, _tpu_hosts, _kubernetes, _tpu_machine):
        if (found := find(variables, installed, exists)) is not None:
            return found if found.count != 1 else None
    return None


type _Predicate = Callable[[str], bool]


def _slurm(variables: Mapping[str, str], installed: _Predicate, exists: _Predicate) -> Cluster | None:
    if _number(variables, "SLURM_NTASKS", 1) < 2:
        return None
    _check_complete("Slurm", "SLURM_NTASKS", variables, _SLURM, "start it with srun")
    count, rank = _count_and_rank("Slurm", variables, "SLURM_NTASKS", "SLURM_PROCID")
    return Cluster("Slurm", "slurm", count, rank, _slurm_address(variables, variables.get("JAX_COORDINATOR_PORT")))


def _slurm_address(variables: Mapping[str, str], port: str | None = None) -> str:
    # The same port as jax, which spreads jobs over the last 4,096 ports.
    port = port or str(_number(variables, "SLURM_JOB_ID", 0) % 4096 + 61440)
    return f"{first_host(variables['SLURM_STEP_NODELIST'])}:{port}"


def _ompi(variables: Mapping[str, str], installed: _Predicate, exists: _Predicate) -> Cluster | None:
    if _number(variables, "OMPI_COMM_WORLD_SIZE", 1) < 2:
        return None
    _check_complete("Open MPI", "OMPI_COMM_WORLD_SIZE", variables, _OMPI, "start it with mpirun")
    if "OMPI_MCA_orte_hnp_uri" not in variables and not installed("mpi4py"):
        raise LaunchError(
            f"Open MPI: this is process {variables['OMPI_COMM_WORLD_RANK']} of {variables['OMPI_COMM_WORLD_SIZE']}, "
            "but with Open MPI 5 jax finds process 0 through mpi4py, which is not installed. Remedy: pip install "
            f"mpi4py, {_EXPLICIT_OPTIONS}."
        )
    count, rank = _count_and_rank("Open MPI", variables, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    return Cluster("Open MPI", "ompi", count, rank)


def _tpu_hosts(variables: Mapping[str, str], installed: _Predicate, exists: _Predicate) -> Cluster | None:
    hosts = [host for host in variables.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    slices = _number(variables, "MEGASCALE_NUM_SLICES", 1)
    if len(hosts) * slices < 2:
        return None
    variable = "TPU_WORKER_HOSTNAMES" if slices == 1 else "MEGASCALE_NUM_SLICES"
    required = _TPU[:1] if slices == 1 else _TPU
    _check_complete("Cloud TPU", variable, variables, required, "start it with the TPU's own launcher")
    rank = _number(variables, "TPU_WORKER_ID", 0) + _number(variables, "MEGASCALE_SLICE_ID", 0) * len(hosts)
    host = variables.get("MEGASCALE_COORDINATOR_ADDRESS", hosts[0]).split(":")[0]
    port = variables.get("JAX_COORDINATOR_PORT") or TPU_PORT
    return Cluster("Cloud TPU", None, len(hosts) * slices, rank, f"{host}:{port}")


def _kubernetes(variables: Mapping[str, str], installed: _Predicate, exists: _Predicate) -> Cluster | None:
    # Every pod has the first variable, but only a pod of an Indexed Job has the second.
    if "KUBERNETES_SERVICE_HOST" not in variables or "JOB_COMPLETION_INDEX" not in variables:
        return None
    if not installed("kubernetes"):
        raise LaunchError(
            f"Kubernetes: this is pod {variables['JOB_COMPLETION_INDEX']} of an Indexed Job, but the package "
            "kubernetes, with which jax finds the other pods, is not installed. Remedy: pip install 'jax[k8s]', "
            f"{_EXPLICIT_OPTIONS}."
        )
    return Cluster("Kubernetes", "k8s")


def _tpu_machine(variables: Mapping[str, str], installed: _Predicate, exists: _Predicate) -> Cluster | None:
    chips = exists("/dev/accel0") or exists("/dev/vfio/0")
    allowed = variables.get("JAX_PLATFORMS", "tpu").split(",")[0] in ("", "tpu")
    usable = chips and allowed and installed("libtpu") and "TPU_SKIP_MDS_QUERY" not in variables
    return Cluster("Cloud TPU", None) if usable else None


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's node list.

    >>> first_host("node[003,007-015],other"), first_host("a,b"), first_host("rack[0-3]n[01-12]-ib,b[1-2]")
    ('node003', 'a', 'rack0n01-ib')
    """
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodes).split(",")[0]


def address_in(variables: Mapping[str, str]) -> tuple[str, str]:
    """Returns the address of the coordinator of jax.distributed, and its source; empty if none is found."""
    if "JAX_COORDINATOR_ADDRESS" in variables:
        return variables["JAX_COORDINATOR_ADDRESS"], "JAX_COORDINATOR_ADDRESS"
    if all(name in variables for name in _SLURM):
        return _slurm_address(variables), "Slurm"
    if "TPU_WORKER_HOSTNAMES" in variables:
        return f"{variables['TPU_WORKER_HOSTNAMES'].split(',')[0]}:{TPU_PORT}", "TPU_WORKER_HOSTNAMES"
    return "", ""


def _check_complete(
    name: str, variable: str, variables: Mapping[str, str], required: Sequence[str], remedy: str
) -> None:
    missing = [one for one in required if one not in variables]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise LaunchError(
            f"{name}: {variable} is {variables[variable]}, but {', '.join(missing)} {are} not set, so this process "
            f"cannot determine its rank. Remedy: {remedy}, {_EXPLICIT_OPTIONS}."
        )


def _count_and_rank(name: str, variables: Mapping[str, str], count: str, rank: str) -> tuple[int, int]:
    both = _number(variables, count, 1), _number(variables, rank, 0)
    if not 0 <= both[1] < both[0]:
        raise LaunchError(
            f"{name}: {rank} is {both[1]}, but {count} is {both[0]}. Remedy: unset the variables of an older job, "
            f"{_EXPLICIT_OPTIONS}."
        )
    return both


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    # Not int(): Slurm writes some counts as 4(x2).
    if not text.strip().isdecimal():
        raise LaunchError(f"{name} must be a number, got {text!r}. Remedy: unset it, {_EXPLICIT_OPTIONS}.")
    return int(text)
