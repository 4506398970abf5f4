"""Finding a platform's compiler: its interpreter, its versions, and the requests to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from error_texts import raises

from jaxpar.analysis.compile import compilers, worker
from jaxpar.analysis.compile.compilers import COMPILERS, description_of, environment_of, versions_of
from jaxpar.errors import CompileError, MeshError, MissingExtraError
from jaxpar.sharding.hardware.topology import Topology

METADATA = [
    'libtpu==0.0.50.*; extra == "tpu"',
    'jax-cuda12-plugin[with-cuda]<=9,>=8; extra == "cuda13"',
    'jax-cuda13-plugin[with-cuda]<=0.12.0.1,>=0.12.0.1; extra == "cuda13"',
    'jax-cuda13-plugin<=9,>=8; extra == "cuda13-local"',
]
JAX = jax.__version__
FITTING = {"tpu": {"libtpu": "0.0.50.1"}, "gpu": {"jax-cuda13-plugin": "0.12.0.1", "nvidia-cudnn-cu13": "9.28.0.42"}}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A function that writes an interpreter with the given versions, configures it for a platform, and returns its
    path."""

    def make(platform: str, **versions: str | None) -> str:
        compiler = COMPILERS[platform]
        held = {"jax": JAX, **dict.fromkeys((compiler.plugin, *compiler.others)), **versions}
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(held)}\nE\n")
        python.chmod(0o755)
        monkeypatch.setenv(compiler.variable, str(python))
        monkeypatch.setattr(compilers, "requires", lambda package: METADATA)
        return str(python)

    return make


@pytest.mark.parametrize("platform", COMPILERS)
def test_a_fitting_compiler_tells_its_versions(fake, platform: str) -> None:  # type: ignore[no-untyped-def]
    fake(platform, **FITTING[platform])
    assert versions_of(COMPILERS[platform]) == {"jax": JAX, **FITTING[platform]}


@pytest.mark.parametrize(
    ("platform", "plugin"),
    [("tpu", "libtpu"), ("gpu", "jax-cuda13-plugin")],
)
def test_without_a_compiler_the_extra_is_named(  # type: ignore[no-untyped-def]
    fake, platform: str, plugin: str
) -> None:
    fake(platform)
    with raises(MissingExtraError, plugin):
        versions_of(COMPILERS[platform])


def test_another_jax_is_refused(fake) -> None:  # type: ignore[no-untyped-def]
    fake("gpu", **FITTING["gpu"], jax="0.11.0")
    with raises(CompileError, "0.11.0"):
        versions_of(COMPILERS["gpu"])


@pytest.mark.parametrize(
    ("platform", "plugin", "version"),
    [
        ("tpu", "libtpu", "0.0.49.2"),
        ("gpu", "jax-cuda13-plugin", "0.12.0"),
    ],
)
def test_a_compiler_for_another_jax_is_refused(  # type: ignore[no-untyped-def]
    fake, platform: str, plugin: str, version: str
) -> None:
    fake(platform, **{plugin: version})
    with raises(CompileError, plugin, version):
        versions_of(COMPILERS[platform])


def test_this_jax_says_which_compilers_it_wants() -> None:
    requirements = compilers.requires("jax") or []
    assert all(compilers._required_versions(compiler, requirements) for compiler in COMPILERS.values())


def test_a_topology_is_asked_for_as_the_compiler_names_it() -> None:
    def asked(name: str) -> dict[str, object]:
        return description_of(Topology.parse(name), FITTING["gpu"])

    assert asked("v5e:4x4*2") == {"platform": "tpu", "topology_name": "v5e:4x4", "num_slices": 2}
    assert asked("v4:2x2x2") == {"platform": "tpu", "topology_name": "v4:2x2x2", "chip_config_name": "megacore"}
    one, four = asked("h100:8"), asked("h100:4x8")
    assert (one["platform"], one["topology"], four["topology"]) == ("cuda", "1x1x8", "4x1x8")
    target = str(one["target_config"])
    assert target == four["target_config"] and "core_count: 132" in target
    assert target.endswith("dnn_version_info { major: 9 minor: 28 patch: 0 }\n")
    assert f'device_description_str: "{Topology.parse("h100:8").device_kind}"' in target


def test_no_flag_of_the_environment_reaches_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--some_flag=1")
    for compiler in COMPILERS.values():
        environment = environment_of(compiler)
        assert environment["JAX_PLATFORMS"] == "cpu" and not {"XLA_FLAGS", "LIBTPU_INIT_ARGS"} & environment.keys()


def gpus(hosts: int, each: int) -> list[SimpleNamespace]:
    """GPUs as the compiler describes them ahead of time: all of slice 0."""
    numbers = range(hosts * each)
    return [
        SimpleNamespace(id=i, process_index=i // each, slice_index=0, platform="gpu", device_kind="H100")
        for i in numbers
    ]


def test_inner_axes_stay_on_one_host_of_gpus() -> None:
    places = worker._arranged(gpus(4, 8), {"replica": 2, "data": 2, "model": 8})
    hosts = [[{device.process_index for device in row} for row in block] for block in places]
    assert hosts == [[{0}, {1}], [{2}, {3}]]


def test_a_mesh_that_tears_hosts_apart_is_refused() -> None:
    with raises(MeshError, "data=4", "model=6"):
        worker._arranged(gpus(3, 8), {"data": 4, "model": 6})
