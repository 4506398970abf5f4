"""When workers of local SGD exchange: schedules, runs that follow them, and bytes of runs in 8 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st
from server_cases import mortal, named, nnx_program, run, same, table_program

import jaxpar as jp
from jaxpar.errors import ConfigError
from jaxpar.parameter_server import ServerConfig, ServerRun
from jaxpar.parameter_server.config import DeltaBits
from jaxpar.parameter_server.quantized_deltas import add, dequantize, quantize
from jaxpar.parameter_server.sync_schedule import SyncSchedule, check_steps

ADAMW = optax.adamw(1e-2)
MEAN: dict[str, Any] = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 9), max_size=3), st.integers(1, 9), st.integers(1, 90))
def test_rounds_are_those_that_counting_gives(later: dict[int, int], first: int, steps: int) -> None:
    phases = {0: first} | later
    schedule = SyncSchedule.of(phases)
    begins = [0]
    while begins[-1] <= steps:
        begins.append(begins[-1] + phases[max(step for step in phases if step <= begins[-1])])
    assert [schedule.first_step(n) for n in range(len(begins))] == begins
    assert list(schedule.steps_of(len(begins) - 2)) == list(range(begins[-2], begins[-1]))
    assert schedule.rounds(steps) == len(begins) - 2


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0, "sync_every must"),
        ({0: 1, "60": 20}, "'60'"),
        ({0: 1, 60: 0}, "sync_every[60]"),
        ({1000: 20}, "1,000"),
        ({}, "0; it"),
    ],
)
def test_bad_schedules(value: Any, name: str) -> None:
    with raises(ConfigError, name):
        ServerConfig("local_sgd", sync_every=value)


@pytest.mark.parametrize(
    ("steps", "every", "name"),
    [
        (401, 20, "401"),
        (7, 20, "7"),
        (405, {0: 1, 60: 20}, "405"),
    ],
)
def test_a_run_ends_with_a_round(steps: int, every: Any, name: str) -> None:
    with raises(ConfigError, name):
        check_steps(steps, every)
    check_steps(440, every)


def _by_hand(program: Any, ends: list[int]) -> dict[str, np.ndarray]:
    """The mean of two workers' parameters after each of some steps, on one device."""
    layout = program.layout()
    states = [jp.init(layout, program.make_model, program.tx, seed=program.seed) for _ in range(2)]
    step = jp.train_step(layout, program.loss_fn, donate=False)
    read = [program.batches(worker, 2) for worker in range(2)]
    for begin, end in zip([0, *ends], ends, strict=False):
        starts = states[0].params
        for n in range(begin, end):
            states = [step(state, read[w](n))[0] for w, state in enumerate(states)]
        changes = [jax.tree.map(lambda x, y: x - y, starts, state.params) for state in states]
        mean = jax.tree.map(lambda x, a, b: x - jnp.float32(1) * ((a + b) / jnp.float32(2)), starts, *changes)
        states = [dataclasses.replace(state, params=mean) for state in states]
    return named(states[0].params)


def test_a_growing_schedule_is_what_one_device_computes_and_counts_its_bytes(tmp_path: Path) -> None:
    program = dataclasses.replace(table_program(12, 12, sparse=False), tx=ADAMW)
    config = ServerConfig("local_sgd", servers=2, workers=2, sync_every={0: 1, 3: 2, 5: 4}, **MEAN)
    result = run(program, config, 13, tmp_path / "run")  # rounds end after 1, 2, 3, 5, 9 and 13 steps
    assert same(result.params, _by_hand(program, [1, 2, 3, 5, 9, 13]))
    assert list(result.reports[0].losses) == list(range(13)) and result.reports[0].steps == 13
    size = sum(x.nbytes for x in result.params.values())
    assert result.reports[1].traffic.pushed == result.reports[1].traffic.pulled == 6 * size


def test_numbers_in_4_bits_are_exact_where_they_can_be() -> None:
    x = np.array([[7, -7, 3], [0, -1, 5]], np.float32)
    assert quantize(x, 4).values.tolist() == [[-105, 3, 95]]  # 7 and -7, 3 and 0, -1 and 5
    assert np.array_equal(dequantize(quantize(x, 4)), x) and dequantize(quantize(np.array(-2.0), 4)) == -2
    rounded = add(np.zeros((2, 3), jnp.bfloat16), quantize(x, 4))
    assert rounded.dtype == jnp.bfloat16 and rounded.tolist() == x.tolist()


@pytest.mark.slow
def test_a_warm_up_as_long_as_the_run_is_an_exchange_after_each_step(tmp_path: Path) -> None:
    program = nnx_program(ADAMW)
    warm = ServerConfig("local_sgd", workers=2, sync_every={0: 1, 6: 3}, **MEAN)
    plain = dataclasses.replace(warm, sync_every=1)
    assert same(run(program, warm, 6, tmp_path / "warm").params, run(program, plain, 6, tmp_path / "plain").params)


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "bits"), [("int8", 8), ("int4", 4)])
def test_runs_in_few_bits_send_few_bytes_both_ways_and_survive_kills(
    compression: Any, bits: DeltaBits, tmp_path: Path
) -> None:
    """A worker adds up changes, and one that was killed reads everything: the parameters are equal bit by bit."""
    program = nnx_program(ADAMW)
    config = ServerConfig(
        "local_sgd", servers=2, workers=2, sync_every={0: 1, 4: 3}, compression=compression, snapshot_every=2, **MEAN
    )
    result = run(program, config, 13, tmp_path / "run")
    size = sum(x.nbytes for x in result.params.values())
    small = sum(quantize(x, bits).nbytes for x in result.params.values())
    traffic = result.reports[1].traffic
    assert traffic.pushed == 7 * small and traffic.pulled == size + 6 * small
    exact = run(program, dataclasses.replace(config, compression=None), 13, tmp_path / "exact")
    for name, value in result.params.items():
        assert not np.array_equal(value, exact.params[name])
        np.testing.assert_allclose(value, exact.params[name], atol=2e-3 if bits == 8 else 2e-2)
    with ServerRun(program, config, steps=7, folder=tmp_path / "killed", cluster="threads") as going:
        going.wait()
        transport, start = mortal(going)
        for server in (0, 1):  # their logs must hold the last change and its rounding error
            transport.kill(server)
            start(server)
    assert same(run(program, config, 13, tmp_path / "killed").params, result.params)
