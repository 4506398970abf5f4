"""Tests ``configs/schedulers``: after which exit codes Slurm and Kubernetes start a run again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from jaxpar.app.cli import Train
from jaxpar.app.launch.cluster_detection import Cluster, detect
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.app.launch.join import ProcessPlace, place_of

SCHEDULERS = Path(__file__).parents[3] / "configs" / "schedulers"
SCRIPT = SCHEDULERS / "slurm.sbatch"
KILLED = {134, 137, 143}
"""Statuses of a process that SIGABRT, SIGKILL or SIGTERM ended."""
AGAIN = {int(ExitCode.RETRYABLE), int(ExitCode.STOPPED), int(ExitCode.NOT_SAVED), *KILLED}
FOR_GOOD = {int(ExitCode.FAILED), int(ExitCode.CONFIGURATION), int(ExitCode.GAVE_UP)}
PROGRAMS = {
    # As Slurm's: the tasks run at the same time, and the largest of their statuses is that of srun.
    "srun": """
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank "$@" & pids[rank]=$!; done
largest=0
for pid in "${pids[@]}"; do
  until wait "$pid"; status=$?; ! kill -0 "$pid" 2>/dev/null; do :; done
  (( status > largest )) && largest=$status
done
exit $largest
""",
    "jaxpar": """
echo "jaxpar $*" >> calls
statuses=($STATUSES)
[ "$CANCEL" = yes ] && kill -TERM "$BATCH"
exit "${statuses[$SLURM_PROCID]}"
""",
    "scontrol": 'echo "scontrol $*" >> calls',
}

type Slurm = Callable[..., tuple[int, bool, str]]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """``slurm(first, second, **variables)`` runs the batch script, whose two tasks end with these statuses.

    Returns the script's status, whether the job was requeued, and the script's last line.
    """
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)

    def run(first: int, second: int = 0, **variables: str) -> tuple[int, bool, str]:
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        words = ["bash", "-c", 'export BATCH=$$; exec bash "$@"', "sh", str(SCRIPT), "run.yaml", "--set", "a=b c"]
        (tmp_path / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            words,
            env={**env, "STATUSES": f"{first} {second}", **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        one, two, *others = (tmp_path / "calls").read_text().splitlines()
        assert one == two == "jaxpar train run.yaml --set a=b c --set checkpoint.resume=auto"
        assert others in ([], ["scontrol requeue 7"])
        failed = {f"process {rank} on {os.uname().nodename}: status {n}" for rank, n in enumerate((first, second)) if n}
        assert set(done.stderr.splitlines()) == failed
        return done.returncode, bool(others), done.stdout.splitlines()[-1]

    return run


@pytest.mark.parametrize("status", sorted({0, 3, 139, *map(int, ExitCode), *KILLED}))
def test_slurm_requeues_after_these_statuses_only(slurm: Slurm, status: int) -> None:
    again = "requeued" if status in AGAIN else "not requeued"
    assert slurm(status) == (status, status in AGAIN, f"job 7: status {status}, {again}")


@pytest.mark.parametrize("status", sorted(FOR_GOOD))
def test_slurm_obeys_the_task_that_fails_for_good(slurm: Slurm, status: int) -> None:
    """Another task, which loses its peer, ends with a larger status."""
    for other in sorted(AGAIN):
        assert slurm(other, status) == (status, False, f"job 7: status {status}, not requeued")


def test_slurm_requeues_once_after_storage_that_does_not_save(slurm: Slurm) -> None:
    assert slurm(74)[1] and not slurm(74)[1]
    assert slurm(74)[1] and slurm(75)[1] and slurm(74)[1]  # not twice in a row


def test_slurm_does_not_requeue_a_cancelled_job_nor_without_end(slurm: Slurm) -> None:
    cancelled = "job 7: status 85, not requeued, because it was cancelled"
    assert slurm(85, CANCEL="yes") == (85, False, cancelled)
    assert slurm(75, SLURM_RESTART_COUNT="19")[1]
    assert slurm(75, SLURM_RESTART_COUNT="20") == (75, False, "job 7: status 75, not requeued again after 20 times")
    assert slurm(75, SLURM_RESTART_COUNT="20", JAXPAR_MOST_REQUEUES="21")[1]


def test_slurm_is_told_to_requeue_and_to_warn() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["requeue"] == "" and options["open-mode"] == "append"
    # Without "B:", so that only the tasks receive it: the shell takes a SIGTERM for scancel's.
    assert re.fullmatch(r"TERM@\d+", options["signal"])
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True)


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    found = yaml.safe_load((SCHEDULERS / "jobset.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec: dict[str, Any] = found["spec"]
    return spec


def action(spec: dict[str, Any], status: int | None) -> str:
    """What the JobSet does after a pod has ended with a status, or was evicted (``None``).

    As the controllers of Kubernetes decide: the first rule of the Job that matches gives its failure a reason and a
    message, and of the rules of the JobSet the first one that these match decides.
    """
    job = spec["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in reversed(list(enumerate(job["podFailurePolicy"]["rules"]))):
        assert rule["action"] == "FailJob"
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In" and 0 not in codes["values"]
        conditions = [condition["type"] for condition in rule.get("onPodConditions", [])]
        if status in codes["values"]:
            what = f"Container jaxpar for pod default/jaxpar-train-0-1-x failed with exit code {status}"
        elif status is None and "DisruptionTarget" in conditions:
            what = "Pod default/jaxpar-train-0-1-x has condition DisruptionTarget"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{what} matching FailJob rule at index {index}"
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule.get("onJobFailureReasons", [reason]) and any(re.search(p, message) for p in patterns):
            return str(rule["action"])
    raise AssertionError(message)


def test_kubernetes_starts_again_after_these_statuses_only(jobset: dict[str, Any]) -> None:
    assert {status: action(jobset, status) for status in FOR_GOOD} == dict.fromkeys(FOR_GOOD, "FailJobSet")
    counted = AGAIN - {ExitCode.STOPPED}
    assert {status: action(jobset, status) for status in counted} == dict.fromkeys(counted, "RestartJobSet")
    stopped = {status: action(jobset, status) for status in (int(ExitCode.STOPPED), None)}
    assert stopped == dict.fromkeys(stopped, "RestartJobSetAndIgnoreMaxRestarts")


def test_a_pod_of_the_manifest_finds_its_place(jobset: dict[str, Any]) -> None:
    (replicated,) = jobset["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}  # as in such a pod
    assert detect(variables, installed=lambda module: True) == Cluster("Kubernetes", "k8s")
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in (*container["command"][2:], *container["args"])]
    assert container["command"][:2] == ["jaxpar", "train"]
    options = tyro.cli(Train, args=words)
    place = place_of(options.coordinator, options.process_count, options.process_id, variables)
    # The host's name is that of the JobSet, its job, two indices, and the service.
    host = f"jaxpar-{replicated['name']}-0-0.jaxpar"
    assert place == ProcessPlace(job["parallelism"], 3, f"{host}:8476") and job["completions"] == job["parallelism"]
    assert options.set == ("checkpoint.resume=auto",)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]} and str(options.config).startswith("/config/")
