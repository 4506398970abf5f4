"""Golden files: two stored programs, the text of a difference, and files that cannot be compared."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from by_hand import audited, collective
from error_texts import raises

import jaxpar as jp
from jaxpar.analysis.checkup.golden import against, differences, facts_of, to_text
from jaxpar.errors import ConfigError
from jaxpar.models.llama import make_llama, preset
from jaxpar.models.losses import next_token_loss

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUTS = Path(__file__).parents[3] / "configs" / "layouts"


@pytest.mark.parametrize("name", [pytest.param("fsdp_tp", marks=pytest.mark.slow), "tp_sp"])
def test_a_programs_cost_is_as_written_down(name: str, pytestconfig: pytest.Config) -> None:
    layout = jp.Layout(
        jp.MeshSpec(data=4, model=2).build(), jp.Layout.from_yaml(LAYOUTS / f"{name}.yaml", devices=8).rules
    )
    state = jp.abstract_state(layout, make_llama(preset("tiny")), optax.adamw(1e-3))
    tokens = jax.ShapeDtypeStruct((16, 64), "int32", sharding=layout.sharding(("batch", "seq"), (16, 64)))
    lowered = jp.train_step(layout, next_token_loss).lower(state, {"tokens": tokens, "targets": tokens})
    report = jp.audit(lowered.compile(), mesh=layout.mesh)
    # The size of temporaries depends on the machine's vector units.
    sizes = {use: report.memory[use] for use in ("argument", "output")}
    facts = facts_of(dataclasses.replace(report, memory=sizes), "cpu:8", {"jax": jax.__version__})
    file = GOLDEN / f"program_{name}_cpu.json"
    if pytestconfig.getoption("--update-golden"):
        file.write_text(to_text(facts))
    assert against(file, facts) == [], "if the change is meant: pytest --update-golden"


BASE = facts_of(
    audited(
        {"data": 4, "model": 1},
        collective("all-gather", ("data",), 2.0**30, source="Block.__call__ (layers.py:7)", count=2),
        collective("all-reduce", ("data",), 2.0**20),
        matmul_flops=1000,
        memory={"peak": 2**30, "temp": 2**20},
    ),
    "v5e:2x2",
    {"jax": "0.12", "libtpu": "0.0.50"},
)


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BASE), **fields}


def test_lines_of_code_may_move_and_bytes_may_tremble(tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(to_text(BASE))
    moved = audited(
        {"data": 4, "model": 1},
        collective("all-gather", ("data",), 2.0**30 * 1.0005, source="Block.__call__ (layers.py:99)"),
        collective("all-gather", ("data",), 2.0**30, source="Block.__call__ (layers.py:100)"),
        collective("all-reduce", ("data",), 2.0**20),
        matmul_flops=1000,
        memory={"peak": 2**30 + 2**19, "temp": 2**20},
    )
    assert against(tmp_path / "g.json", facts_of(moved, "v5e:2x2", {"jax": "0.12", "libtpu": "0.0.50"})) == []


def test_a_difference_is_readable() -> None:
    rows = copy.deepcopy(BASE["collectives"])
    rows[0]["count"] += 2
    rows[0]["wire_bytes"] += 1.25 * 2**30
    rows[1] = {**rows[1], "kind": "reduce-scatter"}
    now = changed(collectives=rows, matmul_flops=1500, memory={"peak": 2**31, "temp": 2**20}, certain=False)
    assert differences(BASE, now) == [
        "matmul FLOPs: +500 (1,000 → 1,500)",
        "all trip counts are known: True → False",
        "memory, peak: +1.00 GiB (1.00 GiB → 2.00 GiB)",
        "+2 all-gathers over data, +1.25 GiB, from Block.__call__ (layers.py)",
        "−1 all-reduce over data, −1.00 MiB, from the compiler",
        "+1 reduce-scatter over data, +1.00 MiB, from the compiler",
    ]
    larger = copy.deepcopy(BASE["collectives"])
    larger[0]["wire_bytes"] *= 1.5
    assert differences(BASE, changed(collectives=larger)) == [
        "same number of all-gathers over data, +1.00 GiB, from Block.__call__ (layers.py)"
    ]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"topology": "v5e:4x4"}, "(v5e:4x4)"),
        ({"mesh": {"model": 4}}, "(model 4)"),
        ({"versions": {"jax": "0.13", "libtpu": "0.0.50"}}, "(jax 0.13"),
    ],
)
def test_what_cannot_be_compared_says_so(now: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_text(to_text(BASE))
    with raises(ConfigError, said):
        against(file, changed(**now))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "JSON"),
        ("[]", "None"),
        (json.dumps({**BASE, "form": 2}), "got 2"),
        (json.dumps({k: v for k, v in BASE.items() if k != "memory"}), "g.json"),
    ],
)
def test_a_file_that_is_no_golden_file(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "g.json"
    file.write_text(content)
    with raises(ConfigError, said):
        against(file, BASE)
