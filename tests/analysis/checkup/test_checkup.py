"""A checkup as text, JSON and HTML, a program that does not fit, and the ``check`` command."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import optax
import pytest
from stored import facts, held, step

import jaxpar as jp
from jaxpar.analysis.checkup import checkup
from jaxpar.analysis.checkup.checkup import Checkup, examine, too_large
from jaxpar.analysis.checkup.findings import About
from jaxpar.analysis.checkup.html import page
from jaxpar.analysis.compile import ahead_of_time
from jaxpar.app.cli import main
from jaxpar.errors import CompileError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
ABOUT = About(tokens=32 * 256, model_flops=1e12, vocab=2048, seq=256, remat="full")
WARNING = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {mesh['data'=4], "
    "[{'data'}]} to {mesh['data'=4], [{}]} efficiently for HLO operation %x = f32[8]{0} copy(%y), "
    'metadata={op_name="jit(f)/mul"}. As'
)


def found(name: str = "tpu_fsdp_tp", **fields: Any) -> Checkup:
    return examine(step(name, **fields), facts(name)["mesh"], (), ABOUT)


def test_the_json_has_what_a_script_wants() -> None:
    told = json.loads(found(warnings=(WARNING,)).to_json())
    assert told["matmul_flops"] * 16 == 992137445376 and told["compile_cpu_seconds"] == 3.0
    assert told["wire_bytes"]["total"] == pytest.approx(sum(told["wire_bytes"]["by_axis"].values()))
    assert told["wire_bytes"]["total"] == pytest.approx(sum(told["wire_bytes"]["by_kind"].values()))
    assert {"argument", "temp", "peak", "host"} <= told["memory"].keys() and told["memory"]["peak"] == 9 * 2**20
    assert sum(told["memory_by_category"].values()) == told["memory"]["peak"]
    assert (
        told["topology"] == "v5e:4x4" and told["versions"]["libtpu"] == "0.0.50.1" and told["fits"] and told["certain"]
    )
    assert told["roofline"]["step"] > 0 and told["collectives"][0]["kind"] and told["largest"][0]["bytes"] > 0
    assert told["findings"] and {"kind", "text", "remedy", "where", "seconds", "bytes"} <= told["findings"][0].keys()
    assert "involuntary rematerialisation" in {finding["kind"] for finding in told["findings"]}
    assert told["refused"] == "" and told["warnings"] == [WARNING]


@pytest.mark.slow
def test_the_text_says_whether_it_fits_and_what_to_change() -> None:
    text = str(found())
    assert text.startswith("fits v5e:4x4: 9.00 MiB at the peak of 16.00 GiB, 15.99 GiB free\n")
    assert "largest tensors at the peak" in text and "A model, not a measurement" in text
    count = len(re.findall(r"^ +Remedy: ", text, re.MULTILINE))
    assert count == min(3, len(found().findings)) > 0
    small = found(memory={"argument": 0, "temp": 0, "peak": 2**20, "host": 3})
    assert re.search(r"^  not attributed +-\d+\.\d\d MiB\n  host +3 B$", str(small), re.MULTILINE)


@pytest.mark.slow
def test_the_memory_that_kept_weights_take_is_told_with_the_key_that_asked_for_it() -> None:
    line = r"^  kept weights +336.00 MiB{}$"
    asked = dataclasses.replace(ABOUT, reshard_after_forward=False)
    for about, said in ((asked, re.escape("  (parallel: {reshard_after_forward: false})")), (ABOUT, "")):
        kept = examine(step("tpu_kept"), facts("tpu_kept")["mesh"], (), about)
        assert re.search(line.format(said), str(kept), re.MULTILINE)
        assert json.loads(kept.to_json())["memory_by_category"]["kept weights"] == 336 * 2**20
    assert "kept weights" not in str(found("tpu_fsdp"))


@pytest.mark.slow
def test_a_peak_beyond_the_memory_does_not_fit() -> None:
    large = found(memory={"peak": 17 * 2**30})
    assert not large.fits and large.findings[0].kind == "does not fit"
    assert large.headline().startswith("DOES NOT FIT v5e:4x4: 17.00 GiB at the peak, 1.00 GiB more than a device has")
    gpus = examine(step("gpu_fsdp", "h100:8", memory={"peak": 75 * 2**30}), facts("gpu_fsdp")["mesh"])
    assert not gpus.fits  # the GPU compiler accepts programs of any size, and 80 GB are 74.5 GiB


def test_arguments_of_an_exported_program_have_their_paths() -> None:
    text = step("tpu_fsdp").text
    arguments = re.findall(r"""op_name="((?:state|batch)[^"]*)""", text)
    numbered = text
    for i, name in enumerate(dict.fromkeys(arguments)):
        numbered = numbered.replace(f'op_name="{name}"', f'op_name="args[{i}]"')
    given = tuple(held(f"params/{i}", (4, 4), ((), ()), 64) for i in range(len(set(arguments))))
    report = examine(step("tpu_fsdp", text=numbered), facts("tpu_fsdp")["mesh"], given).audit
    assert report is not None
    tensors = {c.tensor for c in report.collectives} - {""}
    assert tensors and all(re.fullmatch(r"params/\d+", tensor) for tensor in tensors)


OOM = (
    "the compiler rejected the program for v5e:2x4: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of "
    "memory on HBM, the total memory required for HLO temporaries (17.80G) exceeds available HBM (15.75G). HLO "
    "module: jit_call."
)


def test_both_forms_of_a_refusal_for_size_are_read() -> None:
    now = too_large(OOM, "none")
    assert now is not None and now.text == (
        "17.80 GiB of temporaries needed, but a program may use 15.75 GiB: 2.05 GiB too much"
    )
    assert now.remedy.startswith("recompute activations (model.remat=full, now none)")
    state = (
        held("params/w", (8,), ((),), 9 * 2**30),
        held("opt_state/m", (8,), ((),), 12 * 2**30, category="optimizer"),
    )
    earlier = too_large("Used 27.16G of 15.75G hbm. Exceeded hbm capacity by 11.41G.", held=state)
    assert (
        earlier is not None
        and earlier.where == "optimizer"
        and "21.00 GiB of it are the step's arguments" in earlier.text
    )
    assert too_large("INVALID_ARGUMENT: no such option") is None


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def texts(svg: ElementTree.Element) -> set[str | None]:
    return {node.text for node in svg.iter() if node.tag.endswith(("}text", "}title"))}


@pytest.mark.slow
def test_the_page_stands_alone_and_shows_three_pictures() -> None:
    about = found()
    text = page(about, "<run>", "<table>the layout</table>")
    assert "&lt;run&gt;" in text and "<table>the layout</table>" in text and "<script" not in text
    assert not re.search(r"""(?:src|href)=|url\(|https?://""", re.sub(r' xmlns(:xlink)?="[^"]*"', "", text))
    assert not any(node.get("id") for svg in svgs(text) for node in svg.iter())  # those of two figures would be equal
    memory, wire, overlap = map(texts, svgs(text))
    assert {"at the peak", "temporaries", "9.00 MiB of 16.00 GiB", "activations: 2.02 MiB"} <= memory
    assert about.audit is not None and about.roofline is not None
    axes = {"+".join(c.axes) for c in about.audit.collectives}
    assert axes | {c.kind for c in about.audit.collectives} | {"18.36 MiB", "all-gather over data: 10.31 MiB"} <= wire
    assert {"work", *(f"links over {a}" for a in axes), "hidden under it", "step 1.56 ms"} <= overlap
    assert {"compute: 315 µs", "385 µs", "longer than the work beside it: 18.8 µs"} <= overlap
    assert "A model, not a measurement, and sorted rather than in the order of the program." in text
    assert "16.00 GiB of the device" in texts(svgs(page(found(memory={"peak": 20 * 2**30}), "run"))[0])
    assert page(found(), "<run>", "<table>the layout</table>") == text


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_page_has_no_figures_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(purpose: str, **options: Any) -> Any:
        raise ImportError("numpy.core.multiarray failed to import")

    about = found()
    text = page(about, "run")
    assert "No figures: drawing a checkup needs the package" in text and "jaxpar[plots]" in text
    monkeypatch.setattr("jaxpar.analysis.checkup.figures.new_figure", broken)
    assert "No figures: numpy.core.multiarray failed to import" in page(about, "run")
    size = about.memory.categories["activations"]  # type: ignore[union-attr]
    assert not svgs(text) and f"<td>activations</td><td>{size:,} bytes</td>" in text and "What it sends" in text


def run(*words: str) -> int:
    return main(["check", str(QUICKSTART), "--set", "model.layers=2", "--topology", "v5e:4x4", *words])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the compiler by a stored program; an entry appended to the list, a step or an error, is its outcome
    instead."""
    instead: list[Any] = []

    def compile_for(*_: Any, **__: Any) -> Any:
        outcome = instead[-1] if instead else step("tpu_fsdp_tp")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(checkup, "compile_for", compile_for)
    monkeypatch.setattr(
        checkup,
        "examine",
        lambda program, sizes, given, about, repaired: examine(program, facts("tpu_fsdp_tp")["mesh"]),
    )
    return instead


def test_check_writes_its_files_and_keeps_a_golden_one(
    compiled: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"r.{name}" for name in ("json", "html", "hlo", "golden")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert run(*words) == 0
    screen = capsys.readouterr().out
    assert (
        "compiled for v5e:4x4 (TPU v5 lite) in 3 CPU s" in screen
        and f"golden file {files['golden']}: written" in screen
    )
    assert json.loads(files["json"].read_text())["fits"] and files["hlo"].read_text().startswith("HloModule")
    assert files["html"].read_text().count("<table>") > 5 and files["html"].read_text().startswith("<!doctype html>")
    words = ["--golden", str(files["golden"])]
    assert run(*words) == 0 and f"golden file {files['golden']}: no difference" in capsys.readouterr().out
    compiled.append(step("tpu_tp_sp"))
    assert run(*words) == 1
    screen = capsys.readouterr().out
    assert f"golden file {files['golden']}: DIFFERS\n  " in screen
    assert re.search(r"^  [+−]\d+ all-gathers? over model, \+\d+\.\d+ MiB, from \w", screen, re.MULTILINE)


@pytest.mark.slow
def test_a_golden_file_of_other_versions_is_refused(
    compiled: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--golden", str(tmp_path / "r.golden")]
    assert run(*words) == 0
    compiled.append(dataclasses.replace(step("tpu_fsdp_tp"), versions={"jax": "1.0"}))
    assert run(*words) == 2
    assert (
        "it has other versions (jax 0.12.0.1, libtpu 0.0.50.1) than this program (jax 1.0)" in capsys.readouterr().err
    )


def test_a_program_that_the_compiler_refuses_for_its_size_is_a_report(
    compiled: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled.append(CompileError(OOM))
    files = {name: tmp_path / f"r.{name}" for name in ("json", "html", "golden")}
    assert run(*(word for name, file in files.items() for word in (f"--{name}", str(file)))) == 1
    screen = capsys.readouterr().out
    assert "DOES NOT FIT v5e:4x4: 17.80 GiB of temporaries needed" in screen and f"the compiler: {OOM}" in screen
    told = json.loads(files["json"].read_text())
    assert (
        told["fits"] is False and told["certain"] is False and told["matmul_flops"] is None and told["refused"] == OOM
    )
    assert told["memory_by_category"]["parameters"] > 0 and "DOES NOT FIT" in files["html"].read_text()
    assert f"golden file {files['golden']}: not compared, because no program was compiled" in screen


def test_another_refusal_stays_an_error(compiled: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    compiled.append(CompileError("the compiler rejected the program for v5e:4x4: no such option"))
    assert run() == 1
    assert capsys.readouterr().err == "CompileError: the compiler rejected the program for v5e:4x4: no such option\n"


KINDS = "v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:4x4x4, h100:4x8"
UNKNOWN = f"MeshError: unknown accelerator 'v5f' in 'v5f:4x4'. Did you mean 'v5p'? Known are {KINDS}.\n"
NO_NAME = (
    "MeshError: 'v5e-16' is not a topology. Remedy: write KIND:SHAPE in chips, KIND:SHAPE*SLICES, or "
    "KIND:HOSTSxGPUS, such as "
    f"{KINDS}.\n"
)


@pytest.mark.parametrize(("name", "said"), [("v5f:4x4", UNKNOWN), ("v5e-16", NO_NAME)])
def test_a_misspelt_topology_is_named(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(QUICKSTART), "--topology", name]) == 2
    assert capsys.readouterr().err == said


def test_a_check_finds_what_xla_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "versions_of", lambda _: {"jax": "1.0"})
    monkeypatch.setattr(ahead_of_time, "description_of", lambda *_: "")
    monkeypatch.setattr(ahead_of_time, "_run", lambda *_: step("tpu_fsdp_tp"))
    layout = jp.Layout(jp.MeshSpec(data=8, model=2).on("v5e:4x4"), jp.Rules(batch="data", unannotated="replicate"))
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=numbers, feature_group_count=4)
    loss = lambda model, batch: (conv(batch["x"], model["w"], (1, 1), "SAME") ** 2).mean()
    batch = {"x": jp.tag(jax.ShapeDtypeStruct((8, 8, 8, 4), "float32"), "batch", None, None, None)}
    make_model = lambda key: {"w": jax.numpy.ones((3, 3, 1, 4))}
    report = checkup.check_up("v5e:4x4", layout, make_model, optax.sgd(0.1), loss, batch)
    (finding,) = (finding for finding in report.findings if finding.kind == "wrong in XLA")
    assert "kernel gradient of a grouped convolution" in finding.text and "over data" in finding.where
