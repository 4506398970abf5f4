"""``explain`` and ``check``: their output, correct sums, and a report of every problem."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises

import jaxpar as jp
from jaxpar.analysis.layout.report import Report
from jaxpar.errors import LayoutError
from jaxpar.models.llama import PRESETS, make_llama, preset
from jaxpar.models.losses import next_token_loss

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUTS = ("dp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp")
DEVICES = 64
TX = optax.sgd(0.1, momentum=0.9)  # one moment per parameter keeps the dumps short


@pytest.fixture(scope="module")
def report_of(layout_of: Any) -> Any:
    """``report_of(preset, layout)`` on 64 devices that do not exist."""

    def explain(model: str, name: str) -> Report:
        return jp.explain(layout_of(name, DEVICES), make_llama(preset(model)), TX)

    return functools.cache(explain)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", PRESETS)
def test_reports_are_as_written_down(model: str, name: str, report_of: Any, pytestconfig: pytest.Config) -> None:
    file, text = GOLDEN / f"{model}_{name}.txt", report_of(model, name).to_text(width=300)
    if pytestconfig.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "if the change is meant: pytest --update-golden"


def test_no_dump_is_left_over() -> None:
    assert {file.name for file in GOLDEN.glob("*.txt")} == {f"{m}_{name}.txt" for m in PRESETS for name in LAYOUTS}


@pytest.mark.parametrize("model", PRESETS)
def test_totals_follow_the_formula(model: str, report_of: Any) -> None:
    config = PRESETS[model]
    whole, norms = 4 * config.params, 4 * (2 * config.layers + 1) * config.embed
    ways = {"dp": 1, "fsdp": DEVICES, "hsdp": DEVICES // 2, "tp": 2, "tp_sp": 2, "fsdp_tp": DEVICES}
    for name, part in itertools.product(LAYOUTS, ("params", "opt_state")):
        local = (whole - norms) // ways[name] + norms
        total = report_of(model, name).total(part)
        assert (total.tensors, total.bytes, total.device_bytes) == (12, whole, local), (name, part)
        assert total.copies == pytest.approx(local * DEVICES / whole)
        assert total.replicated == pytest.approx(1.0 if name == "dp" else norms / whole)


def test_json_holds_every_row_and_the_same_totals(report_of: Any) -> None:
    report = report_of("tiny", "fsdp_tp")
    data = json.loads(report.to_json())
    assert data["totals"] == [asdict(total) for total in report.totals()]
    assert [row["path"] for row in data["rows"]] == [row.path for row in report.rows]
    for part in data["totals"]:
        rows = [row for row in data["rows"] if row["part"] == part["part"]]
        assert part["bytes"] == sum(math.prod(row["shape"]) * ITEMSIZES[row["dtype"]] for row in rows)
    assert (data["mesh"], data["devices"]) == ({"data": 32, "model": 2}, 64)


ITEMSIZES = {"float32": 4, "int32": 4, "key<fry>": 8}
BAD_NAME = "<b>[bold]&"


def test_html_and_text_show_names_as_they_are(mlp: Any) -> None:
    layout = mlp.layout(jp.Rules(batch=None, **{"[red]<i>": "data"}))
    report = jp.explain(layout, lambda key: {BAD_NAME: jp.tag(jnp.ones(8), "[red]<i>")}, TX)
    html = report._repr_html_()
    assert f"params/{BAD_NAME}" in report.to_text() and "[red]<i> = data" in report.to_text()
    assert "<b>[" not in html and "<i>" not in html
    assert "<td>params/&lt;b&gt;[bold]&amp;</td>" in html and "<td>[red]&lt;i&gt;</td>" in html
    assert html.count("<tr>") == html.count("</tr>") == len(report.rows) + 2 * len(report.totals()) + 1


def explained(mlp: Any, rules: jp.Rules, **options: Any) -> Report:
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)
    return jp.explain(mlp.layout(rules), mlp.make, TX, **{"batch": batch, "loss_fn": mlp.loss} | options)


UNUSED = jp.Rules(batch="data", embed=None, mlp=None, heads="model", params={"mlp": "data"}, optimizer=jp.over("data"))


def test_unused_rules_are_named_and_certain_once_activations_are_traced(mlp: Any) -> None:
    traced, guessed = explained(mlp, UNUSED), explained(mlp, UNUSED, batch=None)
    assert (traced.unused, traced.traced) == (("heads",), True)
    assert "rules not used: heads" in traced.to_text()
    assert (guessed.unused, guessed.traced) == (("batch", "heads"), False)
    assert (
        "rules not used by parameters, optimizer or batch (activations were not traced): batch, " in guessed.to_text()
    )


def test_activations_are_listed_with_the_line_that_constrains_them(layout_of: Any) -> None:
    tokens = jp.tag(jax.ShapeDtypeStruct((64, 32), np.int32), "batch", "seq")
    batch = {"tokens": tokens, "targets": tokens}
    make = make_llama(preset("tiny"))
    report = jp.explain(layout_of("tp_sp", 64), make, TX, batch=batch, loss_fn=next_token_loss)
    rows = {(row.dims, row.shape, row.spec) for row in report.rows if row.part == "activations"}
    data, model, whole = ("data",), ("model",), ()
    assert (("batch", "residual_seq", "embed"), (64, 32, 128), (data, model, whole)) in rows
    assert (("batch", "seq", "mlp"), (64, 32, 384), (data, whole, model)) in rows
    assert (("batch", "seq", "kv_heads", "head_dim"), (64, 32, 2, 32), (data, whole, model, whole)) in rows
    # The loss computes the logits in eight pieces of the sequence.
    assert (("batch", "seq", None, "vocab"), (64, 1, 4, 256), (data, whole, whole, model)) in rows
    places = {row.path for row in report.rows if row.part == "activations"}
    assert {
        place for place in places if not re.fullmatch(r"[\w.]+ \((layers|model|losses|embedding)\.py:\d+\)", place)
    } == set()
    assert any(place.startswith("SwiGLU.__call__ ") for place in places)
    assert [row.path for row in report.rows if row.part == "batch"] == ["batch/targets", "batch/tokens"]
    assert not report.unused and not report.problems


def test_an_activation_that_does_not_fit_is_a_problem_not_an_exception(mlp: Any) -> None:
    batch = jp.tag(jax.ShapeDtypeStruct((6, 16), np.float32), None, None)
    first, second = explained(mlp, mlp.rules, batch=batch).problems
    text = (
        r"hint\(\) in Mlp\.loss \(conftest\.py:\d+\) \[6, (\d+)\] \(batch, (\w+)\): the dim 'batch' has size 6, "
        r".*data=8.*"
    )
    assert [re.fullmatch(text, problem)[2] for problem in (first, second)] == ["mlp", "embed"]


def test_gradients_that_do_not_fit_their_role_are_problems_and_use_its_rules(mlp: Any) -> None:
    rules = jp.Rules(batch="data", embed=None, mlp=None, gradients={"mlp": ("data", "model")})
    layout = mlp.layout(rules, mesh=jp.MeshSpec(data=4, model=4).abstract())
    report = jp.explain(layout, mlp.make, TX)
    assert [problem.split(" (")[0] for problem in report.problems] == [
        "gradient of params/block/bias [24]",
        "gradient of params/block/down [24, 16]",
        "gradient of params/block/up [16, 24]",
    ]
    assert report.unused == ("batch",)


def test_an_untagged_batch_is_refused(mlp: Any) -> None:
    with raises(LayoutError, "batch/x", "logical"):
        explained(mlp, mlp.rules, batch={"x": jax.ShapeDtypeStruct((8, 16), np.float32)})


def test_check_raises_one_error_with_every_problem(mlp: Any) -> None:
    def make(key: jax.Array) -> Any:
        odd = {"a": jp.tag(jnp.ones(12), "mlp"), "b": jp.tag(jnp.ones(8), "head"), "c": jnp.ones((3, 3))}
        return mlp.make(key) | odd

    batch = jp.tag(jax.ShapeDtypeStruct((12, 16), np.float32), "batch", None)
    options = {"batch": batch, "loss_fn": mlp.loss, "max_replicated": 0.01}
    with raises(LayoutError, "params/a", "data=8") as error:
        jp.check(mlp.layout(UNUSED), make, TX, **options)
    starts = [
        r"params/a \[12\] \(mlp\): the dim 'mlp' has size 12",
        r"params/b \[8\] \(head\): unknown logical dim 'head'. Did you mean 'heads'\?",
        r"params/c \[3, 3\] has no logical dims",
        r"batch \[12, 16\] \(batch, None\): the dim 'batch' has size 12",
        r"hint\(\) in Mlp.loss \(conftest.py:\d+\) \[12, 24\] \(batch, mlp\)",
        r"hint\(\) in Mlp.loss \(conftest.py:\d+\) \[12, 16\] \(batch, embed\)",
        r"the rule heads is not used by any tensor",
        r"\d+\.\d\d% of the \d+\.\d\d KiB of parameters",
    ]
    problems = error.value.problems
    assert [problem for problem, start in zip(problems, starts, strict=True) if not re.match(start, problem)] == []


def test_strict_minds_unused_rules_and_only_when_certain(mlp: Any) -> None:
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)
    options = {"batch": batch, "loss_fn": mlp.loss}
    args = (mlp.layout(UNUSED), mlp.make, TX)
    with raises(LayoutError, "heads", "tensor"):
        jp.check(*args, **options)
    assert jp.check(*args, **options, strict=False) == jp.explain(*args, **options)
    assert jp.check(*args) == jp.explain(*args)
    # One table may serve several models, and init sees no activations: it accepts the rule, which places nothing.
    without = {dim: rule for dim, rule in UNUSED.to_dict().items() if dim != "heads"}
    specs = lambda rules: [
        leaf.sharding.spec for leaf in jax.tree.leaves(jp.abstract_state(mlp.layout(rules), mlp.make, TX))
    ]
    assert specs(UNUSED) == specs(jp.Rules.from_dict(without))


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        ({"embed": None, "params": {"embed": "data"}}, []),
        (
            {"embed": "model", "params": {"embed": "data"}},
            ["embed is not used by any tensor. Remedy: set it to None, because params: embed requires the name, or "],
        ),
        (
            {"embed": "data", "heads": None, "params": {"heads": "data"}, "indivisible": {"heads": "replicate"}},
            ["params: heads is not used by any tensor. Remedy: remove it, or "],
        ),
    ],
    ids=["needed", "needed but never applied", "named elsewhere"],
)
def test_no_remedy_for_an_unused_rule_leads_to_another_error(table: Any, texts: list[str]) -> None:
    """A role may only overlay what the base table names: to remove such a rule would be the next error."""
    batch = jp.tag(jax.ShapeDtypeStruct((8, 16), np.float32), "batch", None)
    layout = jp.Layout(jp.MeshSpec(data=4, model=2).abstract(), jp.Rules(batch="data", mlp=None, **table))
    loss = lambda params, x: jnp.mean(jp.hint(x @ params["w"], "batch", "mlp"))
    args = layout, lambda key: {"w": jp.tag(jnp.ones((16, 8)), "embed", "mlp")}, TX
    want = [f"the rule {text}correct its intended annotation." for text in texts]
    if not want:
        assert jp.check(*args, batch=batch, loss_fn=loss).unused == ()
        return
    with pytest.raises(LayoutError) as error:
        jp.check(*args, batch=batch, loss_fn=loss)
    assert list(error.value.problems) == want


def test_max_replicated_bounds_what_lies_whole_on_every_device(mlp: Any) -> None:
    args = (mlp.layout(), mlp.make, TX)
    whole = (24 + 1) / (2 * 16 * 24 + 16 * 16 + 24 + 1)
    jp.check(*args, max_replicated=whole)
    with raises(LayoutError, "max_replicated", "opt_state/0/trace/block/bias"):
        jp.check(*args, max_replicated=whole - 1e-4)
    one = (mlp.one_device, *args[1:])
    assert jp.check(*one, max_replicated=0.0).total().replicated == 0


NOWHERE = """
import time
import jax, optax
import jaxpar as jp
from jaxpar.models.llama import make_llama, preset
start = time.process_time()
layout = jp.Layout.from_yaml({file!r}, devices=4096)
report = jp.explain(layout, make_llama(preset("llama3_1_70b")), optax.adamw(1e-3))
print(time.process_time() - start, report.devices, report.total("params").device_bytes)
try:
    jax.devices()
except RuntimeError:
    print("no backend")
"""


def test_70b_on_4096_devices_takes_no_device_no_compiler_and_two_seconds() -> None:
    file = Path(__file__).parents[3] / "configs" / "layouts" / "fsdp.yaml"
    # A platform that does not exist: any code that requests a device, or compiles for one, fails.
    run = subprocess.run(
        [sys.executable, "-c", NOWHERE.format(file=str(file))],
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result, backend = run.stdout.splitlines()
    seconds, devices, local = result.split()
    norms = 4 * 161 * 8192
    assert (int(devices), int(local)) == (4096, (4 * PRESETS["llama3_1_70b"].params - norms) // 4096 + norms)
    assert backend == "no backend"
    assert float(seconds) < 2


def test_a_report_gives_the_row_of_a_path(mlp: Any) -> None:
    report = jp.explain(mlp.layout(), mlp.make, TX)
    assert report["params/block/bias"].path == "params/block/bias"
    with pytest.raises(KeyError, match="'params/block/bais'.*'params/block/bias'"):
        report["params/block/bais"]
