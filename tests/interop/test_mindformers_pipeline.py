"""The layers of each stage of a MindFormers configuration whose model has layers outside of the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from mindformers_files import row, run_of

from jaxpar.errors import ConfigError
from jaxpar.interop.configurations.mindformers.pipeline import StageLayers

MIXTURE = {"m__num_experts": 4, "recompute_config__recompute": False}


@pytest.mark.parametrize(
    ("layers", "dense", "depth", "offset", "each", "stack"),
    [
        (8, 0, 0, 0, None, 8),
        (7, 0, 1, 0, [4, 3], 7),  # MindFormers counts the layer of a further token
        (8, 0, 1, [1, 0], [5, 3], 8),
        (8, 2, 0, 0, [2, 4], 6),
        (7, 3, 1, [1, -1], [2, 2], 4),
        (4, 2, 0, 0, None, 2),  # the first stage would have no layer with experts
        (5, 2, 1, 0, [1, 2], 3),
    ],
)
def test_layers_per_stage(layers: int, dense: int, depth: int, offset: Any, each: list[int] | None, stack: int) -> None:
    mtp: dict[str, Any] = {"m__mtp_depth": depth} if depth else {}
    found = run_of(**MIXTURE, **mtp, m__num_layers=layers, m__first_k_dense_replace=dense, m__offset=offset)
    found.report.check()
    pipeline = found.config["parallel"]["pipeline"]
    assert pipeline.get("layers_per_stage") == (each if each is None or each[0] != each[1] else None)
    assert found.config["rules"].get("indivisible") == ({"layers": "replicate"} if stack % 2 else None)
    if dense or depth:
        note = "first layers without experts and layers of further tokens run on all stages"
        assert row(found, "model.model_config.offset") == ("translated", "parallel.pipeline.layers_per_stage", note)


def test_no_more_layers_recompute_than_a_stage_has() -> None:
    changes = MIXTURE | {"recompute_config__recompute": [4, 2]}
    found = run_of(**changes, m__first_k_dense_replace=2)
    assert found.config["parallel"]["pipeline"]["recompute"] == [2, 2]


@given(
    pieces=st.integers(1, 3).flatmap(lambda virtual: st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=2),
                                                              min_size=virtual, max_size=virtual)),
    dense=st.integers(0, 5), further=st.integers(0, 2),
)  # fmt: skip
def test_the_layers_in_the_pipeline_are_cut_into_all_pieces(pieces: list[list[int]], dense: int, further: int) -> None:
    counted = [count for piece in pieces for count in piece]
    stack = sum(counted) - dense - further
    if stack < len(counted):
        return
    flat = StageLayers(pieces, dense, further).flat
    assert len(flat) == len(counted) and sum(flat) == stack and min(flat) >= 1
    if dense < counted[0] and further < counted[-1]:
        assert flat[1:-1] == counted[1:-1]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"m__mtp_depth": 1}, "mtp_depth"),
        ({"m__first_k_dense_replace": 7}, "7"),
    ],
)
def test_offsets_that_do_not_fit(changes: dict[str, Any], name: str) -> None:
    with raises(ConfigError, name):
        run_of(**MIXTURE, **changes)
