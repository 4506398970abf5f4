"""``init`` compiles a program once, also if its functions are defined anew; programs that differ share nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.utils import executables

LAYOUT = jp.Layout(jp.MeshSpec(data=2).build(jax.devices()[:2]), jp.Rules(embed="data", mlp=None))
COMPILE = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        found.extend([event] if event == COMPILE else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def maker(scale: float = 1.0) -> Callable[[jax.Array], Any]:
    return lambda key: {"w": jp.tag(scale * jax.random.normal(key, (8, 6)), "embed", "mlp")}


def start(make: Callable[[jax.Array], Any], layout: jp.Layout = LAYOUT, **options: Any) -> Any:
    return jp.init(layout, make, optax.adam(1e-3), **options)


def test_equal_programs_compile_once() -> None:
    executables._kept.clear()
    make, tx = maker(), optax.adam(1e-3)
    with compilations() as first:
        one = jp.init(LAYOUT, make, tx)
    with compilations() as again:
        same = jp.init(LAYOUT, make, tx)
        other = start(maker(), seed=3)  # a function and an optimizer that are defined anew
    assert first and again == []
    np.testing.assert_array_equal(one.params["w"], same.params["w"])
    assert not np.array_equal(one.params["w"], other.params["w"])
    assert same.params["w"].sharding == LAYOUT.sharding(("embed", "mlp"))
    assert same.metadata.tx is tx and jax.tree.structure(one) == jax.tree.structure(same)


@pytest.mark.slow
def test_what_differs_compiles_again() -> None:
    start(maker())
    devices = jp.Layout(jp.MeshSpec(data=2).build(jax.devices()[2:4]), LAYOUT.rules)
    rules = jp.Layout(LAYOUT.mesh, jp.Rules(embed=None, mlp="data"))
    for other in (
        lambda: start(maker(2.0)),
        lambda: start(maker(), devices),
        lambda: start(maker(), rules),
        lambda: start(maker(), precision="fp16"),
    ):
        with compilations() as found:
            state = other()
        assert found, other
    assert state.loss_scale is not None
    assert start(maker(), devices).params["w"].devices() == set(jax.devices()[2:4])


def test_a_function_that_reads_a_variable_gives_its_value_of_now() -> None:
    table = np.ones((8, 6), np.float32)
    make = lambda key: {"w": jp.tag(jnp.asarray(table), "embed", "mlp")}
    assert np.asarray(start(make).params["w"]).sum() == 48
    table = 2 * table
    assert np.asarray(start(make).params["w"]).sum() == 96


def test_host_callbacks_are_compiled_every_time() -> None:
    """Programs that call different functions on the host have the same text."""

    def make(value: float) -> Callable[[jax.Array], Any]:
        shape = jax.ShapeDtypeStruct((8, 6), np.float32)
        called = lambda: np.full((8, 6), value, np.float32)
        return lambda key: {"w": jp.tag(jax.pure_callback(called, shape), "embed", "mlp")}

    assert [np.asarray(start(make(n)).params["w"])[0, 0] for n in (1.0, 2.0)] == [1, 2]


class Big:
    """Stands for what a model's function refers to."""


@pytest.mark.slow
def test_no_executable_keeps_a_function_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    big = Big()
    gone = weakref.ref(big)
    make = lambda key, big=big: {"w": jp.tag(jax.random.normal(key, (8, 6)), "embed", "mlp")}
    start(make)
    del big, make
    gc.collect()
    assert gone() is None
    monkeypatch.setattr(executables, "_MOST", 2)
    for n in range(3):
        start(maker(float(n)))
    assert len(executables._kept) == 2
