"""The launch recipes of ``configs/schedulers``: their syntax, and what they agree on with the program."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from jaxpar.app.cli import Train
from jaxpar.app.config import load_run
from jaxpar.app.launch.exit_codes import ExitCode
from jaxpar.sharding.hardware.topology import Topology

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "schedulers"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])
FOR_GOOD = [int(ExitCode.FAILED), int(ExitCode.CONFIGURATION), int(ExitCode.GAVE_UP)]


def document(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["gpu_host.sh", "ray.sh", "tpu_vm.sh"])
def test_a_script_without_arguments_says_how_to_call_it(name: str) -> None:
    done = subprocess.run(["bash", str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and f"usage: {name} " in done.stderr


def test_every_recipe_is_on_the_page() -> None:
    page = (ROOT / "docs" / "guides" / "launch.md").read_text(encoding="utf-8")
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {name for name in files if f"(../../configs/schedulers/{name})" in page}


def test_every_command_of_a_recipe_is_one_of_the_program(tmp_path: Path) -> None:
    """Its options parse, and its settings are keys of a configuration."""
    found = 0
    for file in sorted(FOLDER.iterdir()):
        for words in commands(file):
            found += 1
            chosen = tyro.cli(Train, args=["quickstart", *words])
            load_run("quickstart", chosen.set)
    assert found == 7


def commands(file: Path) -> list[list[str]]:
    """The options of each ``jaxpar train`` in a recipe, without those that its user adds."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".yaml":
        words: list[list[str]] = []
        _collect(yaml.safe_load(text), words)
        return words
    text = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    lines = re.findall(r"jaxpar train (.*)", text)
    plain = (re.sub(r"""\$words"|&$|'?\$\(.*?\)'?|"\$(config|@)\"""", "", line).split() for line in lines)
    return [["1" if word.startswith('"$') else word for word in words] for words in plain]


def _collect(node: Any, words: list[list[str]]) -> None:
    """Appends the options of each command below a node of a manifest."""
    if isinstance(node, list):
        for item in node:
            _collect(item, words)
    elif isinstance(node, dict):
        if node.get("command", [])[:2] == ["jaxpar", "train"]:
            words.append([word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in node["args"]])
        if str(node.get("entrypoint", "")).startswith("jaxpar train"):
            words.append(node["entrypoint"].split()[3:])
        for item in node.values():
            _collect(item, words)


def test_a_tpu_slice_has_the_hosts_of_its_topology() -> None:
    job = document("gke_tpu.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    topology = Topology.parse(f"v5e:{pod['nodeSelector']['cloud.google.com/gke-tpu-topology']}")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == topology.devices // chips
    assert [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"][:2]] == [
        FOR_GOOD,
        [int(ExitCode.STOPPED)],
    ]


def test_ray_starts_as_many_processes_as_there_are_nodes() -> None:
    job = document("ray_job.yaml")["spec"]
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--processes {group['replicas']} " in job["entrypoint"]
    assert f"supervise.resources.GPU={gpus}" in job["entrypoint"]


@pytest.mark.parametrize(
    ("statuses", "starts", "status"), [("0", 1, 0), ("75 137 0", 3, 0), ("2", 1, 2), ("75 75 75", 3, 75)]
)
def test_a_gpu_host_starts_again_only_where_that_may_help(
    statuses: str, starts: int, status: int, tmp_path: Path
) -> None:
    program = tmp_path / "jaxpar"
    program.write_text(
        '#!/bin/bash\necho "$*" >> calls\nstatuses=($STATUSES)\nexit "${statuses[$(($(wc -l < calls) - 1))]}"\n'
    )
    program.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "STATUSES": statuses,
        "JAXPAR_RESTART_DELAY": "0",
        "JAXPAR_MOST_RESTARTS": "2",
    }
    command = ["bash", str(FOLDER / "gpu_host.sh"), "run.yaml", "--set", "train.steps=3"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert calls == ["train run.yaml --set checkpoint.resume=auto --set train.steps=3"] * starts


def test_the_image_copies_what_the_wheel_needs() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    words = [line.split() for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    assert {line[0] for line in words} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    copied = [name for line in words if line[0] == "COPY" for name in line[1:-1]]
    assert {"pyproject.toml", "jaxpar", "LICENSE", "README.md"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
